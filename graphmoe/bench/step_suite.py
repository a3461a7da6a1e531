"""``suite=step``: whole steps of one micro-batch by shape and graph scope, each row in a process of its own.

Times are those of steps, of the host, and of the idle device; memory and the largest kernels are there too.
"""

import itertools
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from graphmoe.bench.arguments import BenchArgs, compose_config, numbers, refuse, split_list, without
from graphmoe.bench.cases import BYTES_PER_S, FLOPS_PER_S, Cell, Measured, Row, scaled, synchronize, table
from graphmoe.bench.jobs import UNREAD, RunCase, Setting, rates_of_steps, run_cases, run_job, steps_words
from graphmoe.config.arguments import run_tool
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.model.attention import check_backend
from graphmoe.model.sizes import count_parameters
from graphmoe.ops.timing import spread
from graphmoe.plan.plan import plan_of
from graphmoe.run.machine import open_device
from graphmoe.runtime.host.logs import Progress
from graphmoe.runtime.host.tuning import GarbageCollection
from graphmoe.segments import CAPTURABLE, FULL_ITERATION, SCOPES
from graphmoe.trace.summary import length
from graphmoe.training.start_state import check_memory
from graphmoe.training.trainer import Trainer

WARM_UP_STEPS = 3
"""After those of graph.warmup_steps; graphs are made in the first of them."""
HOST_STEPS = 7
"""Steps that start from an idle device, for the time of the host."""
PROFILED_STEPS = 3
OTHER_STEPS = 30
"""More than all steps of a row that are neither timed nor before its capture."""
NUM_KERNELS, NAME_LENGTH = 10, 200
"""Largest kernels of a row, and characters of their names that are kept."""
UPDATE_BYTES = 34
"""Per parameter: main weights and moments read and written, gradients read twice, bf16 weights written."""


FULL = Setting(
    ("model=deepseek_v2_lite", "model.num_layers=6", "data=synthetic", "optim.lr=1e-6"),
    ((1, 4096), (4, 4096), (1, 512)),
)
TINY = Setting(("model=tiny", "model.num_layers=2", "data=synthetic", "optim.lr=1e-6"), ((2, 32),))
"""Shapes: sequences of the micro-batch, and their tokens."""
KEYS = {
    "graph": "scopes",
    "graph.scope": "scopes",
    "train.micro_batch_size": "micro_batch_sizes",
    "data.seq_len": "seq_lens",
    "train.steps": "repeats",
    "run.device": "device",
}
"""Keys that the suite sets, and its argument for each."""


