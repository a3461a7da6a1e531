"""Keys of ``graphmoe.pipeline_view``, and the check of their values."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from graphmoe.config.arguments import file_problems
from graphmoe.config.schema import ConfigError, OutputFormat
from graphmoe.pipeline_view.chart import MATPLOTLIB


@dataclass
class CostKeys:
    """Costs of a rank's whole stage for one micro-batch, in any unit; its virtual stages share them."""

    f: float | None = None
    """Forward, > 0, default 1000; with model=... the mean of ranks."""
    b: float | None = None
    """Gradients of the stage's inputs, default 1000; a whole backward takes b + w."""
    w: float | None = None
    """Gradients of its weights, default 1000."""
    comm: float = 0.0
    """Time from an action's end to the arrival of its result on another rank, >= 0; with run=... in ms."""
    hidden: float = 0.0
    """Time that a forward and a backward save when they take turns (overlap=true), >= 0."""
    activation_gib: float | None = None
    """Size of a rank's activations of a micro-batch, in GiB, > 0; default: peaks count activations."""


@dataclass
class ViewArgs:
    """Keys of the command line."""

    schedule: list[str] | None = None
    """Schedules to show side by side, such as 1f1b,zb1p; a wrong one is answered with the list."""
    stages: int | None = None
    """Ranks of the pipeline; default: as many as the layout has pieces, or 4."""
    virtual_stages: list[int] | None = None
    """Stages of each rank: for all schedules, or one for each; default: the fewest that a schedule takes."""
    microbatches: int | None = None
    """Micro-batches of a step; default: 4 for each rank."""
    overlap: bool = False
    """Forward and backward of two micro-batches take turns, as with pipeline.ep_overlap=true."""
    cost: CostKeys = field(default_factory=CostKeys)
    layout: str | None = None
    """Layout string to write out, such as 'Et|(tt|)*6L'; with model=... default: the balanced one."""
    model: str | None = None
    """Preset whose modelled times say what each stage costs."""
    seq_len: int = 4096
    """Tokens of a sequence, of which the cost of attention depends, > 0."""
    run: Path | None = None
    """Folder of a run with profile.pipeline=true: what it recorded beside a simulation with its own times."""
    step: int | None = None
    """Step of the run; default: the last one that was recorded."""
    png: Path | None = None
    """Picture to write, a file that ends in .png; needs matplotlib."""
    html: Path | None = None
    """Page to write, a file that ends in .html, which needs no network."""
    out: Path | None = None
    """Folder for pipeline.png and pipeline.html."""
    format: OutputFormat = OutputFormat.text
    """text, or json: one document on stdout and nothing else there."""


MOST_CELLS = 2**16
"""Stages times micro-batches at most: so many are computed in some ten seconds."""
LARGEST_COST = 1e100
"""Largest cost that is accepted; sums of such costs are finite."""


def check(args: ViewArgs) -> None:
    """Check the values. *Raises* ConfigError with everything that is wrong."""
    problems = [*_purpose(args), *_numbers(args), *_without_effect(args), *_pictures(args)]
    if problems:
        raise ConfigError("; ".join(problems))


def _purpose(args: ViewArgs) -> Iterator[str]:
    """Yield problems where there is nothing to look at, or more than one source of it."""
    asked = {"schedule": args.schedule, "layout": args.layout, "model": args.model}
    if args.run is None and not any(asked.values()):
        yield "nothing to look at; use schedule=1f1b,zb1p, layout='Et|tL', model=deepseek_v2_lite or run=..."
    if args.run is not None:
        sizes = {
            "stages": args.stages,
            "virtual_stages": args.virtual_stages,
            "microbatches": args.microbatches,
            "overlap": args.overlap,
            "cost.f": args.cost.f,
            "cost.b": args.cost.b,
            "cost.w": args.cost.w,
            "cost.hidden": args.cost.hidden,
            "cost.activation_gib": args.cost.activation_gib,
            "seq_len": None if args.seq_len == ViewArgs.seq_len else args.seq_len,
        }
        given = _given({**asked, **sizes})
        if given:
            yield f"run={args.run} has its own {', '.join(given)}; leave out what the run says itself"


