"""Panels of a pipeline page: schedules simulated with given sizes, or a recorded run; or only a layout."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from graphmoe.config.arguments import nearest
from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.pipeline_view.arguments import CostKeys, ViewArgs
from graphmoe.pipeline_view.page import Panel
from graphmoe.plan.costs.segment_times import SegmentTime, modelled_parts, stage_costs
from graphmoe.plan.pipeline import Placement, Together
from graphmoe.plan.pipeline.balance import default_layout
from graphmoe.plan.pipeline.check import TableError
from graphmoe.plan.pipeline.layouts import StagePieces, parse_layout, pieces_of
from graphmoe.plan.pipeline.plan import slower_than_1f1b
from graphmoe.plan.pipeline.schedules import make_table, placement_of, schedule_of, schedule_rules
from graphmoe.plan.pipeline.simulate import Costs, Timeline, simulate

DEFAULT_RANKS, DEFAULT_COST = 4, 1000.0
MS_PER_US = 1e-3
# configuration keys in errors -> keys of this tool
_WORDS = {
    "parallel.pp": "stages",
    "pipeline.virtual_stages": "virtual_stages",
    "pipeline.schedule": "schedule",
    "pipeline.microbatches": "microbatches",
    "pipeline.ep_overlap": "overlap",
}


class Plan(NamedTuple):
    placement: Placement
    panel: Panel | None = None
    layout: str | None = None
    stages: tuple[StagePieces, ...] = ()
    costs: Sequence[SegmentTime] = ()  # seconds per sequence by stage, if a model is given
    slower: str | None = None  # warning that the schedule is slower than 1f1b, with an alternative


def make_plan(args: ViewArgs, place: int) -> Plan:
    """Return the plan of schedule ``place``, or of the layout. *Raises* ConfigError with this tool's keys."""
    try:
        plan = _make_plan(args, place)
        return plan if plan.panel is None or args.overlap else plan._replace(slower=_slower(args, plan))
    except ConfigError as error:
        message = str(error)
        for key, word in _WORDS.items():
            message = message.replace(key, word)
        raise ConfigError(message) from error


def load_preset(name: str) -> ModelConfig:
    """Return a model preset. *Raises* ConfigError."""
    folder = Path(str(files("graphmoe.conf"))) / "model"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        raise ConfigError(f"model={name} is not a preset{nearest(name, names)}")
    loaded = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(folder / f"{name}.yaml"))
    config = OmegaConf.to_object(loaded)
    assert isinstance(config, ModelConfig)
    return config


def _make_plan(args: ViewArgs, place: int) -> Plan:
    name = args.schedule[place] if args.schedule else None
    model = None if args.model is None else load_preset(args.model)
    layout = args.layout
    if layout and len(layout) > 1 and layout[0] == layout[-1] and layout[0] in "'\"":
        layout = layout[1:-1]  # quotes that a shell has left
    num_ranks, virtual = _sizes(args, place, name, layout)
    sizes = num_ranks, args.microbatches or 4 * num_ranks, virtual
    if name is None:
        placement = Placement.loop(num_ranks, virtual)
    elif problems := [*schedule_rules(name, *sizes, overlap=args.overlap)]:
        raise ConfigError("\n  ".join(problems))
    else:
        placement = placement_of(name, num_ranks, virtual)
    if layout is None and model is not None:
        layout = default_layout(model, args.seq_len, placement.rank_of)
    stages: tuple[StagePieces, ...] = ()
    costs: Sequence[SegmentTime] = ()
    if layout is not None:
        pieces = parse_layout(layout, key="layout")
        letters = "".join(pieces)
        num_layers = letters.count("t") if model is None else model.num_layers
        mtp_depth = letters.count("m") if model is None else model.mtp_depth
        stages = pieces_of(layout, num_layers, mtp_depth, num_ranks * virtual, key="layout")
        costs = () if model is None else stage_costs(pieces, modelled_parts(model, args.seq_len))
    if name is None:
        return Plan(placement, None, layout, stages, costs)
    of_stages = _costs(args.cost, placement, costs)
    timeline = simulate(make_table(name, *sizes, overlap=args.overlap, costs=of_stages), of_stages)
    words = [name, *([f"{virtual} stages a rank"] if virtual > 1 else []), *["overlap"] * args.overlap]
    return Plan(placement, Panel(", ".join(words), timeline, ""), layout, stages, costs)


