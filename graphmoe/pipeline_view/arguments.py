"""Keys of ``graphmoe.pipeline_view``, and the check of their values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from graphmoe.config.schema import ConfigError, OutputFormat


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
    """Schedules to show side by side, such as 1f1b,zb1p or package.module:NAME; a wrong one is answered with
    the list."""
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
    out: Path | None = None
    """Folder for pipeline.html, a page that needs no network."""
    format: OutputFormat = OutputFormat.text
    """text, or json: one document on stdout and nothing else there."""


MOST_CELLS = 2**16
"""Stages times micro-batches at most: so many are computed in some ten seconds."""
LARGEST_COST = 1e100
BESIDE_A_RUN = ("run", "step", "cost.comm", "out", "format")
OF_A_SCHEDULE = ("microbatches", "overlap", "cost.f", "cost.b", "cost.w", "cost.comm", "cost.activation_gib")


def check(args: ViewArgs) -> None:
    """Check the values. *Raises* ConfigError with everything that is wrong."""
    given = {**_given(args), **_given(args.cost, "cost.")}
    problems = [
        *_purpose(args, given),
        *_numbers(args, given),
        *_without_effect(args, given),
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def _given(keys: ViewArgs | CostKeys, prefix: str = "") -> dict[str, Any]:
    """Return the keys whose values are not their defaults: cost.w=0 counts, cost.comm=0 does not."""
    default = type(keys)()
    values = {f.name: getattr(keys, f.name) for f in fields(keys) if f.name != "cost"}
    return {f"{prefix}{k}": v for k, v in values.items() if v != getattr(default, k) and v != []}


def _purpose(args: ViewArgs, given: Mapping[str, Any]) -> Iterator[str]:
    if not {"schedule", "layout", "model", "run"} & given.keys():
        yield "nothing to look at; use schedule=1f1b,zb1p, layout='Et|tL', model=deepseek_v2_lite or run=..."
    if args.run is not None and (own := [key for key in given if key not in BESIDE_A_RUN]):
        yield f"run={args.run} has its own {', '.join(own)}; leave out what the run says itself"


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
        yield f"step={args.step} is one of a run; add run=..."
    for key in ("cost.b", "cost.w"):
        if args.model is not None and key in given:
            yield f"model={args.model} says what backwards cost; leave out {key}={given[key]}"
    if args.run is not None:
        return
    if args.cost.hidden and not args.overlap:
        yield f"cost.hidden={args.cost.hidden} is for overlap=true"
    if "seq_len" in given and args.model is None:
        yield f"seq_len={args.seq_len} says what a model's parts cost; add model=..."
    useless = [key for key in (*OF_A_SCHEDULE, "out") if key in given]
    if useless and not args.schedule:
        yield f"{', '.join(useless)}: nothing is simulated or drawn without a schedule; add schedule=1f1b"
