"""``suite=ladder``: one job on several GPUs, faster from rung to rung, in the order in which Primus published
its gains for this model (AMD, MI355X)."""

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphmoe.bench.arguments import (
    CPU_RANKS,
    BenchArgs,
    compose_config,
    key_of,
    numbers,
    refuse,
    split_list,
    without,
)
from graphmoe.bench.cases import FLOPS_PER_S, Cell, Measured, Row, scaled, table
from graphmoe.bench.jobs import UNREAD, RunCase, Setting, rates_of_steps, run_cases, steps_words, train
from graphmoe.config.schema import ConfigError, RunConfig

PEAK_TFLOPS = 989.0
"""Dense bf16 of an H100 or H200, which published figures of MFU count."""


class Rung(NamedTuple):
    """The changes of one rung, which the rungs after it keep."""

    name: str
    words: tuple[str, ...]
    what: str


RUNGS = (
    Rung(
        "baseline",
        ("moe.dispatcher=alltoall", "graph.scope=none", "pipeline.ep_overlap=false")
        + ("passes.disabled=[fuse_loss]", "host.numa=none", "host.manual_gc=false"),
        "alltoall with counts on the host",
    ),
    Rung("loss_fusion", ("passes.disabled=[]",), "logits are never whole"),
    Rung("symm", ("moe.dispatcher=symm",), "GPUs read each other's tokens"),
    Rung("partial", ("graph.scope=partial",), "graphs of attention, router and preprocessing"),
    Rung("full_iteration", ("graph.scope=full_iteration",), "the whole step is one graph"),
    Rung("ep_overlap", ("pipeline.ep_overlap=true",), "a backward beside the next forward"),
    Rung("host_tuning", ("host.numa=auto", "host.manual_gc=true"), "NUMA binding, garbage at fixed steps"),
)
"""All but the larger micro-batches, which come last."""


FULL = Setting(
    ("model=deepseek_v2_lite", "data=synthetic", "data.seq_len=4096", "optim.lr=1e-6")
    + ("recompute.ops=[layernorm,mla_up_proj]",),
    (2, 4),
)
TINY = Setting(
    ("model=tiny", "model.num_layers=2", "data=synthetic", "data.seq_len=16", "optim.lr=1e-6"), (1, 2)
)
"""Micro-batch sizes: of all rungs, then of further rungs."""
KEYS = {
    "train.micro_batch_size": "micro_batch_sizes",
    "train.steps": "repeats",
    "run.device": "device",
    "launch.nproc": "nproc",
    "parallel.ep": "nproc",
}
"""Keys that the suite sets, and its argument for each."""
WARM_UP_STEPS = 5
"""Steps before the timed ones, after those of graph.warmup_steps and the step that is captured."""
MICRO_BATCHES = 4
"""Micro-batches of a rank in a step, if train.global_batch_size is not among the overrides."""


