"""``suite=ladder``: one job on several GPUs, faster from rung to rung, in the order in which Primus published
its gains for this model (AMD, MI355X)."""

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphmoe.bench.arguments import CPU_RANKS, BenchArgs
from graphmoe.bench.cases import FLOPS_PER_S, Cell, Measured, Row, table
from graphmoe.bench.jobs import (
    COLUMNS,
    DATA,
    MEMORY,
    TINY,
    RunCase,
    brief,
    key_of,
    method,
    numbers,
    numbers_of_run,
    refuse,
    run_case,
    run_cases,
    train,
)
from graphmoe.config.schema import ConfigError, RunConfig

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
    Rung("symm", "GPUs read each other's tokens", ("moe.dispatcher=symm",)),
    Rung("partial", "graphs of attention, router and preprocessing", ("graph.scope=partial",)),
    Rung("full_iteration", "the whole step is one graph", ("graph.scope=full_iteration",)),
    Rung("ep_overlap", "a backward beside the next forward", ("pipeline.ep_overlap=true",)),
    Rung("host_tuning", "NUMA binding, garbage at fixed steps", ("host.numa=auto", "host.manual_gc=true")),
)
"""All but the larger micro-batches, which come last."""


def measure_rungs(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=ladder``."""
    ranks = args.nproc or (torch.cuda.device_count() if device.type == "cuda" else CPU_RANKS)

    def numbers_of(row: Row, config: RunConfig) -> Row:
        found = train(row["overrides"], args.limit_s)
        return rung_numbers(config, ranks, found.steps[-args.repeats :], found.summary)

    rows = run_cases(ladder_cases(args, device.type, full, ranks), args, numbers_of, brief)
    take_gains(rows)
    return rows, [], method(args, ranks)


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
    routing sends. ``loss`` is the same for all rungs with the same micro-batches, but for rounding.
    """
    row = numbers_of_run(config, ranks, steps, summary)
    return {
        **row,
        "mfu": row["tflops"] / PEAK_TFLOPS,
        "rank_load": statistics.fmean(step["rank_load"] for step in steps),
        "receive_load": max((s["receive_load"] for s in steps if "receive_load" in s), default=None),
        "first_step_s": summary["time_to_first_step_s"],
        "loss": steps[-1]["loss"],
    }


def take_gains(rows: Sequence[Row]) -> None:
    """Fill in each rung's gain: its rate over that of the last rung before it that ran."""
    before: float | None = None
    for row in rows:
        rate = row.get("tokens_per_s")
        row["gain"] = rate / before if rate and before else None
        before = rate or before


def render_ladder(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table and its legend."""
    rows, ranks = document["rows"], document["method"]["ranks"]
    best = max((row["tokens_per_s"] for row in rows if row.get("tokens_per_s")), default=1.0)
    columns: dict[str, Cell] = {
        "rung": "{rung}",
        "gain": "{gain:.3f}",
        "of the best": lambda row: f"{row['tokens_per_s'] / best:.3f}",
        **COLUMNS,
        "TFLOP/s/GPU": "{tflops:.1f}",
        "MFU %": lambda row: f"{100 * row['mfu']:.1f}",
        "slowest rank's load": "{rank_load:.2f}",
        "received / balanced": "{receive_load:.2f}",
        "first step s": "{first_step_s:.0f}",
    }
    yield from table(columns, rows)
    yield (
        f"{ranks} GPUs, EP {ranks}. Each rung has the settings of those before it, in a job of its own; "
        f"median of {document['method']['repeats']} steps by the device's clock. Floor: the model's FLOPs at "
        f"{FLOPS_PER_S / 1e12:.0f} TFLOP/s; MFU of {PEAK_TFLOPS:.0f}. Neither counts recomputation."
    )
    yield (
        "Slowest rank's load: slots of the rank with most over the mean, mean of layers and steps. Received: "
        "the most that arrived at a rank at once over what a balanced routing sends."
    )
    yield MEMORY


def draw_ladder(document: dict[str, Any], path: Path) -> None:
    """Write a bar chart of tokens/s/GPU by rung as PNG. *Raises* ConfigError where it cannot be written."""
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row.get("tokens_per_s")]
    figure = Figure(figsize=(9, 0.45 * max(len(rows), 3) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row["rung"] for row in rows], [row["tokens_per_s"] for row in rows], color="#4477aa")
    gains = ["" if row["gain"] is None else f"  x{row['gain']:.2f}" for row in rows]
    axes.bar_label(
        bars, [f" {row['tokens_per_s']:,.0f}{gain}" for row, gain in zip(rows, gains, strict=True)]
    )
    axes.invert_yaxis()
    axes.margins(x=0.25)
    given = dict(word.split("=", 1) for word in document["rows"][0]["overrides"] if "=" in word)
    ranks, device = document["method"]["ranks"], document["environment"]["device"]
    axes.set(
        xlabel="tokens/s/GPU",
        title=f"{given.get('model')}, {ranks} x {device}, EP {ranks}, S {given.get('data.seq_len')}",
    )
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write the chart {path}: {error}") from error