def measure_steps(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=step``."""

    rows = run_cases(
        step_cases(FULL if full else TINY, device.type, args),
        args,
        lambda row, config: step_numbers(config, times_of_run(row["overrides"], args.repeats, args.limit_s)),
        lambda row: f"{row['median_ms']:.2f} ms, {row['tokens_per_s']:,.0f} tokens/s",
    )
    method = {
        "warm_up_steps": f"graph.warmup_steps + {WARM_UP_STEPS}",
        "host_steps": HOST_STEPS,
        "profiled_steps": PROFILED_STEPS,
        "max_s_per_row": args.limit_s,
        "update_bytes_per_parameter": UPDATE_BYTES,
    }
    return rows, [], method


def step_cases(setting: Setting, device: str, args: BenchArgs) -> list[RunCase]:
    """Cases of the shapes and scopes asked for; ``none`` first and last, for the drift of the device's clock.

    *Raises* ConfigError.
    """
    own, wanted = split_list(args.overrides or ""), split_list(args.scopes)
    refuse(own, KEYS, UNREAD)
    _check_scopes(wanted)
    shapes: Sequence[tuple[int, int]] = setting.runs
    if args.micro_batch_sizes or args.seq_lens:
        sizes = numbers("micro_batch_sizes", args.micro_batch_sizes or "")
        lengths = numbers("seq_lens", args.seq_lens or "") or [shapes[0][1]]
        shapes = list(itertools.product(sizes or list(dict.fromkeys(s for s, _ in shapes)), lengths))
    order = sorted(wanted, key=lambda scope: scope != "none")
    order += ["none"] if "none" in wanted and len(wanted) > 1 else []
    cases = []
    for size, seq_len in shapes:
        words = [
            *without((*setting.words, f"train.global_batch_size={size}"), own),
            *own,
            *UNREAD,
            f"run.device={device}",
            f"train.micro_batch_size={size}",
            f"data.seq_len={seq_len}",
        ]
        config = compose_config(*words, "graph.scope=none")  # what is wrong with it is wrong with every row
        words += steps_words(args.repeats + config.graph.warmup_steps + OTHER_STEPS)
        for number, scope in enumerate(order):
            shape, again = f"mbs{size}_s{seq_len}", number >= len(wanted)
            name = f"{shape}/{scope.strip('[]').replace(',', '+')}{'_again' if again else ''}"
            row = {"case": shape, "scope": scope, "again": again}
            cases.append(RunCase(name, row | {"overrides": [*words, f"graph.scope={scope}"]}))
    return cases


def _check_scopes(scopes: Sequence[str]) -> None:
    for scope in scopes:
        names = re.fullmatch(r"\[(.+)\]", scope)
        listed = {name.strip() for name in names[1].split(",")} if names else set()
        known = listed <= set(CAPTURABLE) if names else scope in (*SCOPES, FULL_ITERATION)
        if not known:
            raise ConfigError(
                f"scopes={scope}: use any of {', '.join([*SCOPES, FULL_ITERATION])}, and lists of "
                f"{', '.join(CAPTURABLE)} in brackets of their own, such as scopes=[none,[attn,loss]]"
            )
    if not scopes:
        raise ConfigError("scopes= names none; use scopes=none,full_iteration or more of them")


def step_numbers(config: RunConfig, measured: Row) -> Row:
    """The measured times of a run, and the numbers that follow from them and its configuration."""
    rates = rates_of_steps(config, 1, measured["samples_ms"])
    parameters = count_parameters(config.model).total.full
    both_ms = rates["floor_ms"] + UPDATE_BYTES * parameters / BYTES_PER_S * 1e3
    busy_ms, tokens = measured["busy_ms"], rates["tokens"]
    idle = None if busy_ms is None else 1 - busy_ms / rates["median_ms"]
    return {
        **measured,
        **rates,
        "parameters": parameters,
        "floor_with_optimizer_ms": both_ms,
        "tokens_per_s_p10": tokens / rates["p90_ms"] * 1e3,
        "tokens_per_s_p90": tokens / rates["p10_ms"] * 1e3,
        "time_over_floor_with_optimizer": rates["median_ms"] / both_ms,
        "host_samples_ms": [round(ms, 4) for ms in measured["host_samples_ms"]],
        "host_ms": spread(measured["host_samples_ms"])[1],
        "idle_share": None if idle is None else max(0.0, idle),
        "idle_share_raw": idle,
    }


def times_of_run(overrides: Sequence[str], repeats: int, limit_s: float) -> Row:
    """Time ``repeats`` steps of a run in a process of its own. *Raises* JobFailed and ConfigError.

    Without a GPU there are times of the host alone; without capture no graphs.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result, printed = Path(folder) / "times.json", Path(folder) / "output"
        run_job("graphmoe.bench.step_suite", [*overrides, str(repeats), str(result)], limit_s, printed)
        found: Row = json.loads(result.read_text(encoding="utf-8"))
        return found


def main(argv: list[str]) -> None:
    """Train in this process, whose device must hold nothing else, and write the times of some steps."""
    *overrides, repeats, result = argv
    config, folder = compose_config(*overrides), Path(result).parent
    device = open_device(config.run.device)
    plan = plan_of(config, 1)
    check_memory(plan, device)
    check_backend(config.model, device.type)
    silent = Progress(Console(stderr=True), config.train.steps, wanted=False)
    trainer = Trainer(plan, folder, silent)
    with ExitStack() as stack:
        stack.callback(trainer.loader.close)
        stack.callback(trainer.metrics.close)
        stack.enter_context(GarbageCollection(config.host))
        for _ in range(config.graph.warmup_steps + WARM_UP_STEPS):
            trainer._train_step()
        Path(result).write_text(json.dumps(_measured(trainer, device, int(repeats))), encoding="utf-8")


def _measured(trainer: Trainer, device: torch.device, repeats: int) -> Row:
    step, on_gpu = trainer._train_step, device.type == "cuda"
    synchronize(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    samples = _step_ms(step, repeats, device)
    allocated = torch.cuda.max_memory_allocated(device) if on_gpu else None
    reserved = torch.cuda.max_memory_reserved(device) if on_gpu else None
    host_samples = _host_ms(step, device)
    capture = trainer.execution.capture
    kernels = _profiled(step, device) if on_gpu else []
    return {
        "samples_ms": samples,
        "host_samples_ms": host_samples,
        "busy_ms": length(spans) / PROFILED_STEPS / 1e3 if (spans := [k[1:] for k in kernels]) else None,
        "kernels": largest(kernels, PROFILED_STEPS),
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "pool_bytes": capture.maker.pool_bytes() if capture else None,
        "graphs": capture.report.graphs if capture else None,
        "capture_s": capture.report.seconds if capture else None,
    }


def _step_ms(step: Callable[[], None], count: int, device: torch.device) -> list[float]:
    """Milliseconds of steps that are queued one after the other without a wait; on a CPU of the host."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [(end - start) * 1e3 for start, end in pairwise(marks)]
    step()  # finds the device idle, as the others do not
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def _host_ms(step: Callable[[], None], device: torch.device) -> list[float]:
    """Milliseconds until the host is back from a step that it started with the device idle."""
    samples = []
    for _ in range(HOST_STEPS):
        synchronize(device)
        started = time.perf_counter()
        step()
        samples.append((time.perf_counter() - started) * 1e3)
    synchronize(device)
    return samples


Activity = tuple[str, float, float]
"""Name of a kernel, copy or memset of the device; start and end in microseconds."""


def _profiled(step: Callable[[], None], device: torch.device) -> list[Activity]:
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize(device)
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def largest(activities: Iterable[Activity], steps: int) -> list[dict[str, str | float]]:
    """The `NUM_KERNELS` names with the most time; calls and milliseconds are those of one step."""
    durations: dict[str, list[float]] = defaultdict(list)
    for name, start, end in activities:
        durations[name].append(end - start)
    totals = {name: sum(each) for name, each in durations.items()}
    return [
        {
            "name": name[:NAME_LENGTH],
            "calls": round(len(durations[name]) / steps, 2),
            "ms": round(totals[name] / steps / 1e3, 4),
        }
        for name in sorted(totals, key=lambda name: -totals[name])[:NUM_KERNELS]
    ]


def render_steps(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table and its legend."""
    columns: dict[str, Cell] = {
        "case": "{case}",
        "scope": lambda row: f"{row['scope']}, again" if row["again"] else row["scope"],
        "tokens/s": "{tokens_per_s:,.0f}",
        "p10 to p90": "{tokens_per_s_p10:,.0f} to {tokens_per_s_p90:,.0f}",
        "step ms": "{median_ms:.2f}",
        "step / floor": "{time_over_floor:.2f}",
        "GPU idle %": scaled(".1f", "idle_share", 100),
        "host ms": "{host_ms:.2f}",
        "pool GiB": scaled(".2f", "pool_bytes", 2**-30),
        "peak GiB": scaled(".2f", "peak_allocated_bytes", 2**-30),
        "reserved GiB": scaled(".2f", "peak_reserved_bytes", 2**-30),
        "capture s": "{capture_s:.2f}",
    }
    yield from table(columns, document["rows"], named=2)
    method = document["method"]
    for case, row in {row["case"]: row for row in document["rows"] if not row["error"]}.items():
        yield (
            f"Floor of {case}: {row['floor_ms']:.2f} ms of FLOPs at {FLOPS_PER_S / 1e12:.0f} TFLOP/s, which "
            f"step / floor counts; {row['floor_with_optimizer_ms']:.2f} ms with the {UPDATE_BYTES} bytes per "
            f"parameter of the update at {BYTES_PER_S / 1e12:.1f} TB/s, both as measured on an H200."
        )
    yield (
        f"Step: median of {method['repeats']} between events on the device, while the host runs ahead. Host: "
        f"until a step returns that starts on an idle device, median of {method['host_steps']}. GPU idle: "
        f"the share of the step in which nothing runs, by a profile of {method['profiled_steps']} steps."
    )
    yield (
        "Memory: peak is what tensors take, without what a graph holds for itself alone; reserved has all, "
        "with the graphs' pool. Each row ran in a process of its own."
    )


if __name__ == "__main__":
    run_tool(main)
