"""``suite=projection``: short jobs beside the memory and the time that are projected of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graphmoe.bench.arguments import BenchArgs, card_of_device
from graphmoe.bench.cases import Cell, Measured, Row, table
from graphmoe.bench.jobs import (
    DATA,
    LITE,
    TINY,
    RunCase,
    method,
    numbers_of_run,
    refuse,
    run_case,
    run_cases,
    train,
)
from graphmoe.config.schema import ComputeDtype, RunConfig
from graphmoe.plan.costs.hardware import Card
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.plan import pipeline_of
from graphmoe.plan.rules.check import resolve
from graphmoe.project.document import MEMORY_ERROR, projected
from graphmoe.project.memory import PlaceMemory, allocated_bytes

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

    def numbers_of(row: Row, config: RunConfig) -> Row:
        places, step = projected_run(config, card, args.rates, ranks)
        found = train(row["overrides"], args.limit_s)
        measured = numbers_of_run(config, ranks, found.steps[-args.repeats :], found.summary)
        return measured | errors_of(places, step, measured)

    rows = run_cases(projection_cases(args, device.type, full), args, numbers_of, _brief)
    rates = None if args.rates is None else args.rates.name
    return rows, [], method(args, ranks, card=card.name, rates=rates)


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
    config = resolve(config)
    layout = Layout.of(config.parallel, num_ranks)
    return projected(config, layout, card, rates, pipeline_of(config, layout))


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


def _brief(row: Row) -> str:
    return (
        "{projected_gib:.2f} of {peak_gib:.2f} GiB ({memory_error:+.1%}), "
        "{projected_ms:.2f} of {median_ms:.2f} ms ({time_error:+.1%})"
    ).format_map(row)


def render_projections(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table and its legend."""

    def error(missed: str) -> Cell:
        return lambda row: f"{row[f'{missed}_error']:+.1%}{' miss' if missed in row['misses'] else ''}"

    columns: dict[str, Cell] = {
        "run": "{case}",
        "projected GiB": "{projected_gib:.2f}",
        "measured GiB": "{peak_gib:.2f}",
        "error of GiB": error("memory"),
        "projected ms": "{projected_ms:.2f}",
        "measured ms": "{median_ms:.2f}",
        "p10 to p90": "{p10_ms:.2f} to {p90_ms:.2f}",
        "error of ms": error("time"),
    }
    yield from table(columns, document["rows"])
    missed = [row["case"] for row in document["rows"] if row.get("misses")]
    yield (
        f"Misses, memory beyond {MEMORY_ERROR:.0%} or time beyond {MOST_TIME:.0%}: "
        f"{', '.join(missed) or 'none'}. Memory: most that torch's allocator held at a time, of the worst "
        f"rank. Time: median of {document['method']['repeats']} steps. Rates: "
        f"{document['method']['rates'] or 'those without a file'}, of {document['method']['card']}."
    )