def _slower(args: ViewArgs, plan: Plan) -> str | None:
    assert plan.panel is not None
    shown, ranks = plan.panel.timeline, plan.placement.num_ranks

    def timeline_of(name: str) -> Timeline | None:
        if name == shown.table.schedule:
            return shown
        try:
            other = replace(args, schedule=[name], virtual_stages=None, layout=None, stages=ranks)
            panel = _make_plan(other, 0).panel
        except ConfigError:
            return None
        return panel.timeline if panel else None

    return slower_than_1f1b(shown.table.schedule, timeline_of)


def _sizes(args: ViewArgs, place: int, name: str | None, layout: str | None) -> tuple[int, int]:
    given = args.virtual_stages or []
    virtual = given[place if len(given) > 1 else 0] if given else None
    num_pieces = 0 if layout is None else len(parse_layout(layout, key="layout"))
    if virtual is None and args.stages is not None and num_pieces and num_pieces % args.stages == 0:
        virtual = num_pieces // args.stages
    if virtual is None:
        virtual = schedule_of(name).virtual_stages[0] if name else 1
    fitting = max(num_pieces // virtual, 1) if num_pieces else DEFAULT_RANKS
    return args.stages or fitting, virtual


def _costs(keys: CostKeys, placement: Placement, stages: Sequence[SegmentTime]) -> Costs:
    activation = None if keys.activation_gib is None else keys.activation_gib * 2**30
    f, b, w = (DEFAULT_COST if given is None else given for given in (keys.f, keys.b, keys.w))
    costs = Costs.of_rank(placement, f, b, w, comm=keys.comm, hidden=keys.hidden, activation_bytes=activation)
    if not stages:
        return costs
    # scaled to a mean of cost.f over the ranks' forwards
    scale = f * placement.num_ranks / sum(stage.forward for stage in stages)
    return replace(
        costs,
        forward=tuple(stage.forward * scale for stage in stages),
        backward_input=tuple(stage.inputs * scale for stage in stages),
        backward_weight=tuple(stage.weights * scale for stage in stages),
    )


def recorded_panels(run: Path, step: int | None, comm: float) -> list[Panel]:
    """Return panels of a recorded step, by default the last, and its simulation. *Raises* ConfigError."""
    from graphmoe.runtime.pipeline.recorder import FILE_NAME, read_timelines  # imports torch

    path = run / FILE_NAME
    timelines = read_timelines(path)
    if not timelines:
        raise ConfigError(f"{path} has no steps; continue the run with profile.pipeline=true")
    step = max(timelines) if step is None else step
    if step not in timelines:
        raise ConfigError(
            f"step={step} is not in {path}; use one of {', '.join(map(str, sorted(timelines)))}"
        )
    recorded = timelines[step]
    costs, name = median_costs(timelines.values(), comm / MS_PER_US), recorded.table.schedule
    try:
        simulated = simulate(recorded.table, costs)
    except TableError as error:
        raise ConfigError(f"step {step} of {path} is not a complete step: {error}") from error
    return [
        Panel(f"{name}, step {step} as recorded", recorded, "ms", MS_PER_US),
        Panel(f"{name}, simulated with the run's median times", simulated, "ms", MS_PER_US),
    ]


def median_costs(timelines: Iterable[Timeline], comm: float) -> Costs:
    """Return median times of a run's steps by stage and kind, in the timelines' unit."""
    alone: dict[tuple[str, int], list[float]] = defaultdict(list)
    halves: dict[tuple[str, int], list[float]] = defaultdict(list)
    pairs: list[tuple[Together, float]] = []
    num_stages = 0
    for timeline in timelines:
        num_stages = timeline.table.placement.num_stages
        for span in timeline.spans:
            took = span.end - span.start
            if span.track != "compute":
                continue
            if isinstance(span.step, Together):
                pairs.append((span.step, took))
                for action in span.step:
                    halves[action.kind, action.stage].append(took / 2)
            else:
                alone[span.step.kind, span.step.stage].append(took)

    # an action that never runs alone on a stage is assigned half of a pair's time
    def of(kind: str, stage: int) -> float:
        return statistics.median(alone.get((kind, stage)) or halves.get((kind, stage)) or [0.0])

    saved = [sum(of(action.kind, action.stage) for action in pair) - took for pair, took in pairs]
    return Costs(
        tuple(of("F", stage) for stage in range(num_stages)),
        tuple(of("I", stage) or of("B", stage) for stage in range(num_stages)),  # B is dgrad and wgrad in one
        tuple(of("W", stage) for stage in range(num_stages)),
        comm,
        max(statistics.median(saved), 0.0) if saved else 0.0,
    )
