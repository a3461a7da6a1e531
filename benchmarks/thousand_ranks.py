"""Host work of many ranks on a machine without GPUs: nice python benchmarks/thousand_ranks.py

Ranks are forks of one process that has torch and graphmoe imported, so each adds some MB. They run graphmoe's
own functions, stage by stage; all wait for the parent between two stages. A node has 8 ranks.

Real: processes, the rendezvous store, gloo groups of object collectives, launchers with torch elastic, files.
Simulated: groups of tensors have torch's "fake" backend (NCCL's, too, connect at first use), a launcher's
worker is an empty program, ranks above 7 write files without a saver process, and those above 63 check no
memory and read no tensors. Three of the five jobs meet at a store without graphmoe's checks, to save memory.
"""

import functools
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
    # torch asks the name service for the names of its peers: many at once would wait for its timeout
    "RES_OPTIONS": "attempts:1 timeout:1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}  # fmt: skip
# ruff: noqa: E402
if __name__ == "__main__":  # before torch is imported, which reads some of them
    os.environ |= ENVIRONMENT
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from benchmarks import forks
from benchmarks.forks import CountedStore, Gate, Numbers, alone, in_children, private_mib, traffic
from graphmoe import worker
from graphmoe.checkpoint.contents import write_here
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.command.hydra import compose_config, read_words
from graphmoe.config.arguments import parse_args, run_tool
from graphmoe.config.ranges import ConfigError
from graphmoe.ops.collectives import use_groups
from graphmoe.optim.base import COUNTERS
from graphmoe.plan.layout import REPLICATED, Layout
from graphmoe.plan.plan import plan_of
from graphmoe.runtime.dispatch import make_dispatcher
from graphmoe.runtime.host.signals import FOLDER_HELD, LAUNCHER_PID
from graphmoe.runtime.host.tuning import start_host
from graphmoe.runtime.launch import elastic, meeting
from graphmoe.runtime.launch.nodes import Nodes
from graphmoe.runtime.ranks import Mesh, Ranks
from graphmoe.runtime.torch_compat import fake_process_group
from graphmoe.training.build import build
from graphmoe.training.dry_run import dry_run
from graphmoe.training.replicas import ReplicaCheck
from graphmoe.training.run import check_memory, check_start
from graphmoe.training.saves import Saves
from graphmoe.training.slow_ranks import SlowRanks
from graphmoe.training.trainer import StopFlag

NODE = 8
GLOO_MESH = 256  # most ranks with a mesh of gloo groups, whose threads a system limits
MIB_OF_A_RANK = 15  # with air: what a size needs to start
STEPS = 4
TENSORS, ROWS = 16, 64  # of the saved state: 1,024 rows in all, so each of 1,024 ranks has a whole one
CPU = torch.device("cpu")
WORDS = (
    "run.device=cpu", "data=synthetic", "compile.enabled=false", "log.tensorboard=false", "log.report=false",
    "host.numa=none", "host.threads=1", "train.micro_batch_size=1", "train.val_batches=0",
)  # fmt: skip
MODEL = (
    "model=tiny", "model.num_layers=4", "model.hidden_size=64", "model.vocab_size=256", "data.seq_len=32",
    "model.expert_ffn_size=32", "model.dense_ffn_size=64", "model.shared_ffn_size=32", "optim.bucket_mb=0.1",
)  # fmt: skip
MANY = ("parallel.ep=8", "parallel.tp=2")
DRY = (
    "model=deepseek_v2_lite", "model.num_layers=8", "parallel.pp=4", "parallel.ep=8", "data.seq_len=4096",
    "precision.compute=bf16",
)  # fmt: skip


@dataclass
class RanksArgs:
    """Host work of many ranks on a machine without GPUs."""

    sizes: list[int] = field(default_factory=lambda: [64, 128, 256, 512, 1024])
    """Numbers of ranks, multiples of 8."""
    out: Path | None = None
    """JSON file for the figures."""


# Stages. Every rank runs each with one object, which holds what the rank has so far.


def rendezvous(r: SimpleNamespace) -> None:
    def counted(*arguments: Any) -> CountedStore:
        r.store = CountedStore(store_of_ranks(*arguments))
        return r.store

    store_of_ranks = meeting.store_of_ranks
    with (
        mock.patch.object(meeting, "store_of_ranks", counted),
        mock.patch("graphmoe.runtime.ranks.backend_of", lambda device: "fake"),
    ):
        r.ranks = worker.join(r.config)


