"""Keys of ``graphmoe.pipeline_view``, and their checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from graphmoe.config.schema import ConfigError, OutputFormat


@dataclass
class CostKeys:
    """Costs per micro-batch of all layers of a rank, in any unit of time, split over its virtual stages."""

    f: float | None = None
    """Forward, > 0, default 1000; with model=... the mean over ranks."""
    b: float | None = None
    """Input gradients (dgrad), default 1000; a whole backward costs b + w."""
    w: float | None = None
    """Weight gradients (wgrad), default 1000."""
    comm: float = 0.0
    """Time from an action's end to its result's arrival on another rank, >= 0; ms with run=..."""
    hidden: float = 0.0
    """Time saved when a forward and a backward overlap (overlap=true), >= 0."""
    activation_gib: float | None = None
    """GiB of a rank's activations per micro-batch, > 0; default: peaks count activations."""


@dataclass
class ViewArgs:
    """Command-line keys."""

    schedule: list[str] | None = None
    """Schedules to compare, such as 1f1b,zb1p or package.module:NAME; an unknown one prints the list."""
    stages: int | None = None
    """Pipeline ranks; default: from the layout, or 4."""
    virtual_stages: list[int] | None = None
    """Stages per rank: one number for all schedules, or one each; default: the schedule's minimum."""
    microbatches: int | None = None
    """Micro-batches per step; default: 4 per rank."""
    overlap: bool = False
    """Interleave forward and backward of two micro-batches, as pipeline.ep_overlap=true."""
    cost: CostKeys = field(default_factory=CostKeys)
    layout: str | None = None
    """Layout to expand, such as 'Et|(tt|)*6L'; with model=... default: balanced."""
    model: str | None = None
    """Preset whose modelled times are the stage costs."""
    seq_len: int = 4096
    """Tokens per sequence, > 0, for the cost of attention."""
    run: Path | None = None
    """Folder of a run with profile.pipeline=true, shown beside a simulation with its times."""
    step: int | None = None
    """Step of the run; default: the last recorded."""
    out: Path | None = None
    """Folder for pipeline.html, which needs no network."""
    format: OutputFormat = OutputFormat.text
    """Output on stdout: text, or one JSON document."""


MOST_CELLS = 2**16  # limit of stages times micro-batches: some ten seconds of computing
LARGEST_COST = 1e100
BESIDE_A_RUN = ("run", "step", "cost.comm", "out", "format")
OF_A_SCHEDULE = ("microbatches", "overlap", "cost.f", "cost.b", "cost.w", "cost.comm", "cost.activation_gib")


def check(args: ViewArgs) -> None:
    """Check the values. *Raises* ConfigError with all problems."""
    given = {**_given(args), **_given(args.cost, "cost.")}
    problems = [*_purpose(args, given), *_numbers(args, given), *_without_effect(args, given)]
    if problems:
        raise ConfigError("; ".join(problems))


def _given(keys: ViewArgs | CostKeys, prefix: str = "") -> dict[str, Any]:
    """Return the keys that differ from their defaults: cost.w=0 does, cost.comm=0 does not."""
    default = type(keys)()
    values = {f.name: getattr(keys, f.name) for f in fields(keys) if f.name != "cost"}
    return {f"{prefix}{k}": v for k, v in values.items() if v != getattr(default, k) and v != []}


def _purpose(args: ViewArgs, given: Mapping[str, Any]) -> Iterator[str]:
    if not {"schedule", "layout", "model", "run"} & given.keys():
        yield "nothing to show; use schedule=1f1b,zb1p, layout='Et|tL', model=deepseek_v2_lite or run=..."
    if args.run is not None and (own := [key for key in given if key not in BESIDE_A_RUN]):
        yield f"run={args.run} determines {', '.join(own)}; leave these keys out"


def _numbers(args: ViewArgs, given: Mapping[str, Any]) -> Iterator[str]:
    for key in ("stages", "microbatches", "seq_len"):
        if given.get(key, 1) < 1:
            yield f"{key}={given[key]} must be 1 or more"
    virtual, schedules = args.virtual_stages or [], len(args.schedule or [""])
    shown = f"virtual_stages={','.join(map(str, virtual))}"
    if any(count < 1 for count in virtual):
        yield f"{shown} must be 1 or more"
    if len(virtual) > 1 and len(virtual) != schedules:
        yield (
            f"{shown} has {len(virtual)} numbers for {schedules} schedules; give one for all, or one for each"
        )
    stages, micro_batches = args.stages or 1, args.microbatches or 4 * (args.stages or 1)
    if stages * micro_batches > MOST_CELLS:
        yield (
            f"stages={stages} with {micro_batches} micro-batches would take minutes; use fewer stages, or at "
            f"most microbatches={max(1, MOST_CELLS // stages)}"
        )
    for key, value in given.items():
        positive = key in ("cost.f", "cost.activation_gib")
        if key.startswith("cost.") and not (0 <= value <= LARGEST_COST and (value > 0 or not positive)):
            least = "greater than 0" if positive else "0 or greater"
            yield f"{key}={value} must be {least}, and at most {LARGEST_COST:g}"


def _without_effect(args: ViewArgs, given: Mapping[str, Any]) -> Iterator[str]:
    if args.out is not None and args.out.is_file():
        yield f"out={args.out} is a file; name a folder"
    if args.step is not None and args.run is None:
        yield f"step={args.step} selects a step of a run; add run=..."
    for key in ("cost.b", "cost.w"):
        if args.model is not None and key in given:
            yield f"model={args.model} determines the cost of backwards; leave out {key}={given[key]}"
    if args.run is not None:
        return
    if args.cost.hidden and not args.overlap:
        yield f"cost.hidden={args.cost.hidden} is for overlap=true"
    if "seq_len" in given and args.model is None:
        yield f"seq_len={args.seq_len} sets the costs of a model's parts; add model=..."
    useless = [key for key in (*OF_A_SCHEDULE, "out") if key in given]
    if useless and not args.schedule:
        yield f"{', '.join(useless)}: nothing is simulated or drawn without a schedule; add schedule=1f1b"
