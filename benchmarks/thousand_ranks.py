"""Host work of many ranks on a machine without GPUs: nice python benchmarks/thousand_ranks.py [SIZES [JSON]]

Ranks are forks of one process that has torch and graphmoe imported, so each adds a few MB. They run graphmoe's
own functions, stage by stage: all wait for the parent between two stages.
Real: processes, the rendezvous store, gloo groups of object collectives, launchers with torch elastic, files.
Simulated: groups of tensors have torch's "fake" backend (NCCL's connect at first use), the worker of a
launcher is an empty program, and files of ranks that are not on node 0 are written without a saver process.
"""

import ctypes
import gc
import json
import math
import os
import platform
import select
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
# torch asks the name service for the name of each peer: many at once would wait for its timeout
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "attempts:1 timeout:1", "OMP_NUM_THREADS": "1"}
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.testing._internal.distributed.fake_pg  # noqa: E402, F401

from graphmoe import train, worker  # noqa: E402, F401
from graphmoe.checkpoint.contents import write_here  # noqa: E402
from graphmoe.checkpoint.flat_shards import FlatShard  # noqa: E402
from graphmoe.checkpoint.store import CheckpointStore  # noqa: E402
from graphmoe.command.hydra import compose_config, read_words  # noqa: E402
from graphmoe.ops.collectives import use_groups  # noqa: E402
from graphmoe.optim.base import COUNTERS  # noqa: E402
from graphmoe.plan.layout import REPLICATED, Layout  # noqa: E402
from graphmoe.plan.plan import plan_of  # noqa: E402
from graphmoe.runtime.dispatch import make_dispatcher  # noqa: E402
from graphmoe.runtime.host.signals import FOLDER_HELD, LAUNCHER_PID  # noqa: E402
from graphmoe.runtime.host.tuning import start_host  # noqa: E402
from graphmoe.runtime.launch import elastic, meeting  # noqa: E402
from graphmoe.runtime.launch.nodes import Nodes  # noqa: E402
from graphmoe.runtime.ranks import Mesh, Ranks  # noqa: E402
from graphmoe.runtime.torch_compat import fake_process_group  # noqa: E402
from graphmoe.training.build import build  # noqa: E402
from graphmoe.training.dry_run import dry_run  # noqa: E402
from graphmoe.training.replicas import ReplicaCheck  # noqa: E402
from graphmoe.training.run import check_memory, check_start  # noqa: E402
from graphmoe.training.saves import Saves  # noqa: E402
from graphmoe.training.slow_ranks import SlowRanks  # noqa: E402
from graphmoe.training.trainer import StopFlag  # noqa: E402

SIZES, NODE, MIB = (64, 128, 256, 512, 1024), 8, 2**20
TENSORS, ROWS = 16, 64  # of the state that is saved: 1,024 rows, so up to 1,024 ranks have whole ones
LOGGED_STEPS, GLOO_MESH = (
    4,
    256,
)  # a mesh of gloo groups on more ranks has more threads than the system allows
PRIVATE_MIB = 14  # of a rank, with air: what a size needs to start
CPU, CPU_DEVICE = "cpu", torch.device("cpu")
WORDS = (
    "run.device=cpu", "data=synthetic", "compile.enabled=false", "log.tensorboard=false", "log.report=false",
    "host.numa=none", "host.threads=1", "train.micro_batch_size=1", "train.val_batches=0", "data.seq_len=32",
)  # fmt: skip
TINY = (
    "model=tiny", "model.num_layers=4", "model.hidden_size=64", "model.vocab_size=256", "model.expert_ffn_size=32",
    "model.dense_ffn_size=64", "model.shared_ffn_size=32", "model.kv_lora_rank=16", "optim.bucket_mb=0.1",
    "parallel.ep=8", "parallel.tp=2",
)  # fmt: skip
DRY = (
    "model=deepseek_v2_lite", "model.num_layers=8", "parallel.pp=4", "parallel.ep=8", "data.seq_len=4096",
    "precision.compute=bf16",
)  # fmt: skip