def connect(r: SimpleNamespace) -> None:
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    r.store = CountedStore(dist.TCPStore(*where, is_master=r.rank == 0, wait_for_workers=False))
    dist.init_process_group("fake", store=r.store, rank=r.rank, world_size=r.plan.layout.size("world"))


def agree(r: SimpleNamespace) -> None:
    with mock.patch.dict(os.environ, {FOLDER_HELD: str(r.folder)} if r.rank < NODE else {}):
        worker._agree(r.config, r.folder, r.ranks)


def checks(r: SimpleNamespace) -> None:
    start_host(r.config.host, CPU, NODE, r.ranks.gather)
    size = r.ranks.size
    r.ranks.on_each(lambda: check_memory(plan_of(r.config, size), CPU) if r.rank < forks.WHOLE else None)
    r.ranks.on_first(lambda: check_start(r.config, r.folder))


def mesh(r: SimpleNamespace) -> None:
    use_groups(Mesh(r.plan.layout))


def gloo_mesh(r: SimpleNamespace) -> None:
    make = dist.new_subgroups_by_enumeration
    over_gloo = mock.patch.object(
        dist, "new_subgroups_by_enumeration", lambda *given, **named: make(*given, **named, backend="gloo")
    )
    with over_gloo:
        groups = sorted({*Mesh(r.plan.layout)._groups.values()}, key=lambda group: group.group_name)
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    r.ranks.barrier()
    for group in groups:
        dist.destroy_process_group(group)


def steps(r: SimpleNamespace) -> None:
    r.ranks = Ranks()
    slow_ranks, stop = SlowRanks(r.ranks, r.plan.layout, CPU), StopFlag(r.ranks)
    for step in range(STEPS):
        assert stop.signal(None) is None
        assert r.ranks.size == 1 or "slowest_rank" in slow_ranks.add(step, 0.1)
    stop.close()


def replicas(r: SimpleNamespace) -> None:
    held = {name: torch.zeros(()) for name in COUNTERS}
    holder = SimpleNamespace(families=[], frozen={}, model=torch.nn.Linear(1, 1), **held)
    assert ReplicaCheck(holder, r.ranks, r.plan.layout, 0).difference(1) is None


def end(r: SimpleNamespace) -> None:
    r.ranks.gather((0.0, 0.0))  # as the peak memory of each
    r.ranks.barrier()


def open_store(r: SimpleNamespace) -> None:
    store = CheckpointStore(r.folder / "checkpoints", r.config.checkpoint)
    store.to_resume()
    if r.rank >= NODE:
        store._write_beside = write_here
    r.saves, r.state = Saves(store, r.plan, store._ranks), state_of(r.rank, r.plan.layout)


