"""``suite=projection``: short jobs beside the memory and the time that are projected of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphmoe.bench.arguments import BenchArgs, card_of_device, compose_config, refuse, split_list, without
from graphmoe.bench.cases import Cell, Measured, Row, table
from graphmoe.bench.jobs import UNREAD, RunCase, Setting, run_cases, steps_words, train
from graphmoe.config.schema import ComputeDtype, ConfigError, RunConfig
from graphmoe.ops.timing import spread
from graphmoe.plan.costs.hardware import Card
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.plan import pipeline_of
from graphmoe.plan.rules.check import resolve
from graphmoe.project.document import MEMORY_ERROR, projected
from graphmoe.project.memory import PlaceMemory, allocated_bytes

MOST_TIME = 0.10
"""Error of a projected time beyond which a row is a miss."""


class Run(NamedTuple):
    """One run; ``micro_batches`` are those of a step for each rank along dp."""

    micro_batch_size: int
    words: tuple[str, ...]
    micro_batches: int = 1


LITE = ("model=deepseek_v2_lite", "model.num_layers=6")
QWEN = ("model=qwen3_30b_a3b", "model.num_layers=4")
FULL = Setting(
    ("data=synthetic", "data.seq_len=4096", "optim.lr=1e-6", "precision.compute=bf16"),
    {
        "lite_mbs1_none": Run(1, LITE),
        "lite_mbs1_layer": Run(1, (*LITE, "graph.scope=layer")),
        "lite_mbs4_full": Run(4, (*LITE, "graph.scope=full_iteration")),
        "lite_mbs4_recompute": Run(4, (*LITE, "recompute.ops=[layernorm,mla_up_proj,core_attn]")),
        "lite_mbs2_times_4": Run(2, LITE, micro_batches=4),
        "lite_stage3_partial": Run(2, (*LITE, "moe.sync_free_stage=3", "graph.scope=partial")),
        "qwen_mbs2": Run(2, QWEN),
        "qwen_mbs4_recompute_all": Run(4, (*QWEN, "recompute.all=true", "graph.scope=full_iteration")),
        "small_none": Run(4, ("model=tiny", "data.seq_len=256")),
    },
)
TINY = Setting(
    ("model=tiny", "model.num_layers=2", "data=synthetic", "data.seq_len=32", "optim.lr=1e-6"),
    {"plain": Run(1, ()), "recompute": Run(1, ("recompute.all=true",))},
)
KEYS = {"train.steps": "repeats", "run.device": "device", "launch.nproc": "nproc"}
"""Keys that the suite sets, and its argument for each."""
WARM_UP_STEPS = 2
"""Steps before the timed ones, after those of graph.warmup_steps and the step that is captured."""


def measure_projections(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=projection``."""
    num_ranks, card = args.nproc or 1, card_of_device(device)

    def numbers_of(row: Row, config: RunConfig) -> Row:
        places, step = projected_run(config, card, args.rates, num_ranks)
        steps, summary = train(row["overrides"], args.limit_s)
        return errors_of(places, step, steps[-args.repeats :], summary)

    rows = run_cases(
        projection_cases(FULL if full else TINY, device.type, num_ranks, args), args, numbers_of, _brief
    )
    method = {
        "card": card.name,
        "ranks": num_ranks,
        "rates": None if args.rates is None else args.rates.name,
        "warm_up_steps": f"graph.warmup_steps + 1 + {WARM_UP_STEPS}",
        "max_s_per_row": args.limit_s,
    }
    return rows, [], method


