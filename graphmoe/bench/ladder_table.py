"""The rows of ``suite=ladder``, their table and their chart."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphmoe.bench.cases import FLOPS_PER_S
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.model.flops import flops_per_token
from graphmoe.ops.timing import spread

PEAK_TFLOPS = 989.0
"""Dense bf16 of an H100 or H200, which published figures of MFU count."""


@dataclass
class LadderRow:
    """What one rung took, or why there are no numbers. Rates are those of one GPU."""

    rung: str
    what: str
    ranks: int
    overrides: list[str]
    tokens: int = 0
    """Of all ranks in a step."""
    floor_ms: float | None = None
    """Of the model's FLOPs on all GPUs, evenly shared."""
    samples_ms: list[float] = field(default_factory=list)
    p10_ms: float | None = None
    median_ms: float | None = None
    p90_ms: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    time_over_floor: float | None = None
    rank_load: float | None = None
    """Slots of the rank with most over the mean of ranks, mean of layers and steps."""
    receive_load: float | None = None
    """The most that arrived at any rank in a layer and micro-batch, over what a balanced routing sends."""
    peak_gib: float | None = None
    """What tensors took, of the rank with most."""
    device_gib: float | None = None
    """What was taken of its GPU, graphs and other ranks' buffers included."""
    first_step_s: float | None = None
    loss: float | None = None
    """Of the last step: the same for all rungs with the same micro-batches, but for rounding."""
    gain: float | None = None
    """Its rate over that of the last rung before it that ran."""
    error: str | None = None

    def take_floor(self, config: RunConfig) -> None:
        """Fill in what the configuration says alone."""
        assert config.data.seq_len is not None
        self.tokens = config.train.global_batch_size * config.data.seq_len
        flops = flops_per_token(config.model, config.data.seq_len).total * self.tokens
        self.floor_ms = flops / FLOPS_PER_S / self.ranks * 1e3

    def take(self, steps: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
        """Fill in what the timed rows of metrics.jsonl and the summary of the run say."""
        assert self.floor_ms is not None
        times = [step["step_s"] * 1e3 for step in steps]
        self.samples_ms = [round(ms, 4) for ms in times]
        self.p10_ms, self.median_ms, self.p90_ms = spread(times)
        self.tokens_per_s = self.tokens / self.median_ms * 1e3 / self.ranks
        self.time_over_floor = self.median_ms / self.floor_ms
        self.tflops = FLOPS_PER_S / 1e12 / self.time_over_floor
        self.mfu = self.tflops / PEAK_TFLOPS
        self.rank_load = statistics.fmean(step["rank_load"] for step in steps)
        received = [step["receive_load"] for step in steps if "receive_load" in step]
        self.receive_load = max(received, default=None)
        self.peak_gib, self.device_gib = summary["peak_memory_gib"], summary["device_memory_gib"]
        self.first_step_s, self.loss = summary["time_to_first_step_s"], steps[-1]["loss"]


def take_gains(rows: Sequence[LadderRow]) -> None:
    """Fill in each rung's gain."""
    before: float | None = None
    for row in rows:
        if row.tokens_per_s is not None:
            row.gain = row.tokens_per_s / before if before else None
            before = row.tokens_per_s


def render_ladder(document: dict[str, Any]) -> Iterator[str]:
    """The table, and what a reader must know of it."""
    rows, method = document["rows"], document["method"]
    yield (
        "| rung | tokens/s/GPU | gain | of the best | TFLOP/s/GPU | MFU % | step ms | p10 to p90 "
        "| step / floor | slowest rank's load | received / balanced | peak GiB | GPU GiB | first step s |"
    )
    yield f"|{'---|' * 14}"
    best = max((row["tokens_per_s"] for row in rows if row["tokens_per_s"]), default=None)
    for row in rows:
        yield _line(row, best)
    yield ""
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

    rows = [row for row in document["rows"] if row["tokens_per_s"]]
    figure = Figure(figsize=(9, 0.45 * max(len(rows), 3) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row["rung"] for row in rows], [row["tokens_per_s"] for row in rows], color="#4477aa")
    gains = ["" if row["gain"] is None else f"  x{row['gain']:.2f}" for row in rows]
    labels = [f" {row['tokens_per_s']:,.0f}{gain}" for row, gain in zip(rows, gains, strict=True)]
    axes.bar_label(bars, labels)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("tokens/s/GPU")
    axes.set_title(_title(document))
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write the chart {path}: {error}") from error


def _title(document: dict[str, Any]) -> str:
    words = dict(word.split("=", 1) for word in document["rows"][0]["overrides"] if "=" in word)
    ranks, device = document["method"]["ranks"], document["environment"]["device"]
    return f"{words.get('model', '')}, {ranks} x {device}, EP {ranks}, S {words.get('data.seq_len', '')}"


def _line(row: dict[str, Any], best: float | None) -> str:
    if row["error"]:
        return f"| {row['rung']} | failed: {row['error'].replace('|', '/')} |{' |' * 12}"
    assert best is not None
    cells = [
        row["rung"],
        f"{row['tokens_per_s']:,.0f}",
        "" if row["gain"] is None else f"{row['gain']:.3f}",
        f"{row['tokens_per_s'] / best:.3f}",
        f"{row['tflops']:.1f}",
        f"{100 * row['mfu']:.1f}",
        f"{row['median_ms']:.1f}",
        f"{row['p10_ms']:.1f} to {row['p90_ms']:.1f}",
        f"{row['time_over_floor']:.2f}",
        f"{row['rank_load']:.2f}",
        "" if row["receive_load"] is None else f"{row['receive_load']:.2f}",
        f"{row['peak_gib']:.1f}",
        f"{row['device_gib']:.1f}",
        f"{row['first_step_s']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"