class CountedStore(dist.Store):
    """A store client that counts operations; torch and gloo call it too."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.operations = store, 0


def _counted(name: str) -> Callable[..., Any]:
    def call(self: CountedStore, *arguments: Any) -> Any:
        self.operations += 1
        return getattr(self.store, name)(*arguments)

    return call


for _name in (
    "set",
    "get",
    "add",
    "wait",
    "check",
    "append",
    "compare_set",
    "delete_key",
    "multi_get",
    "multi_set",
):
    setattr(CountedStore, _name, _counted(_name))


# Stages. Each is run by every rank, with one object that holds what the rank has so far.


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
    """Meet as `rendezvous` does, in less memory."""
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    r.store = CountedStore(dist.TCPStore(*where, is_master=r.rank == 0, wait_for_workers=False))
    dist.init_process_group("fake", store=r.store, rank=r.rank, world_size=r.plan.layout.size("world"))


def agree(r: SimpleNamespace) -> None:
    held = {FOLDER_HELD: str(r.folder)} if r.rank < NODE else {}
    with mock.patch.dict(os.environ, held):
        worker._agree(r.config, r.folder, r.ranks)


def checks(r: SimpleNamespace) -> None:
    start_host(r.config.host, CPU_DEVICE, NODE, r.ranks.gather)
    # what a rank does alone is alike on all: memory for it is spent on one node only
    r.ranks.on_each(
        lambda: None if r.rank >= NODE else check_memory(plan_of(r.config, r.ranks.size), CPU_DEVICE)
    )
    r.ranks.on_first(lambda: check_start(r.config, r.folder))


def mesh(r: SimpleNamespace) -> None:
    r.mesh = Mesh(r.plan.layout)
    use_groups(r.mesh)


def gloo_mesh(r: SimpleNamespace) -> None:
    over_gloo = dist.new_subgroups_by_enumeration
    with mock.patch.object(
        dist, "new_subgroups_by_enumeration", lambda *a, **named: over_gloo(*a, **named, backend="gloo")
    ):
        groups = {*Mesh(r.plan.layout)._groups.values()}
    for group in sorted(groups, key=lambda group: group.group_name):
        dist.all_reduce(torch.ones(1), group=group)
    r.ranks.barrier()
    for group in groups:
        dist.destroy_process_group(group)


def open_store(r: SimpleNamespace) -> None:
    store = CheckpointStore(r.folder / "checkpoints", r.config.checkpoint)
    r.saves = Saves(store, r.plan, store._ranks)
    r.saves.store.to_resume()
    if r.rank >= NODE:
        r.saves.store._write_beside = write_here
    r.state = state_of(r.rank, r.plan.layout)


def state_of(rank: int, layout: Layout) -> dict[str, Any]:
    """Return weights that all ranks hold, and this rank's part of a moment, as ZeRO-1 has it."""
    whole, size = torch.Size([ROWS, ROWS]), layout.size("world")
    names, elements = [f"layers.{n}.weight" for n in range(TENSORS)], ROWS * ROWS
    first, last = (TENSORS * elements * part // size for part in (rank, rank + 1))
    shards = {}
    for n in range(first // elements, -(-last // elements)):
        start, stop = max(first - n * elements, 0), min(last - n * elements, elements)
        shards[names[n]] = FlatShard(torch.zeros(stop - start), start, whole, REPLICATED, layout, rank)
    counters = {"skipped_in_row": torch.zeros(())}
    optimizer = {"exp_avg": shards, "counters": counters}
    return {"model": {name: torch.zeros(whole) for name in names}, "optimizer": optimizer, "step": 1}


def save(r: SimpleNamespace) -> None:
    r.saves.save(1, r.state, wait=True)


def save_beside(r: SimpleNamespace) -> None:
    r.saves.save(2, r.state)
    r.saves.store.wait()


def resume(r: SimpleNamespace) -> None:
    assert r.saves.store.load(r.state) == 2


def steps(r: SimpleNamespace) -> None:
    r.ranks = Ranks()
    slow_ranks, stop = SlowRanks(r.ranks, r.plan.layout, CPU_DEVICE), StopFlag(r.ranks)
    for step in range(LOGGED_STEPS):
        assert stop.signal(None) is None
        assert "slowest_rank" in slow_ranks.add(step, 0.1)
    stop.close()


def replicas(r: SimpleNamespace) -> None:
    held = {name: torch.zeros(()) for name in COUNTERS}
    holder = SimpleNamespace(families=[], frozen={}, model=torch.nn.Linear(1, 1), **held)
    check = ReplicaCheck(holder, r.ranks, r.plan.layout, 0)
    check.add()
    assert check.difference(1) is None


def end(r: SimpleNamespace) -> None:
    r.ranks.gather((0.0, 0.0))
    r.ranks.barrier()


Stages = dict[str, Callable[[SimpleNamespace], None]]
START: Stages = {
    "rendezvous": rendezvous, "agree on configuration": agree, "threads, memory, start checks": checks,
    "mesh": mesh, "mesh of gloo groups": gloo_mesh,
}  # fmt: skip
STEPS: Stages = {"": connect, f"{LOGGED_STEPS} logged steps": steps, "compare replicas": replicas, "end": end}
SAVE: Stages = {
    "": connect, "open checkpoints": open_store, "save": save, "save beside training": save_beside,
}  # fmt: skip
RESUME: Stages = {"": connect, " ": open_store, "resume": resume}
COLUMNS = ("wall_s", "cpu_s", "store_operations", "bytes", "messages", "connections", "private_mib")
RECORD = struct.Struct(f"=q{len(COLUMNS)}d")  # a rank and its numbers; -1: it failed


def traffic() -> dict[str, tuple[int, int]]:
    """Return bytes and segments with data of each TCP connection of this process, by inode (linux/tcp.h)."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, struct.error):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as peer:
                    info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
                (received,), (sent,) = (struct.unpack_from("=Q", info, offset) for offset in (128, 200))
                if info[0] != 10:  # a listening socket
                    found[link] = sent + received, sum(struct.unpack_from("=II", info, 152))
    return found


def private_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


class Gate:
    """All children pass it at once, when the parent opens it, and report to the parent."""

    def __init__(self) -> None:
        # a child that is done early must not take what lets another one begin, so two pipes take turns
        self._gates, self._done, self._opened = (os.pipe(), os.pipe()), os.pipe(), 0

    def wait(self) -> None:
        self._opened += 1
        if not os.read(self._gates[self._opened % 2][0], 1):
            os._exit(1)

    def let_pass(self, size: int) -> None:
        self._opened += 1
        os.write(self._gates[self._opened % 2][1], b"." * size)

    def report(self, rank: int, *numbers: float) -> None:
        os.write(self._done[1], RECORD.pack(rank, *numbers))  # shorter than PIPE_BUF, so whole

    def open(self, size: int, limit_s: float = 1800.0) -> list[tuple[float, ...]]:
        """Let ``size`` children pass; return their numbers in the order of ranks."""
        self.let_pass(size)
        content, end = b"", time.monotonic() + limit_s
        while len(content) < size * RECORD.size:
            if not select.select([self._done[0]], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError(f"{size - len(content) // RECORD.size} of {size} did not end a stage")
            content += os.read(self._done[0], 1 << 16)
        records = sorted(RECORD.iter_unpack(content))
        if records[0][0] < 0:
            raise RuntimeError("a rank failed, as the trace above says")
        return [record[1:] for record in records]


def forked(count: int, gate: Gate, run: Callable[[int], None]) -> list[int]:
    """Return the process ids of ``count`` children, which end with this process."""
    gc.collect()
    gc.freeze()
    pids, errors, nowhere = [], os.dup(2), os.open(os.devnull, os.O_WRONLY)
    for number in range(count):
        if not (pid := os.fork()):
            try:
                ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
                os.dup2(nowhere, 1), os.dup2(nowhere, 2)
                run(number)
                os._exit(0)
            except BaseException:
                os.write(errors, traceback.format_exc().encode())
                gate.report(-1, *[0.0] * len(COLUMNS))
            finally:
                os._exit(1)
        pids.append(pid)
    return pids


def reaped(pids: Iterable[int], *, kill: bool) -> None:
    for pid in pids:
        if kill:
            os.kill(pid, 9)
        os.waitpid(pid, 0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def config_of(size: int, words: Iterable[str], each: int = 1) -> Any:
    return compose_config(*read_words([*WORDS, *words, f"train.global_batch_size={each * size}"]))


def warm_up() -> None:
    """Import once, before the forks, what the stages import."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(1, TINY[:-2])
        r = SimpleNamespace(
            rank=0, folder=Path(folder), config=config, ranks=Ranks(), plan=plan_of(config, 1)
        )
        for stage in (agree, checks, mesh, replicas, open_store, save, save_beside, resume):
            stage(r)
        r.saves.store.close()


def of_ranks(size: int, folder: Path, stages: Stages) -> dict[str, dict[str, list[float]]]:
    """Return the numbers of each rank for each stage of a job."""
    config, gate, port = config_of(size, TINY), Gate(), free_port()
    plan = plan_of(config, size)
    wanted = {name: run for name, run in stages.items() if run is not gloo_mesh or size <= GLOO_MESH}

    def run(rank: int) -> None:
        local = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % NODE, "LOCAL_WORLD_SIZE": NODE}
        local |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, LAUNCHER_PID: os.getppid()}
        os.environ.update({name: str(value) for name, value in local.items()})
        none = SimpleNamespace(operations=0)
        r = SimpleNamespace(rank=rank, config=config, plan=plan, folder=folder, store=none)
        sockets: Mapping[str, tuple[int, int]] = {}
        for stage in wanted.values():
            gate.wait()
            began, cpu, before = time.perf_counter(), time.process_time(), r.store.operations
            stage(r)
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            now = traffic()
            sent = [sum(now[link][i] - sockets.get(link, (0, 0))[i] for link in now) for i in (0, 1)]
            sockets = now
            gate.report(rank, wall, cpu, r.store.operations - before, *sent, len(now), private_mib())
        gate.wait()

    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(size > NODE))  # as `worker.join` sets it
    pids, found, alive = forked(size, gate, run), {}, True
    try:
        for name in wanted:
            rows = gate.open(size)
            found[name] = {column: [*of] for column, of in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
            print(f"{size} ranks: {name}: {max(found[name]['wall_s']):.2f} s", file=sys.stderr, flush=True)
        gate.let_pass(size)
        alive = False
    finally:
        reaped(pids, kill=alive)
    return {name: of for name, of in found.items() if name.strip()}


def of_launchers(size: int, folder: Path) -> dict[str, list[float]]:
    """Return the numbers of each node's launcher: from its start until its workers have ended."""
    config, gate, count = config_of(NODE, TINY), Gate(), size // NODE
    launch = replace(config.launch, nproc=NODE, nodes=count, hang_timeout_s=None)
    endpoint = f"127.0.0.1:{free_port()}"
    reify = elastic.RankLogs.reify

    def run(number: int) -> None:
        latest: dict[str, tuple[int, int]] = {}
        ranks: list[int] = []
        began = time.perf_counter()

        def noted(logs: Any, envs: Any) -> Any:
            ranks.extend(int(env["RANK"]) for env in envs.values())
            met.append(time.perf_counter() - began)
            return reify(logs, envs)

        def sample() -> None:
            while True:
                latest.update(traffic())
                time.sleep(0.05)

        met: list[float] = []
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
        wall, cpu = met[0], time.process_time() - cpu
        gate.report(number, wall, cpu, math.nan, *sent, len(latest), private_mib())
        gate.wait()

    pids, alive = forked(count, gate, run), True
    try:
        rows = gate.open(count)
        gate.let_pass(count)
        alive = False
    finally:
        reaped(pids, kill=alive)
    return {column: [*of] for column, of in zip(COLUMNS, zip(*rows, strict=True), strict=True)}


def alone(run: Callable[[], object]) -> dict[str, list[float]]:
    """Return the numbers of a function that one process runs."""
    gate = Gate()

    def measured(_: int) -> None:
        gate.wait()
        before, began, cpu = private_mib(), time.perf_counter(), time.process_time()
        run()
        wall, cpu, used = time.perf_counter() - began, time.process_time() - cpu, private_mib() - before
        gate.report(0, wall, cpu, *[math.nan] * (len(COLUMNS) - 3), used)

    pids, alive = forked(1, gate, measured), True
    try:
        (numbers,) = gate.open(1)
        alive = False
    finally:
        reaped(pids, kill=alive)
    return {column: [number] for column, number in zip(COLUMNS, numbers, strict=True)}


def build_one(size: int) -> None:
    """Make mesh, model and optimizer of one rank, whose groups send nothing."""
    plan = plan_of(config_of(size, TINY), size)
    with fake_process_group(size, 0):
        own = Mesh(plan.layout)
        build(plan, CPU_DEVICE, own, make_dispatcher(plan, own), end_token=0)


def dry_run_one(size: int) -> None:
    config = config_of(size, DRY, each=4)
    dry_run(replace(config, launch=replace(config.launch, fake_world=size)))


def summary_of(numbers: Mapping[str, list[float]]) -> dict[str, float]:
    """Return what the table shows of a stage at one size."""
    return {
        "wall_s": max(numbers["wall_s"]),
        "cpu_ms_of_rank_0": 1e3 * numbers["cpu_s"][0],
        "cpu_ms_of_a_rank": 1e3 * statistics.fmean(numbers["cpu_s"]),
        "store_operations": sum(numbers["store_operations"]),
        "bytes_of_rank_0": numbers["bytes"][0],
        "messages_of_rank_0": numbers["messages"][0],
        "connections_of_rank_0": numbers["connections"][0],
        "connections_of_a_rank": statistics.median(numbers["connections"]),
        "mib_of_rank_0": numbers["private_mib"][0],
        "mib_of_a_rank": statistics.fmean(numbers["private_mib"]),
    }


def exponents(values: Mapping[int, float]) -> list[float]:
    """Return log(ratio of values) over log(ratio of sizes), of each two sizes in a row."""
    pairs = [*values.items()]
    return [
        math.log(b / a) / math.log(n / m) if a > 0 and b > 0 else math.nan
        for (m, a), (n, b) in zip(pairs, pairs[1:], strict=False)
    ]


def table_of(stages: Mapping[str, Mapping[int, Mapping[str, float]]]) -> list[str]:
    """Return the lines of a Markdown table: a number of each size, and the exponent between the last two."""
    shown = {
        "wall s": ("wall_s", ".2g"), "rank 0: CPU ms": ("cpu_ms_of_rank_0", ".3g"),
        "a rank: CPU ms": ("cpu_ms_of_a_rank", ".3g"), "store: operations": ("store_operations", ".0f"),
        "rank 0: KB sent and received": ("bytes_of_rank_0", "kb"), "rank 0: connections": ("connections_of_rank_0", ".0f"),
        "a rank: private MiB": ("mib_of_a_rank", ".3g"),
    }  # fmt: skip
    lines = [f"| stage | {' | '.join(shown)} |", f"|{'---|' * (len(shown) + 1)}"]
    for name, sizes in stages.items():
        cells = []
        for key, form in shown.values():
            values = {n: numbers[key] / (1e3 if form == "kb" else 1) for n, numbers in sizes.items()}
            if any(map(math.isnan, values.values())):
                cells.append("")
                continue
            grows = exponents(values)[-1:]
            said = " / ".join(f"{value:{'.0f' if form == 'kb' else form}}" for value in values.values())
            cells.append(said + (f" ({grows[0]:.2f})" if grows and not math.isnan(grows[0]) else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    sizes = [int(size) for size in sys.argv[1].split(",")] if sys.argv[1:] else SIZES
    raw: dict[str, dict[int, dict[str, list[float]]]] = {}
    warm_up()
    for size in sizes:
        free_mib = int(Path("/proc/meminfo").read_text().split()[7]) / 1024  # MemAvailable
        if PRIVATE_MIB * size > free_mib:
            sys.exit(f"{size} ranks need {PRIVATE_MIB * size} MiB, and {free_mib:.0f} are free; give fewer")
        folder = Path(tempfile.mkdtemp(prefix="thousand-ranks-"))
        try:
            if size >= 2 * NODE:
                raw.setdefault("launchers", {})[size] = of_launchers(size, folder)
            for stages in (START, STEPS, SAVE, RESUME):
                for name, numbers in of_ranks(size, folder, stages).items():
                    raw.setdefault(name, {})[size] = numbers
            raw.setdefault("model and optimizer of a rank", {})[size] = alone(lambda: build_one(size))  # noqa: B023
            if size >= 4 * NODE:
                raw.setdefault("dry run of a rank", {})[size] = alone(lambda: dry_run_one(size))  # noqa: B023
        finally:
            shutil.rmtree(folder)
    stages = {name: {n: summary_of(of) for n, of in found.items()} for name, found in raw.items()}
    document = {
        "machine": {"cores": os.cpu_count(), "torch": torch.__version__, "kernel": platform.release()},
        "stages": stages,
        "exponents": {
            name: {key: exponents({n: of[key] for n, of in found.items()}) for key in [*found.values()][0]}
            for name, found in stages.items()
        },
    }
    if sys.argv[2:]:
        Path(sys.argv[2]).write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(table_of(stages)))


if __name__ == "__main__":
    main()