def state_of(rank: int, layout: Layout) -> dict[str, Any]:
    """Return weights that all ranks hold, and this rank's part of a moment of each, as ZeRO-1 has them."""
    whole, size, elements = torch.Size([ROWS, ROWS]), layout.size("world"), ROWS * ROWS
    names = [f"layers.{n}.weight" for n in range(TENSORS)]
    first, last = (TENSORS * elements * part // size for part in (rank, rank + 1))
    moment = {}
    for n in range(first // elements, -(-last // elements)):
        start, stop = max(first - n * elements, 0), min(last - n * elements, elements)
        moment[names[n]] = FlatShard(torch.zeros(stop - start), start, whole, REPLICATED, layout, rank)
    optimizer = {"exp_avg": moment, "counters": {"skipped_in_row": torch.zeros(())}}
    return {"model": {name: torch.zeros(whole) for name in names}, "optimizer": optimizer, "step": 1}


def save(r: SimpleNamespace) -> None:
    r.saves.save(1, r.state, wait=True)


def save_beside(r: SimpleNamespace) -> None:
    r.saves.save(2, r.state)
    r.saves.store.wait()


def resume(r: SimpleNamespace) -> None:
    if r.rank >= forks.WHOLE:
        moment = r.state["optimizer"]["exp_avg"].items()
        none = {name: replace(shard, data=shard.data[:0]) for name, shard in moment}
        r.state = {"optimizer": {"exp_avg": none}}
    assert r.saves.store.load(r.state) == 2


Stages = dict[str, Callable[[SimpleNamespace], None]]
JOBS: tuple[Stages, ...] = (
    {"rendezvous": rendezvous, "agree on configuration": agree, "threads, memory, start": checks,
     "mesh": mesh, "mesh of gloo groups": gloo_mesh},
    {"": connect, f"{STEPS} logged steps": steps, "compare replicas": replicas, "end": end},
    {"": connect, "open checkpoints": open_store, "save": save, "save beside training": save_beside},
    {"": connect, " ": open_store, "resume": resume},
)  # fmt: skip
"""Stages of a job by their names; those without one are not shown."""
COUNTS = ("store_operations", "bytes_of_rank_0", "messages_of_rank_0", "connections_of_rank_0")


@functools.cache
def config_of(size: int, *words: str, each: int = 1) -> Any:
    return compose_config(*read_words([*WORDS, *words, f"train.global_batch_size={each * size}"]))


def of_ranks(size: int, folder: Path, stages: Stages) -> dict[str, Numbers]:
    """Return the numbers of each rank for each stage of a job."""
    config, port = config_of(size, *MODEL, *MANY), forks.free_port()
    plan = plan_of(config, size)
    wanted = {name: stage for name, stage in stages.items() if stage is not gloo_mesh or size <= GLOO_MESH}

    def run(rank: int, gate: Gate) -> object:
        local = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % NODE, "LOCAL_WORLD_SIZE": NODE}
        local |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, LAUNCHER_PID: os.getppid()}
        if connect in wanted.values():  # as `worker.join` does
            local["TORCH_GLOO_LAZY_INIT"] = int(size > NODE)
        os.environ.update({name: str(value) for name, value in local.items()})
        r = SimpleNamespace(rank=rank, config=config, plan=plan, folder=folder, store=None)
        earlier: Mapping[str, tuple[int, int]] = {}
        for stage in wanted.values():
            gate.wait()
            before = r.store.operations if r.store else 0
            began, cpu = time.perf_counter(), time.process_time()
            stage(r)
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            now = traffic()
            sent = [sum(now[link][i] - earlier.get(link, (0, 0))[i] for link in now) for i in (0, 1)]
            gate.report(rank, wall, cpu, r.store.operations - before, *sent, len(now), private_mib())
            earlier = now
        return r

    return {name: numbers for name, numbers in in_children(size, run, wanted).items() if name.strip()}


def of_launchers(size: int, folder: Path) -> dict[str, Numbers]:
    """Return the numbers of each node's launcher; its wall time is that until all nodes have met."""
    count, endpoint, reify = size // NODE, f"127.0.0.1:{forks.free_port()}", elastic.RankLogs.reify
    launch = replace(config_of(NODE, *MODEL, *MANY).launch, nproc=NODE, nodes=count, hang_timeout_s=None)

    def run(number: int, gate: Gate) -> None:
        latest, ranks, met = dict[str, tuple[int, int]](), list[int](), list[float]()

        def noted(logs: Any, envs: Any) -> Any:
            ranks.extend(int(env["RANK"]) for env in envs.values())
            met.append(time.perf_counter() - began)
            return reify(logs, envs)

        def sample() -> None:
            while True:
                latest.update(traffic())
                time.sleep(0.05)

        gate.wait()
        cpu, began = time.process_time(), time.perf_counter()
        if number == 0:
            threading.Thread(target=sample, daemon=True).start()
        nodes = Nodes(count, number == 0, endpoint, "thousand", "127.0.0.1")
        with mock.patch.object(elastic.RankLogs, "reify", noted):
            given = launch, "keyword", folder / "resolved.yaml", {}, folder / "launch"
            elastic.launch(*given, nodes=nodes, one_gpu_each=False)
        assert len(ranks) == NODE and ranks[0] % NODE == 0, ranks
        sent = [sum(of[i] for of in latest.values()) for i in (0, 1)]
        cpu = time.process_time() - cpu
        gate.report(number, met[0], cpu, math.nan, *sent, len(latest), private_mib())

    return in_children(count, run, ["launchers"])


def build_one(size: int) -> None:
    """Make mesh, model and optimizer of one rank, whose groups send nothing."""
    plan = plan_of(config_of(size, *MODEL, *MANY), size)
    with fake_process_group(size, 0):
        own = Mesh(plan.layout)
        build(plan, CPU, own, make_dispatcher(plan, own), end_token=0)


def dry_run_one(size: int) -> None:
    config = config_of(size, *DRY, each=4)
    dry_run(replace(config, launch=replace(config.launch, fake_world=size)))