def _given(values: Mapping[str, object]) -> list[str]:
    """Return the keys whose values are not their defaults: cost.w=0 counts, cost.comm=0 does not."""
    silent = {"cost.comm": 0.0, "cost.hidden": 0.0}
    return [
        key
        for key, value in values.items()
        if value is not None and value is not False and value != [] and value != silent.get(key)
    ]


def _numbers(args: ViewArgs) -> Iterator[str]:
    """Yield numbers outside their ranges."""
    counts = {"stages": args.stages, "microbatches": args.microbatches, "seq_len": args.seq_len}
    for key, count in counts.items():
        if count is not None and count < 1:
            yield f"{key}={count} must be 1 or more"
    virtual = args.virtual_stages or []
    if any(count < 1 for count in virtual):
        yield f"virtual_stages={','.join(map(str, virtual))} must be 1 or more"
    if len(virtual) > 1 and len(virtual) != len(args.schedule or [""]):
        yield (
            f"virtual_stages={','.join(map(str, virtual))} has {len(virtual)} numbers for "
            f"{len(args.schedule or [''])} schedules; give one for all, or one for each"
        )
    stages, micro_batches = args.stages or 1, args.microbatches or 4 * (args.stages or 1)
    if stages * micro_batches > MOST_CELLS:
        fewer = max(1, MOST_CELLS // stages)
        yield (
            f"stages={stages} with {micro_batches} micro-batches would take minutes; use fewer stages, or at "
            f"most microbatches={fewer}"
        )
    positive = {"cost.f": args.cost.f, "cost.activation_gib": args.cost.activation_gib}
    for key, value in positive.items():
        if value is not None and not 0 < value <= LARGEST_COST:
            yield f"{key}={value} must be greater than 0, and at most {LARGEST_COST:g}"
    for key in ("b", "w", "comm", "hidden"):
        value = getattr(args.cost, key)
        if value is not None and not 0 <= value <= LARGEST_COST:
            yield f"cost.{key}={value} must be 0 or greater, and at most {LARGEST_COST:g}"


def _without_effect(args: ViewArgs) -> Iterator[str]:
    """Yield keys that have no effect beside the others."""
    if args.step is not None and args.run is None:
        yield f"step={args.step} is one of a run; add run=..."
    for key in ("b", "w"):
        value = getattr(args.cost, key)
        if args.model is not None and value is not None:
            yield f"model={args.model} says what backwards cost; leave out cost.{key}={value}"
    if args.cost.hidden and not args.overlap and args.run is None:
        yield f"cost.hidden={args.cost.hidden} is for overlap=true"
    if args.seq_len != ViewArgs.seq_len and args.model is None and args.run is None:
        yield f"seq_len={args.seq_len} says what a model's parts cost; add model=..."
    if args.schedule or args.run:
        return
    given = {
        "microbatches": args.microbatches,
        "overlap": args.overlap,
        "cost.f": args.cost.f,
        "cost.b": args.cost.b,
        "cost.w": args.cost.w,
        "cost.comm": args.cost.comm,
        "cost.activation_gib": args.cost.activation_gib,
        "png": args.png,
        "html": args.html,
        "out": args.out,
    }
    if useless := _given(given):
        yield f"{', '.join(useless)}: nothing is simulated or drawn without a schedule; add schedule=1f1b"


def _pictures(args: ViewArgs) -> Iterator[str]:
    """Yield files that cannot be written."""
    yield from file_problems("png", args.png, "pipeline.png")
    yield from file_problems("html", args.html, "pipeline.html")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        yield f"out={args.out} is a file; name a folder, or use html={args.out}"
    needs_matplotlib = args.png or args.out
    if needs_matplotlib and importlib.util.find_spec("matplotlib") is None:
        yield f"{needs_matplotlib}: a PNG needs matplotlib: {MATPLOTLIB}; html=... needs nothing more"
