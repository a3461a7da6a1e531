"""Suites of training runs: steps by graph scope, a ladder of features, and runs beside projections."""

import itertools
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphmoe.bench.arguments import CPU_RANKS, BenchArgs, card_of_device
from graphmoe.bench.cases import BYTES_PER_S, FLOPS_PER_S, Cell, Measured, Row, Suite
from graphmoe.bench.jobs import (
    COLUMNS,
    DATA,
    LITE,
    MEMORY,
    TINY,
    RunCase,
    Trained,
    key_of,
    measure,
    numbers,
    numbers_of_run,
    refuse,
    run_case,
    split_list,
)
from graphmoe.config.schema import ComputeDtype, ConfigError, RunConfig
from graphmoe.model.sizes import count_parameters
from graphmoe.optim import rule_of
from graphmoe.plan.costs.hardware import Card
from graphmoe.plan.plan import plan_of
from graphmoe.plan.resolve import resolve
from graphmoe.project.document import MEMORY_ERROR, projected
from graphmoe.project.memory import PlaceMemory, allocated_bytes
from graphmoe.segments import CAPTURABLE, FULL_ITERATION, SCOPES
from graphmoe.trace.summary import largest, summarise

RECORDED_STEPS = 3
"""Steps after the timed ones of which a trace is read."""
NUM_KERNELS = 10
"""Largest kernels of a row."""