def warm_up() -> None:
    """Import once, before the forks, what the stages import."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(1, *MODEL)
        r = SimpleNamespace(rank=0, folder=Path(folder), config=config, ranks=Ranks())
        r.plan = plan_of(config, 1)
        for stage in (agree, checks, mesh, steps, replicas, end, open_store, save, save_beside, resume):
            stage(r)
        r.saves.store.close()


def measured(sizes: Iterable[int]) -> dict[str, dict[int, dict[str, float]]]:
    """Return a summary by stage and size."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    warm_up()
    for size in sizes:
        folder = Path(tempfile.mkdtemp(prefix="thousand-ranks-"))
        try:
            numbers = of_launchers(size, folder) if size > NODE else {}
            for stages in JOBS:
                numbers |= of_ranks(size, folder, stages)
            numbers |= alone("model and optimizer of a rank", lambda size=size: build_one(size))
            if size % (4 * NODE) == 0:
                numbers |= alone("dry run of a rank", lambda size=size: dry_run_one(size))
        finally:
            shutil.rmtree(folder)
        for name, of in numbers.items():
            found.setdefault(name, {})[size] = forks.summary_of(of)
    return found


def faster_than_n_log_n(stages: Mapping[str, Mapping[int, Mapping[str, float]]]) -> list[str]:
    """Return the counts that grow faster than n log n between the first size and the last."""
    lines = []
    for name, sizes in stages.items():
        first, last = min(sizes), max(sizes)
        limit = last * math.log(last) / (first * math.log(first))
        for key in COUNTS:
            a, b = sizes[first][key], sizes[last][key]
            if b > limit * max(a, 1):
                lines.append(
                    f"{name}: {key}: {a:g} on {first} ranks, {b:g} on {last}: over {limit:.1f} times"
                )
    return lines


def table_of(stages: Mapping[str, Mapping[int, Mapping[str, float]]]) -> list[str]:
    """Return a Markdown table: the number of each size, and the exponent between the last two."""
    shown = {
        "wall s": ("wall_s", 1, ".2g"), "rank 0: CPU ms": ("cpu_ms_of_rank_0", 1, ".3g"),
        "a rank: CPU ms": ("cpu_ms_of_a_rank", 1, ".3g"), "store: operations": ("store_operations", 1, ".0f"),
        "rank 0: KB": ("bytes_of_rank_0", 1e3, ".0f"),
        "rank 0: connections": ("connections_of_rank_0", 1, ".0f"),
        "a rank: MiB": ("private_mib_of_a_rank", 1, ".3g"),
    }  # fmt: skip
    lines = [f"| stage | {' | '.join(shown)} |", f"|{'---|' * (len(shown) + 1)}"]
    for name, sizes in stages.items():
        cells = [name]
        for key, unit, form in shown.values():
            values = {size: of[key] / unit for size, of in sizes.items()}
            grows = [f" ({e:.2f})" for e in forks.exponents(values)[-1:] if not math.isnan(e)]
            none = any(map(math.isnan, values.values())) or not any(values.values())
            said = " / ".join(f"{value:{form}}" for value in values.values()) + "".join(grows)
            cells.append("" if none else said)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(argv: list[str]) -> None:
    args = parse_args(RanksArgs, argv, prog="benchmarks.thousand_ranks")
    free_mib = int(Path("/proc/meminfo").read_text().split()[7]) // 1024  # MemAvailable
    for size in args.sizes:
        if size % NODE or not 0 < MIB_OF_A_RANK * size < free_mib:
            most = free_mib // MIB_OF_A_RANK // NODE * NODE
            raise ConfigError(
                f"sizes={size}: use a multiple of {NODE}, at most {most}, which fit into {free_mib} MiB"
            )
    stages = measured(args.sizes)
    if args.out is not None:
        growth = {
            name: {
                key: forks.exponents({n: of[key] for n, of in found.items()}) for key in [*found.values()][0]
            }
            for name, found in stages.items()
        }
        document = {"cores": os.cpu_count(), "torch": torch.__version__}
        document |= {"stages": stages, "exponents": growth}
        text = json.dumps(document, indent=1).replace("NaN", "null")  # what a stage does not count
        args.out.write_text(text + "\n")
    print("\n".join([*table_of(stages), "", *faster_than_n_log_n(stages)]))


if __name__ == "__main__":
    run_tool(main)