def projection_cases(setting: Setting, device: str, num_ranks: int, args: BenchArgs) -> list[RunCase]:
    """The runs with the user's overrides in all of them. *Raises* ConfigError where none can run."""
    own = split_list(args.overrides or "")
    refuse(own, KEYS, UNREAD)
    cases, errors = [], []
    for name, (size, words, micro_batches) in setting.runs.items():
        base = (
            f"train.micro_batch_size={size}",
            f"train.global_batch_size={size * micro_batches * num_ranks}",
            *without(setting.words, words),
            *words,
        )
        given = [*without(base, own), *own, *UNREAD, "log.sample_tokens=0"]
        given += [f"run.device={device}", f"launch.nproc={num_ranks}"]
        warm_up = 0
        try:
            warm_up = compose_config(*given).graph.warmup_steps
        except ConfigError as error:  # of one run with these words, which its row will say
            errors.append(error)
        given += steps_words(args.repeats + WARM_UP_STEPS + warm_up + 1)
        cases.append(RunCase(name, {"case": name, "overrides": given, "ranks": num_ranks}))
    if len(errors) == len(cases):
        raise errors[0]
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


def errors_of(
    places: Sequence[PlaceMemory], step: Row, steps: Sequence[dict[str, Any]], summary: dict[str, Any]
) -> Row:
    """Projected numbers beside measured ones, and errors: projected over measured, less 1.

    Memory is that of the worst rank in torch's allocator. Segments have forward and backward of a
    micro-batch; update, gradients and host are of a step.
    """
    times = step["time_s"]
    seconds = {f"{name}:forward": each for name, each in times["forward_by_segment"].items()}
    seconds |= {f"{name}:backward": each for name, each in times["backward_by_segment"].items()}
    seconds |= {"update": times["update"], "gradients": times["exposed_gradients"], "host": times["host"]}
    samples_ms = [round(each["step_s"] * 1e3, 4) for each in steps]
    p10_ms, measured_ms, p90_ms = spread(samples_ms)
    projected_ms, projected_gib = step["step_time_s"] * 1e3, max(map(allocated_bytes, places)) / 2**30
    memory_error = projected_gib / summary["peak_memory_gib"] - 1
    time_error = projected_ms / measured_ms - 1
    errors = {"memory": (memory_error, MEMORY_ERROR), "time": (time_error, MOST_TIME)}
    return {
        "projected_gib": projected_gib,
        "measured_gib": summary["peak_memory_gib"],
        "memory_error": memory_error,
        "device_gib": summary["device_memory_gib"],
        "projected_ms": projected_ms,
        "measured_ms": measured_ms,
        "p10_ms": p10_ms,
        "p90_ms": p90_ms,
        "time_error": time_error,
        "samples_ms": samples_ms,
        "projected_by_segment_ms": {name: round(each * 1e3, 4) for name, each in seconds.items()},
        "misses": [name for name, (error, most) in errors.items() if abs(error) > most],
    }


def _brief(row: Row) -> str:
    return (
        "{projected_gib:.2f} of {measured_gib:.2f} GiB ({memory_error:+.1%}), "
        "{projected_ms:.2f} of {measured_ms:.2f} ms ({time_error:+.1%})"
    ).format_map(row)


def render_projections(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table and its legend."""

    def error(key: str, missed: str) -> Cell:
        return lambda row: f"{row[key]:+.1%}{' miss' if missed in row['misses'] else ''}"

    columns: dict[str, Cell] = {
        "run": "{case}",
        "projected GiB": "{projected_gib:.2f}",
        "measured GiB": "{measured_gib:.2f}",
        "error of GiB": error("memory_error", "memory"),
        "projected ms": "{projected_ms:.2f}",
        "measured ms": "{measured_ms:.2f}",
        "p10 to p90": "{p10_ms:.2f} to {p90_ms:.2f}",
        "error of ms": error("time_error", "time"),
    }
    yield from table(columns, document["rows"])
    missed = [row["case"] for row in document["rows"] if row.get("misses")]
    yield (
        f"Misses, memory beyond {MEMORY_ERROR:.0%} or time beyond {MOST_TIME:.0%}: "
        f"{', '.join(missed) or 'none'}. Memory: most that torch's allocator held at a time, of the worst "
        f"rank. Time: median of {document['method']['repeats']} steps. Rates: "
        f"{document['method']['rates'] or 'those without a file'}, of {document['method']['card']}."
    )
