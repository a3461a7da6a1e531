"""Rows and tables of the suites that train: step, ladder and projection."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphmoe.bench.cases import BYTES_PER_S, FLOPS_PER_S, table
from graphmoe.bench.step_times import StepTimes
from graphmoe.config.schema import ComputeDtype, ConfigError, RunConfig
from graphmoe.model.flops import flops_per_token
from graphmoe.model.sizes import count_parameters
from graphmoe.ops.timing import spread
from graphmoe.plan.costs.hardware import Card
from graphmoe.plan.costs.rates import rates_of
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.costs.speeds import Speeds
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.plan import pipeline_of
from graphmoe.plan.rules.check import resolve
from graphmoe.project.document import MEMORY_ERROR
from graphmoe.project.memory import PlaceMemory, allocated_bytes, exact_memory
from graphmoe.project.step_time import StepTime, step_time

UPDATE_BYTES = 34
"""Per parameter: main weights and moments read and written, gradients read twice, bf16 weights written."""
PEAK_TFLOPS = 989.0
"""Dense bf16 of an H100 or H200, which published figures of MFU count."""
MOST_TIME = 0.10
"""Error of a projected time beyond which a row is a miss."""


@dataclass(kw_only=True)
class TrainingRow:
    """Steps of a run against the model's FLOPs, or the error of a run without numbers."""

    overrides: list[str]
    ranks: int = 1
    tokens: int = 0
    """Tokens of all ranks in a step."""
    floor_ms: float | None = None
    """Time of the model's FLOPs, evenly shared by the ranks, at the rate in `cases`."""
    p10_ms: float | None = None
    median_ms: float | None = None
    p90_ms: float | None = None
    tokens_per_s: float | None = None
    """Rate of one rank."""
    tflops: float | None = None
    time_over_floor: float | None = None
    error: str | None = None

    def take_floor(self, config: RunConfig) -> None:
        """Fill in the numbers that the configuration alone gives."""
        assert config.data.seq_len is not None
        self.tokens = config.train.global_batch_size * config.data.seq_len
        flops = flops_per_token(config.model, config.data.seq_len).total * self.tokens
        self.floor_ms = flops / FLOPS_PER_S / self.ranks * 1e3

    def take_times(self, samples_ms: Sequence[float]) -> None:
        """Fill in the spread of the steps and the rates that follow from it."""
        assert self.floor_ms is not None
        self.p10_ms, self.median_ms, self.p90_ms = spread(samples_ms)
        self.tokens_per_s = self.tokens / self.median_ms * 1e3 / self.ranks
        self.time_over_floor = self.median_ms / self.floor_ms
        self.tflops = FLOPS_PER_S / 1e12 / self.time_over_floor


@dataclass(kw_only=True)
class StepRow(StepTimes, TrainingRow):
    """Times of a shape and graph scope of ``suite=step``."""

    case: str
    scope: str
    again: bool = False
    parameters: int = 0
    floor_with_optimizer_ms: float | None = None
    """`floor_ms`, and the bytes that the optimizer's update moves."""
    tokens_per_s_p10: float | None = None
    tokens_per_s_p90: float | None = None
    time_over_floor_with_optimizer: float | None = None
    share_of_floor_rate: float | None = None
    host_ms: float | None = None
    idle_share: float | None = None
    """1 - busy / median, but not below 0."""
    idle_share_raw: float | None = None

    def take_floor(self, config: RunConfig) -> None:
        super().take_floor(config)
        assert self.floor_ms is not None
        self.parameters = count_parameters(config.model).total.full
        self.floor_with_optimizer_ms = self.floor_ms + UPDATE_BYTES * self.parameters / BYTES_PER_S * 1e3

    def take(self, times: StepTimes) -> None:
        """Fill in the measured times and the numbers that follow from them."""
        for name, value in vars(times).items():
            setattr(self, name, value)
        self.samples_ms = [round(ms, 4) for ms in times.samples_ms]
        self.host_samples_ms = [round(ms, 4) for ms in times.host_samples_ms]
        self.take_times(times.samples_ms)
        assert self.median_ms and self.p10_ms and self.p90_ms and self.floor_ms
        assert self.floor_with_optimizer_ms is not None
        self.tokens_per_s_p10, self.tokens_per_s_p90 = (
            self.tokens / ms * 1e3 for ms in (self.p90_ms, self.p10_ms)
        )
        self.time_over_floor_with_optimizer = self.median_ms / self.floor_with_optimizer_ms
        self.share_of_floor_rate = self.floor_ms / self.median_ms
        self.host_ms = spread(times.host_samples_ms)[1]
        if times.busy_ms is not None:
            self.idle_share_raw = 1 - times.busy_ms / self.median_ms
            self.idle_share = max(0.0, self.idle_share_raw)


