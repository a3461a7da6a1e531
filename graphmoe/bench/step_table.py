"""The rows of ``suite=step``, and their table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graphmoe.bench.cases import BYTES_PER_S, FLOPS_PER_S
from graphmoe.bench.step_times import StepTimes
from graphmoe.config.schema import RunConfig
from graphmoe.model.flops import flops_per_token
from graphmoe.model.sizes import count_parameters
from graphmoe.ops.timing import spread

UPDATE_BYTES = 34
"""Per parameter: main weights and moments read and written, gradients read twice, bf16 weights written."""


@dataclass(kw_only=True)
class StepRow(StepTimes):
    """What a case took, or why there are no numbers. Floors have the rates of `cases`."""

    case: str
    scope: str
    again: bool
    overrides: list[str]
    tokens: int = 0
    """Per step."""
    parameters: int = 0
    floor_ms: float | None = None
    """Of the model's FLOPs."""
    floor_with_optimizer_ms: float | None = None
    """And of the bytes that the optimizer's update moves."""
    p10_ms: float | None = None
    median_ms: float | None = None
    p90_ms: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_p10: float | None = None
    tokens_per_s_p90: float | None = None
    tflops: float | None = None
    time_over_floor: float | None = None
    time_over_floor_with_optimizer: float | None = None
    share_of_floor_rate: float | None = None
    host_ms: float | None = None
    idle_share: float | None = None
    """1 - busy / median, but not below 0."""
    idle_share_raw: float | None = None
    error: str | None = None

    def take(self, times: StepTimes) -> None:
        """Fill in what was measured and what follows from it."""
        for name, value in vars(times).items():
            setattr(self, name, value)
        self.samples_ms = [round(ms, 4) for ms in times.samples_ms]
        self.host_samples_ms = [round(ms, 4) for ms in times.host_samples_ms]
        p10, median, p90 = spread(times.samples_ms)
        self.p10_ms, self.median_ms, self.p90_ms = p10, median, p90
        self.tokens_per_s, self.tokens_per_s_p10, self.tokens_per_s_p90 = (
            self.tokens / ms * 1e3 for ms in (median, p90, p10)
        )
        assert self.floor_ms is not None and self.floor_with_optimizer_ms is not None
        self.time_over_floor = median / self.floor_ms
        self.time_over_floor_with_optimizer = median / self.floor_with_optimizer_ms
        self.share_of_floor_rate = self.floor_ms / median
        self.tflops = self.share_of_floor_rate * FLOPS_PER_S / 1e12
        self.host_ms = spread(times.host_samples_ms)[1]
        if times.busy_ms is not None:
            self.idle_share_raw = 1 - times.busy_ms / median
            self.idle_share = max(0.0, self.idle_share_raw)

    def take_floors(self, config: RunConfig) -> None:
        """Fill in what the configuration says alone."""
        assert config.data.seq_len is not None
        self.tokens = config.train.global_batch_size * config.data.seq_len
        self.parameters = count_parameters(config.model).total.full
        flops = flops_per_token(config.model, config.data.seq_len).total * self.tokens
        self.floor_ms = flops / FLOPS_PER_S * 1e3
        self.floor_with_optimizer_ms = self.floor_ms + UPDATE_BYTES * self.parameters / BYTES_PER_S * 1e3


def render_steps(document: dict[str, Any]) -> Iterator[str]:
    """The table, and what a reader must know of it."""
    yield (
        "| case | scope | tokens/s | p10 to p90 | step ms | step / floor | GPU idle % | host ms | pool GiB "
        "| peak GiB | reserved GiB | capture s |"
    )
    yield f"|{'---|' * 12}"
    yield from map(_line, document["rows"])
    yield ""
    method = document["method"]
    for case, row in {row["case"]: row for row in document["rows"] if row["floor_ms"]}.items():
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


def _line(row: dict[str, Any]) -> str:
    scope = f"{row['scope']}, again" if row["again"] else row["scope"]
    if row["error"]:
        return f"| {row['case']} | {scope} | failed: {row['error'].replace('|', '/')} |{' |' * 9}"
    cells = [
        row["case"],
        scope,
        f"{row['tokens_per_s']:,.0f}",
        f"{row['tokens_per_s_p10']:,.0f} to {row['tokens_per_s_p90']:,.0f}",
        f"{row['median_ms']:.2f}",
        f"{row['time_over_floor']:.2f}",
        "" if row["idle_share"] is None else f"{100 * row['idle_share']:.1f}",
        f"{row['host_ms']:.2f}",
        *(_gib(row[f"{name}_bytes"]) for name in ("pool", "peak_allocated", "peak_reserved")),
        "" if row["capture_s"] is None else f"{row['capture_s']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f}"