def measure_rungs(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=ladder``."""
    num_ranks = args.nproc or (torch.cuda.device_count() if device.type == "cuda" else CPU_RANKS)

    def numbers_of(row: Row, config: RunConfig) -> Row:
        steps, summary = train(row["overrides"], args.limit_s)
        return rung_numbers(config, num_ranks, steps[-args.repeats :], summary)

    rows = run_cases(
        ladder_cases(FULL if full else TINY, device.type, num_ranks, args),
        args,
        numbers_of,
        lambda row: f"{row['median_ms']:.1f} ms, {row['tokens_per_s']:,.0f} a GPU",
    )
    take_gains(rows)
    warm_up = f"graph.warmup_steps + 1 + {WARM_UP_STEPS}"
    return rows, [], {"ranks": num_ranks, "warm_up_steps": warm_up, "max_s_per_row": args.limit_s}


def ladder_cases(setting: Setting, device: str, num_ranks: int, args: BenchArgs) -> list[RunCase]:
    """The rungs, each with the settings of those before it. *Raises* ConfigError."""
    own = split_list(args.overrides or "")
    _check_overrides(own)
    sizes = numbers("micro_batch_sizes", args.micro_batch_sizes or "") or list(setting.runs)
    larger = [Rung(f"micro_batch_{size}", (), f"{size} sequences at once") for size in sizes[1:]]
    of_rungs = [sizes[0]] * len(RUNGS) + sizes[1:]
    base = (*without(setting.words, own), f"parallel.ep={num_ranks}", *own, *UNREAD, "log.sample_tokens=0")
    cases: list[RunCase] = []
    changed: dict[str, str] = {}
    steps: int | None = None
    for rung, size in zip((*RUNGS, *larger), of_rungs, strict=True):
        changed |= {key_of(word): word for word in rung.words}
        words = [
            *without((f"train.global_batch_size={size * num_ranks * MICRO_BATCHES}",), own),
            *base,
            *changed.values(),
            f"train.micro_batch_size={size}",
            f"run.device={device}",
            f"launch.nproc={num_ranks}",
            "launch.nodes=1",
        ]
        if steps is None:  # what is wrong with the first rung is wrong with all, as a rule
            steps = args.repeats + WARM_UP_STEPS + compose_config(*words).graph.warmup_steps + 1
        row = {"rung": rung.name, "what": rung.what, "ranks": num_ranks}
        cases.append(RunCase(rung.name, row | {"overrides": [*words, *steps_words(steps)]}))
    return cases


def _check_overrides(own: Sequence[str]) -> None:
    of_rungs = {key_of(word): rung.name for rung in RUNGS for word in rung.words}
    refuse(own, KEYS, UNREAD)
    for word in own:
        key = key_of(word)
        if key in of_rungs or key == "graph":
            rung = of_rungs.get(key, "partial")
            raise ConfigError(f"overrides={word}: the rung {rung} sets {key}; choose rungs by only=...")
        if re.match(r"(parallel|launch)\b", key):
            raise ConfigError(f"overrides={word}: the suite has all GPUs of one node along parallel.ep")


def rung_numbers(
    config: RunConfig, num_ranks: int, steps: Sequence[dict[str, Any]], summary: dict[str, Any]
) -> Row:
    """Numbers of the timed rows of metrics.jsonl and of the run's summary.

    ``receive_load`` is the most that arrived at any rank in a layer and micro-batch, over what a balanced
    routing sends. ``loss`` is the same for all rungs with the same micro-batches, but for rounding.
    """
    rates = rates_of_steps(config, num_ranks, [step["step_s"] * 1e3 for step in steps])
    received = [step["receive_load"] for step in steps if "receive_load" in step]
    return {
        **rates,
        "mfu": rates["tflops"] / PEAK_TFLOPS,
        "rank_load": statistics.fmean(step["rank_load"] for step in steps),
        "receive_load": max(received, default=None),
        "peak_gib": summary["peak_memory_gib"],
        "device_gib": summary["device_memory_gib"],
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
    rows, method = document["rows"], document["method"]
    best = max((row["tokens_per_s"] for row in rows if row.get("tokens_per_s")), default=1.0)
    columns: dict[str, Cell] = {
        "rung": "{rung}",
        "tokens/s/GPU": "{tokens_per_s:,.0f}",
        "gain": "{gain:.3f}",
        "of the best": scaled(".3f", "tokens_per_s", 1 / best),
        "TFLOP/s/GPU": "{tflops:.1f}",
        "MFU %": scaled(".1f", "mfu", 100),
        "step ms": "{median_ms:.1f}",
        "p10 to p90": "{p10_ms:.1f} to {p90_ms:.1f}",
        "step / floor": "{time_over_floor:.2f}",
        "slowest rank's load": "{rank_load:.2f}",
        "received / balanced": "{receive_load:.2f}",
        "peak GiB": "{peak_gib:.1f}",
        "GPU GiB": "{device_gib:.1f}",
        "first step s": "{first_step_s:.0f}",
    }
    yield from table(columns, rows)
    yield (
        f"{method['ranks']} GPUs, EP {method['ranks']}. Each rung has the settings of those before it, in a "
        f"job of its own; median of {method['repeats']} steps by the device's clock. Floor: the model's "
        f"FLOPs at {FLOPS_PER_S / 1e12:.0f} TFLOP/s; MFU of {PEAK_TFLOPS:.0f}. Neither counts recomputation."
    )
    yield (
        "Slowest rank's load: slots of the rank with most over the mean, mean of layers and steps. Received: "
        "the most that arrived at a rank at once over what a balanced routing sends. GPU GiB has graphs and "
        "buffers of other ranks too, at the end of the job."
    )


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
    axes.set_xlabel("tokens/s/GPU")
    given = dict(word.split("=", 1) for word in document["rows"][0]["overrides"] if "=" in word)
    ranks, device = document["method"]["ranks"], document["environment"]["device"]
    model, length = given.get("model", ""), given.get("data.seq_len", "")
    axes.set_title(f"{model}, {ranks} x {device}, EP {ranks}, S {length}")
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write the chart {path}: {error}") from error
