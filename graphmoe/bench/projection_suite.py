"""``suite=projection``: short training runs, and what is projected of their peak memory and step time.

Each run is a job of its own, as a user starts it. The jobs share the compile cache.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from graphmoe.bench.own_process import ProcessFailed
from graphmoe.bench.step_suite import UNREAD
from graphmoe.bench.training_job import steps_of, train
from graphmoe.bench.words import compose_config, refuse, without, words_of
from graphmoe.config.schema import ComputeDtype, ConfigError, RunConfig
from graphmoe.ops.timing import spread
from graphmoe.plan.costs.hardware import Card
from graphmoe.plan.costs.rates import rates_of
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.costs.speeds import Speeds
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.plan import pipeline_of
from graphmoe.plan.rules.check import resolve
from graphmoe.project.document import MEMORY_ERROR
from graphmoe.project.memory import PlaceMemory, exact_memory
from graphmoe.project.projected_memory import allocated_bytes
from graphmoe.project.step_time import StepTime, step_time
from graphmoe.run.files import SUMMARY_FILE

WARM_UP_STEPS = 2
"""Before those that are timed, after those of graph.warmup_steps and the step that is captured."""
MOST_TIME = 0.10
"""Errors beyond which a row is a miss."""
GIB = 2**30


class Run(NamedTuple):
    """What one run sets."""

    micro_batch_size: int
    words: tuple[str, ...]
    micro_batches: int = 1
    """In a step, times the ranks that share a micro-batch."""


@dataclass(frozen=True)
class Setting:
    """What is measured if the command line says nothing else."""

    words: tuple[str, ...]
    runs: dict[str, Run]


LITE = ("model=deepseek_v2_lite", "model.num_layers=6")
QWEN = ("model=qwen3_30b_a3b", "model.num_layers=4")
PARTS = "recompute.ops=[layernorm,mla_up_proj,core_attn]"
FULL = Setting(
    ("data=synthetic", "data.seq_len=4096", "optim.lr=1e-6", "precision.compute=bf16"),
    {
        "lite_mbs1_none": Run(1, LITE),
        "lite_mbs1_layer": Run(1, (*LITE, "graph.scope=layer")),
        "lite_mbs4_full": Run(4, (*LITE, "graph.scope=full_iteration")),
        "lite_mbs4_recompute": Run(4, (*LITE, PARTS)),
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
CHOSEN_BY = {
    "train.steps": "repeats",
    "run.device": "device",
    "launch.nproc": "nproc",
}
"""Keys that the suite sets, and its argument for each."""


@dataclass(frozen=True)
class ProjectionCase:
    """One run, with all that its job sets."""

    name: str
    words: tuple[str, ...]


@dataclass
class ProjectionRow:
    """What a run took and what is projected of it; an error where it could not run or be projected."""

    case: str
    overrides: list[str]
    ranks: int
    projected_gib: float | None = None
    """Of the worst rank, without what torch's allocator does not hold."""
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

    @property
    def brief(self) -> str:
        """For the log."""
        memory, seconds = self.memory_error or 0, self.time_error or 0
        return (
            f"{self.projected_gib:.2f} of {self.measured_gib:.2f} GiB ({memory:+.1%}), "
            f"{self.projected_ms:.2f} of {self.measured_ms:.2f} ms ({seconds:+.1%})"
        )

    def take(self, samples_ms: list[float], summary: dict[str, Any]) -> None:
        """Fill in what was measured; what is projected is there."""
        assert self.projected_gib is not None and self.projected_ms is not None
        self.samples_ms = samples_ms
        self.p10_ms, self.measured_ms, self.p90_ms = spread(samples_ms)
        self.measured_gib, self.device_gib = summary["peak_memory_gib"], summary["device_memory_gib"]
        self.memory_error = self.projected_gib / self.measured_gib - 1
        self.time_error = self.projected_ms / self.measured_ms - 1
        if abs(self.memory_error) > MEMORY_ERROR:
            self.misses.append("memory")
        if abs(self.time_error) > MOST_TIME:
            self.misses.append("time")