@dataclass(kw_only=True)
class LadderRow(TrainingRow):
    """Steps of a rung of ``suite=ladder``."""

    rung: str
    what: str
    samples_ms: list[float] = field(default_factory=list)
    mfu: float | None = None
    rank_load: float | None = None
    """Slots of the rank with most over the mean of ranks, mean of layers and steps."""
    receive_load: float | None = None
    """The most that arrived at any rank in a layer and micro-batch, over what a balanced routing sends."""
    peak_gib: float | None = None
    """Held by tensors, of the rank with most."""
    device_gib: float | None = None
    """In use on that rank's GPU, graphs and other ranks' buffers included."""
    first_step_s: float | None = None
    loss: float | None = None
    """Loss of the last step: the same for all rungs with the same micro-batches, but for rounding."""
    gain: float | None = None
    """Its rate over that of the last rung before it that ran."""

    def take(self, steps: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
        """Fill in the numbers of the timed rows of metrics.jsonl and of the run's summary."""
        times = [step["step_s"] * 1e3 for step in steps]
        self.samples_ms = [round(ms, 4) for ms in times]
        self.take_times(times)
        assert self.tflops is not None
        self.mfu = self.tflops / PEAK_TFLOPS
        self.rank_load = statistics.fmean(step["rank_load"] for step in steps)
        received = [step["receive_load"] for step in steps if "receive_load" in step]
        self.receive_load = max(received, default=None)
        self.peak_gib, self.device_gib = summary["peak_memory_gib"], summary["device_memory_gib"]
        self.first_step_s, self.loss = summary["time_to_first_step_s"], steps[-1]["loss"]


@dataclass(kw_only=True)
class ProjectionRow:
    """Memory and time of a run of ``suite=projection``, projected and measured."""

    case: str
    overrides: list[str]
    ranks: int
    projected_gib: float | None = None
    """Memory of the worst rank in torch's allocator."""
    measured_gib: float | None = None
    """Most that tensors took at a time, of the worst rank (torch.cuda.max_memory_allocated)."""
    memory_error: float | None = None
    """Projected over measured, less 1."""
    device_gib: float | None = None
    """In use on the device at the end, by whatever."""
    projected_ms: float | None = None
    measured_ms: float | None = None
    """Median step."""
    p10_ms: float | None = None
    p90_ms: float | None = None
    time_error: float | None = None
    samples_ms: list[float] = field(default_factory=list)
    projected_by_segment_ms: dict[str, float] = field(default_factory=dict)
    """Forward and backward of a micro-batch; and the update, gradients and host of a step."""
    misses: list[str] = field(default_factory=list)
    error: str | None = None

    def take_projection(self, config: RunConfig, card: Card, rates: Path | None) -> None:
        """Fill in the projected numbers. *Raises* ConfigError."""
        places, step = projected(config, card, rates, self.ranks)
        self.projected_gib = max(map(allocated_bytes, places)) / 2**30
        self.projected_ms = step.step_s * 1e3
        seconds = {f"{name}:forward": seconds for name, seconds in step.forward_s.items()}
        seconds |= {f"{name}:backward": seconds for name, seconds in step.backward_s.items()}
        seconds |= {"update": step.update_s, "gradients": step.gradients_s, "host": step.host_s}
        self.projected_by_segment_ms = {name: round(each * 1e3, 4) for name, each in seconds.items()}

    def take(self, steps: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
        """Fill in the measured numbers beside the projected ones."""
        assert self.projected_gib is not None and self.projected_ms is not None
        self.samples_ms = [round(step["step_s"] * 1e3, 4) for step in steps]
        self.p10_ms, self.measured_ms, self.p90_ms = spread(self.samples_ms)
        self.measured_gib, self.device_gib = summary["peak_memory_gib"], summary["device_memory_gib"]
        self.memory_error = self.projected_gib / self.measured_gib - 1
        self.time_error = self.projected_ms / self.measured_ms - 1
        errors = {"memory": (self.memory_error, MEMORY_ERROR), "time": (self.time_error, MOST_TIME)}
        self.misses = [name for name, (error, most) in errors.items() if abs(error) > most]


def projected(
    config: RunConfig, card: Card, rates: Path | None, num_ranks: int
) -> tuple[list[PlaceMemory], StepTime]:
    """The memory of each place along pp, and the step, on ``num_ranks`` ranks. *Raises* ConfigError."""
    precision = replace(config.precision)
    if precision.compute is ComputeDtype.auto:
        precision.compute = ComputeDtype.bf16
    config = resolve(replace(config, precision=precision))
    layout = Layout.of(config.parallel, num_ranks)
    on_nvidia, plan = card.is_nvidia, pipeline_of(config, layout)
    places = exact_memory(config, layout, on_nvidia=on_nvidia, plan=plan)
    speeds = Speeds(card, rates_of(card, rates))
    return places, step_time(
        config, Sizes.from_config(config, layout, on_nvidia=on_nvidia), places, speeds, plan
    )


def take_gains(rows: Sequence[LadderRow]) -> None:
    """Fill in each rung's gain."""
    before: float | None = None
    for row in rows:
        if row.tokens_per_s is not None:
            row.gain = row.tokens_per_s / before if before else None
            before = row.tokens_per_s


def _number(key: str, form: str, scale: float = 1) -> Callable[[dict[str, Any]], str]:
    """A cell with a number of the row, empty where there is none."""
    return lambda row: "" if row[key] is None else format(row[key] * scale, form)


def _range(low: str, high: str, form: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{format(row[low], form)} to {format(row[high], form)}"


def render_steps(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table and its legend."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "case": lambda row: row["case"],
        "scope": lambda row: f"{row['scope']}, again" if row["again"] else row["scope"],
        "tokens/s": _number("tokens_per_s", ",.0f"),
        "p10 to p90": _range("tokens_per_s_p10", "tokens_per_s_p90", ",.0f"),
        "step ms": _number("median_ms", ".2f"),
        "step / floor": _number("time_over_floor", ".2f"),
        "GPU idle %": _number("idle_share", ".1f", 100),
        "host ms": _number("host_ms", ".2f"),
        "pool GiB": _number("pool_bytes", ".2f", 2**-30),
        "peak GiB": _number("peak_allocated_bytes", ".2f", 2**-30),
        "reserved GiB": _number("peak_reserved_bytes", ".2f", 2**-30),
        "capture s": _number("capture_s", ".2f"),
    }
    yield from table(columns, document["rows"], named=2)
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


def render_ladder(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table and its legend."""
    rows, method = document["rows"], document["method"]
    best = max((row["tokens_per_s"] for row in rows if row["tokens_per_s"]), default=1.0)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "rung": lambda row: row["rung"],
        "tokens/s/GPU": _number("tokens_per_s", ",.0f"),
        "gain": _number("gain", ".3f"),
        "of the best": _number("tokens_per_s", ".3f", 1 / best),
        "TFLOP/s/GPU": _number("tflops", ".1f"),
        "MFU %": _number("mfu", ".1f", 100),
        "step ms": _number("median_ms", ".1f"),
        "p10 to p90": _range("p10_ms", "p90_ms", ".1f"),
        "step / floor": _number("time_over_floor", ".2f"),
        "slowest rank's load": _number("rank_load", ".2f"),
        "received / balanced": _number("receive_load", ".2f"),
        "peak GiB": _number("peak_gib", ".1f"),
        "GPU GiB": _number("device_gib", ".1f"),
        "first step s": _number("first_step_s", ".0f"),
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

    rows = [row for row in document["rows"] if row["tokens_per_s"]]
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


def render_projections(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table and its legend."""

    def error(key: str, missed: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row[key]:+.1%}{' miss' if missed in row['misses'] else ''}"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "run": lambda row: row["case"],
        "projected GiB": _number("projected_gib", ".2f"),
        "measured GiB": _number("measured_gib", ".2f"),
        "error of GiB": error("memory_error", "memory"),
        "projected ms": _number("projected_ms", ".2f"),
        "measured ms": _number("measured_ms", ".2f"),
        "p10 to p90": _range("p10_ms", "p90_ms", ".2f"),
        "error of ms": error("time_error", "time"),
    }
    yield from table(columns, document["rows"])
    missed = [row["case"] for row in document["rows"] if row["misses"]]
    yield (
        f"Misses, memory beyond {MEMORY_ERROR:.0%} or time beyond {MOST_TIME:.0%}: "
        f"{', '.join(missed) or 'none'}. Memory: most that torch's allocator held at a time, of the worst "
        f"rank. Time: median of {document['method']['repeats']} steps. Rates: "
        f"{document['method']['rates'] or 'those without a file'}, of {document['method']['card']}."
    )