def measure_steps(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=step``."""
    ranks = args.nproc or 1

    def numbers_of(config: RunConfig, found: Trained) -> Row:
        return step_numbers(config, ranks, found, args.repeats)

    cases = step_cases(args, device.type, full)
    return measure(args, cases, ranks, numbers_of, recorded_steps=RECORDED_STEPS)


def step_cases(args: BenchArgs, device: str, full: bool) -> list[RunCase]:
    """Cases of the shapes and scopes asked for; ``none`` first and last, for the drift of the device's clock.

    *Raises* ConfigError.
    """
    refuse(args)
    ranks = args.nproc or 1
    shapes: list[tuple[int, int]] = [(1, 4096), (4, 4096), (1, 512)] if full else [(2, 32)]
    sizes, lengths = numbers("micro_batch_sizes", args.micro_batch_sizes), numbers("seq_lens", args.seq_lens)
    if sizes or lengths:
        sizes = sizes or list(dict.fromkeys(size for size, _ in shapes))
        shapes = list(itertools.product(sizes, lengths or [shapes[0][1]]))
    wanted = sorted(_scopes(args.scopes), key=lambda scope: scope != "none")
    last = ["none"] if "none" in wanted and len(wanted) > 1 else []
    cases = []
    for size, seq_len in shapes:
        for number, scope in enumerate([*wanted, *last]):
            shape, again = f"mbs{size}_s{seq_len}", number >= len(wanted)
            name = f"{shape}/{scope.strip('[]').replace(',', '+')}{'_again' if again else ''}"
            defaults = (*(LITE if full else TINY), f"train.global_batch_size={size * ranks}")
            fixed = [f"run.device={device}", f"launch.nproc={ranks}", f"graph.scope={scope}"]
            fixed += [f"train.micro_batch_size={size}", f"data.seq_len={seq_len}"]
            row = {"case": shape, "scope": scope, "again": again}
            cases.append(run_case(args, name, row, defaults, fixed, RECORDED_STEPS))
    return cases


def _scopes(text: str) -> list[str]:
    scopes = split_list(text)
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
    return scopes


def step_numbers(config: RunConfig, ranks: int, found: Trained, repeats: int) -> Row:
    """Numbers of the timed steps, and of the recorded ones behind them.

    ``host_ms`` is that of the first recorded step, which the host starts with the device idle; recording
    costs the host some microseconds for each operation.
    """
    assert found.trace is not None
    timed = found.steps[-repeats - RECORDED_STEPS : -RECORDED_STEPS]
    row = numbers_of_run(config, ranks, timed, found.summary)
    recorded = summarise(found.trace, 1)
    kernels = [(a.name, a.end - a.start, None) for a in found.trace.activities]
    moved = rule_of(config.optim.name).bytes_moved * count_parameters(config.model)["total"]["full"]
    idle = None
    if recorded.idle is not None:
        idle = max(0.0, 1 - (1 - recorded.idle) * recorded.step_ms / row["median_ms"])
    first = found.trace.steps[0]
    return {
        **row,
        "floor_with_optimizer_ms": row["floor_ms"] + moved / BYTES_PER_S * 1e3,
        "idle_share": idle,
        "host_ms": (first.end - first.start) / 1e3,
        "kernels": [vars(kernel) for kernel in largest(kernels, RECORDED_STEPS, NUM_KERNELS)],
        "pool_bytes": found.captured.get("pool_bytes"),
        "graphs": found.captured.get("graphs"),
        "capture_s": found.captured.get("seconds"),
    }


_STEP_COLUMNS: dict[str, Cell] = {
    "case": "{case}",
    "scope": lambda row: f"{row['scope']}, again" if row["again"] else row["scope"],
    **COLUMNS,
    "GPU idle %": lambda row: f"{100 * row['idle_share']:.1f}",
    "host ms": "{host_ms:.2f}",
    "pool GiB": lambda row: f"{row['pool_bytes'] / 2**30:.2f}",
    "capture s": "{capture_s:.2f}",
}


def _step_legend(document: dict[str, Any]) -> Iterator[str]:
    for case, row in {row["case"]: row for row in document["rows"] if not row["error"]}.items():
        yield (
            f"Floor of {case}: {row['floor_ms']:.2f} ms of FLOPs at {FLOPS_PER_S / 1e12:.0f} TFLOP/s, which "
            f"step / floor counts; {row['floor_with_optimizer_ms']:.2f} ms with the bytes that "
            f"the update moves at {BYTES_PER_S / 1e12:.1f} TB/s, both as measured on an H200."
        )
    yield (
        f"Step: median of {document['method']['repeats']} by the device's clock, while the host runs ahead. "
        f"Host and GPU idle are of {RECORDED_STEPS} further steps that are recorded: until the first, which "
        "starts on an idle device, returns, and the share of a step in which nothing runs."
    )
    yield MEMORY


STEP = Suite(measure_steps, _STEP_COLUMNS, _step_legend)

FULL = ("model=deepseek_v2_lite", *DATA, "data.seq_len=4096", "recompute.ops=[layernorm,mla_up_proj]")
PEAK_TFLOPS = 989.0
"""Dense bf16 of an H100 or H200, which published figures of MFU count."""
MICRO_BATCHES = 4
"""Micro-batches of a rank in a step, if train.global_batch_size is not among the overrides."""


class Rung(NamedTuple):
    """The changes of one rung, which the rungs after it keep."""

    name: str
    what: str
    words: tuple[str, ...]


RUNGS = (
    Rung(
        "baseline",
        "alltoall with counts on the host",
        ("moe.dispatcher=alltoall", "graph.scope=none", "pipeline.ep_overlap=false")
        + ("passes.disabled=[fuse_loss]", "host.numa=none", "host.manual_gc=false"),
    ),
    Rung("loss_fusion", "logits are never whole", ("passes.disabled=[]",)),
    Rung("symm", "GPUs read each other's tokens, replicas even ranks out", ("moe.dispatcher=symm",)),
    Rung("partial", "graphs of attention, router and preprocessing", ("graph.scope=partial",)),
    Rung("full_iteration", "the whole step is one graph", ("graph.scope=full_iteration",)),
    Rung("ep_overlap", "a backward beside the next forward", ("pipeline.ep_overlap=true",)),
    Rung("host_tuning", "NUMA binding, garbage at fixed steps", ("host.numa=auto", "host.manual_gc=true")),
)
"""All but the larger micro-batches, which come last."""


def measure_rungs(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=ladder``."""
    ranks = args.nproc or (torch.cuda.device_count() if device.type == "cuda" else CPU_RANKS)

    def numbers_of(config: RunConfig, found: Trained) -> Row:
        return rung_numbers(config, ranks, found.steps[-args.repeats :], found.summary)

    rows, left_out, method = measure(args, ladder_cases(args, device.type, full, ranks), ranks, numbers_of)
    take_gains(rows)
    return rows, left_out, method


def ladder_cases(args: BenchArgs, device: str, full: bool, ranks: int) -> list[RunCase]:
    """The rungs, each with the settings of those before it. *Raises* ConfigError."""
    of_rungs = {key_of(word): rung.name for rung in RUNGS for word in rung.words} | {"graph": "partial"}
    for word in refuse(args):
        if (key := key_of(word)) in of_rungs:
            raise ConfigError(
                f"overrides={word}: the rung {of_rungs[key]} sets {key}; choose rungs by only=..."
            )
        if re.match(r"(parallel|launch)\b", key):
            raise ConfigError(
                f"overrides={word}: the suite has all GPUs of one node along parallel.ep; use nproc=..."
            )
    shape = FULL if full else ("data.seq_len=16", *TINY)
    sizes = numbers("micro_batch_sizes", args.micro_batch_sizes) or ([2, 4] if full else [1, 2])
    larger = [Rung(f"micro_batch_{size}", f"{size} sequences at once", ()) for size in sizes[1:]]
    cases: list[RunCase] = []
    changed: dict[str, str] = {}
    for rung, size in zip((*RUNGS, *larger), [sizes[0]] * len(RUNGS) + sizes[1:], strict=True):
        changed |= {key_of(word): word for word in rung.words}
        defaults = (*shape, f"train.global_batch_size={size * ranks * MICRO_BATCHES}")
        fixed = [*changed.values(), f"train.micro_batch_size={size}", f"run.device={device}"]
        fixed += [f"parallel.ep={ranks}", f"launch.nproc={ranks}", "launch.nodes=1"]
        row = {"rung": rung.name, "what": rung.what, "ranks": ranks}
        cases.append(run_case(args, rung.name, row, defaults, fixed))
    return cases


def rung_numbers(config: RunConfig, ranks: int, steps: Sequence[Row], summary: Row) -> Row:
    """Numbers of the timed rows of metrics.jsonl and of the run's summary.

    ``receive_load`` is the most that arrived at any rank in a layer and micro-batch, over what a balanced
    routing sends, ``planned_rank_load`` the most slots over the mean by a plan of replicas. ``loss`` is the
    same for all rungs with the same micro-batches, but for rounding.
    """
    row, most = numbers_of_run(config, ranks, steps, summary), ("receive_load", "planned_rank_load")
    return {
        **row,
        "mfu": row["tflops"] / PEAK_TFLOPS,
        "rank_load": statistics.fmean(step["rank_load"] for step in steps),
        **{name: max((s[name] for s in steps if name in s), default=None) for name in most},
        "first_step_s": summary["time_to_first_step_s"],
        "loss": steps[-1]["loss"],
    }


def take_gains(rows: Sequence[Row]) -> None:
    """Fill in each rung's gain, its rate over that of the last rung before it that ran, and over the best."""
    best, before = max((row.get("tokens_per_s", 0.0) for row in rows), default=0.0), None
    for row in rows:
        rate = row.get("tokens_per_s")
        row["gain"], row["of_best"] = rate / before if rate and before else None, rate and rate / best
        before = rate or before


_OF_RANKS = ("rank_load", "planned_rank_load")
_LADDER_COLUMNS: dict[str, Cell] = {
    "rung": "{rung}",
    "gain": "{gain:.3f}",
    "of the best": "{of_best:.3f}",
    **COLUMNS,
    "TFLOP/s/GPU": "{tflops:.1f}",
    "MFU %": lambda row: f"{100 * row['mfu']:.1f}",
    "slowest rank's load": lambda row: " -> ".join(f"{row[k]:.2f}" for k in _OF_RANKS if row.get(k)),
    "received / balanced": "{receive_load:.2f}",
    "first step s": "{first_step_s:.0f}",
}


def _ladder_legend(document: dict[str, Any]) -> Iterator[str]:
    ranks = document["method"]["ranks"]
    yield (
        f"{ranks} GPUs, EP {ranks}. Each rung has the settings of those before it, in a job of its own; "
        f"median of {document['method']['repeats']} steps by the device's clock. Floor: the model's FLOPs at "
        f"{FLOPS_PER_S / 1e12:.0f} TFLOP/s; MFU of {PEAK_TFLOPS:.0f}. Neither counts recomputation."
    )
    yield (
        "Slowest rank's load: slots of the rank with most over the mean, mean of layers and steps. Behind "
        "an arrow: the most in a layer and micro-batch with moe.balance=replicas. Received: the most "
        "that arrived at a rank at once over what a balanced routing sends."
    )
    yield MEMORY


LADDER = Suite(measure_rungs, _LADDER_COLUMNS, _ladder_legend)

MOST_TIME = 0.10
"""Error of a projected time beyond which a row is a miss."""
QWEN = ("model=qwen3_30b_a3b", "model.num_layers=4", *DATA)
LONG, SHORT = ("data.seq_len=4096", "precision.compute=bf16"), ("data.seq_len=32",)
Runs = dict[str, tuple[int, int, tuple[str, ...]]]
"""Micro-batch size, micro-batches of a step for each rank along dp, and words of each run."""
FULL_RUNS: Runs = {
    "lite_mbs1_none": (1, 1, (*LITE, *LONG)),
    "lite_mbs1_layer": (1, 1, (*LITE, *LONG, "graph.scope=layer")),
    "lite_mbs4_full": (4, 1, (*LITE, *LONG, "graph.scope=full_iteration")),
    "lite_mbs4_recompute": (4, 1, (*LITE, *LONG, "recompute.ops=[layernorm,mla_up_proj,core_attn]")),
    "lite_mbs2_times_4": (2, 4, (*LITE, *LONG)),
    "lite_stage3_partial": (2, 1, (*LITE, *LONG, "moe.sync_free_stage=3", "graph.scope=partial")),
    "qwen_mbs2": (2, 1, (*QWEN, *LONG)),
    "qwen_mbs4_recompute_all": (4, 1, (*QWEN, *LONG, "recompute.all=true", "graph.scope=full_iteration")),
    "small_none": (4, 1, ("model=tiny", *DATA, "data.seq_len=256", "precision.compute=bf16")),
}
TINY_RUNS: Runs = {
    "plain": (1, 1, (*TINY, *SHORT)),
    "recompute": (1, 1, (*TINY, *SHORT, "recompute.all=true")),
}


def measure_projections(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=projection``."""
    ranks, card = args.nproc or 1, card_of_device(device)

    def numbers_of(config: RunConfig, found: Trained) -> Row:
        measured = numbers_of_run(config, ranks, found.steps[-args.repeats :], found.summary)
        return measured | errors_of(*projected_run(config, card, args.rates, ranks), measured)

    brief = "{projected_gib:.2f} of {peak_gib:.2f} GiB ({memory_error:+.1%}), {projected_ms:.2f} of "
    brief += "{median_ms:.2f} ms ({time_error:+.1%})"
    rates = None if args.rates is None else args.rates.name
    cases = projection_cases(args, device.type, full)
    return measure(args, cases, ranks, numbers_of, brief, card=card.name, rates=rates)


def projection_cases(args: BenchArgs, device: str, full: bool) -> list[RunCase]:
    """The runs with the user's overrides in all of them. *Raises* ConfigError."""
    refuse(args)
    ranks = args.nproc or 1
    fixed = [f"run.device={device}", f"launch.nproc={ranks}"]
    cases = []
    for name, (size, micro_batches, words) in (FULL_RUNS if full else TINY_RUNS).items():
        batch = (f"train.micro_batch_size={size}", f"train.global_batch_size={size * micro_batches * ranks}")
        cases.append(run_case(args, name, {"case": name, "ranks": ranks}, (*batch, *words), fixed))
    return cases


def projected_run(
    config: RunConfig, card: Card, rates: Path | None, num_ranks: int
) -> tuple[list[PlaceMemory], dict[str, Any]]:
    """The memory of each place along pp, and the step, on ``num_ranks`` ranks. *Raises* ConfigError."""
    if config.precision.compute is ComputeDtype.auto:
        config = replace(config, precision=replace(config.precision, compute=ComputeDtype.bf16))
    return projected(plan_of(resolve(config), num_ranks), card, rates)


def errors_of(places: Sequence[PlaceMemory], step: Row, measured: Row) -> Row:
    """Projected numbers, and errors: projected over measured, less 1.

    Memory is that of the worst rank in torch's allocator. Segments have forward and backward of a
    micro-batch; update, gradients and host are of a step.
    """
    times = step["time_s"]
    seconds = {f"{name}:forward": each for name, each in times["forward_by_segment"].items()}
    seconds |= {f"{name}:backward": each for name, each in times["backward_by_segment"].items()}
    seconds |= {"update": times["update"], "gradients": times["exposed_gradients"], "host": times["host"]}
    projected_ms, projected_gib = step["step_time_s"] * 1e3, max(map(allocated_bytes, places)) / 2**30
    errors = {
        "memory": (projected_gib / measured["peak_gib"] - 1, MEMORY_ERROR),
        "time": (projected_ms / measured["median_ms"] - 1, MOST_TIME),
    }
    return {
        "projected_gib": projected_gib,
        "projected_ms": projected_ms,
        "projected_by_segment_ms": {name: round(each * 1e3, 4) for name, each in seconds.items()},
        **{f"{name}_error": error for name, (error, _) in errors.items()},
        "misses": [name for name, (error, most) in errors.items() if abs(error) > most],
    }


def _error(missed: str) -> Cell:
    return lambda row: f"{row[f'{missed}_error']:+.1%}{' miss' if missed in row['misses'] else ''}"


_PROJECTION_COLUMNS: dict[str, Cell] = {
    "run": "{case}",
    "projected GiB": "{projected_gib:.2f}",
    "measured GiB": "{peak_gib:.2f}",
    "error of GiB": _error("memory"),
    "projected ms": "{projected_ms:.2f}",
    "measured ms": "{median_ms:.2f}",
    "p10 to p90": "{p10_ms:.2f} to {p90_ms:.2f}",
    "error of ms": _error("time"),
}


def _projection_legend(document: dict[str, Any]) -> Iterator[str]:
    missed = [row["case"] for row in document["rows"] if row.get("misses")]
    yield (
        f"Misses, memory beyond {MEMORY_ERROR:.0%} or time beyond {MOST_TIME:.0%}: "
        f"{', '.join(missed) or 'none'}. Memory: most that torch's allocator held at a time, of the worst "
        f"rank. Time: median of {document['method']['repeats']} steps. Rates: "
        f"{document['method']['rates'] or 'those without a file'}, of {document['method']['card']}."
    )


PROJECTION = Suite(measure_projections, _PROJECTION_COLUMNS, _projection_legend)