def projection_cases(
    setting: Setting, device: str, num_ranks: int, repeats: int, *, overrides: str = ""
) -> list[ProjectionCase]:
    """The runs with the words of the command line in all of them. *Raises* ConfigError where none can run."""
    own = words_of(overrides)
    refuse(own, CHOSEN_BY, UNREAD)
    cases, errors = [], []
    for name, (size, words, micro_batches) in setting.runs.items():
        base = (
            f"train.micro_batch_size={size}",
            f"train.global_batch_size={size * micro_batches * num_ranks}",
            *without(setting.words, words),
            *words,
        )
        given = (*without(base, own), *own, *UNREAD, "log.sample_tokens=0")
        given = (*given, f"run.device={device}", f"launch.nproc={num_ranks}")
        warm_up = 0
        try:
            warm_up = compose_config(*given).graph.warmup_steps
        except ConfigError as error:  # of one run with these words, which its row will say
            errors.append(error)
        steps = repeats + WARM_UP_STEPS + warm_up + 1
        cases.append(ProjectionCase(name, (*given, f"train.steps={steps}", f"train.log_interval={steps}")))
    if len(errors) == len(cases):
        raise errors[0]
    return cases


def run_projection_case(
    case: ProjectionCase, card: Card, rates: Path | None, num_ranks: int, repeats: int, limit_s: float
) -> ProjectionRow:
    """Project a run and measure it by a job of its own, which gets ``limit_s`` seconds. Raises nothing."""
    row = ProjectionRow(case.name, list(case.words), num_ranks)
    try:
        places, step = projected(compose_config(*case.words), card, rates, num_ranks)
        row.projected_gib = max(map(allocated_bytes, places)) / GIB
        row.projected_ms = step.step_s * 1e3
        row.projected_by_segment_ms = _by_segment_ms(step)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            folder = Path(scratch) / "run"
            train(case.words, folder, limit_s)
            summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
            samples = [round(step["step_s"] * 1e3, 4) for step in steps_of(folder)][-repeats:]
            row.take(samples, summary)
    except (ConfigError, ProcessFailed, OSError) as error:
        row.error = " ".join(str(error).split())
    return row


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
    return places, step_time(config, Sizes.of(config, layout, on_nvidia=on_nvidia), places, speeds, plan)


def _by_segment_ms(step: StepTime) -> dict[str, float]:
    found = {f"{name}:forward": seconds for name, seconds in step.forward_s.items()}
    found |= {f"{name}:backward": seconds for name, seconds in step.backward_s.items()}
    found |= {"update": step.update_s, "gradients": step.gradients_s, "host": step.host_s}
    return {name: round(seconds * 1e3, 4) for name, seconds in found.items()}


def render_projections(document: dict[str, Any]) -> Iterator[str]:
    """The table, and what a reader must know of it."""
    yield "| run | projected GiB | measured GiB | error | projected ms | measured ms | p10 to p90 | error |"
    yield f"|{'---|' * 8}"
    for row in document["rows"]:
        if row["error"]:
            yield f"| {row['case']} | failed: {row['error'].replace('|', '/')} |{' |' * 6}"
            continue
        cells = [
            row["case"],
            f"{row['projected_gib']:.2f}",
            f"{row['measured_gib']:.2f}",
            f"{row['memory_error']:+.1%}{' miss' if 'memory' in row['misses'] else ''}",
            f"{row['projected_ms']:.2f}",
            f"{row['measured_ms']:.2f}",
            f"{row['p10_ms']:.2f} to {row['p90_ms']:.2f}",
            f"{row['time_error']:+.1%}{' miss' if 'time' in row['misses'] else ''}",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    missed = [row["case"] for row in document["rows"] if row["misses"]]
    yield (
        f"Misses, memory beyond {MEMORY_ERROR:.0%} or time beyond {MOST_TIME:.0%}: "
        f"{', '.join(missed) or 'none'}. Memory: most that torch's allocator held at a time, of the worst "
        f"rank. Time: median of {document['method']['repeats']} steps. Rates: "
        f"{document['method']['rates'] or 'those without a file'}, of {document['method']['card']}."
    )
