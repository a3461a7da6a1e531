"""Plan of one panel: a schedule with its sizes, layout and costs, or a layout alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table as TextTable
from rich.text import Text

from graphmoe.config.arguments import nearest
from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.pipeline_view.arguments import CostKeys, ViewArgs
from graphmoe.pipeline_view.bars import Panel
from graphmoe.pipeline_view.sources import modelled_costs
from graphmoe.plan.costs.segment_times import SegmentTime, modelled_parts, stage_costs
from graphmoe.plan.pipeline.actions import Placement
from graphmoe.plan.pipeline.balance import default_layout
from graphmoe.plan.pipeline.layouts import StagePieces, parse_layout, pieces_of
from graphmoe.plan.pipeline.plan import slower_than_1f1b
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table, placement_of, schedule_rules
from graphmoe.plan.pipeline.simulate import Costs, Timeline, simulate

DEFAULT_RANKS, DEFAULT_COST = 4, 1000.0
_WORDS = {
    "parallel.pp": "stages",
    "pipeline.virtual_stages": "virtual_stages",
    "pipeline.schedule": "schedule",
    "pipeline.microbatches": "microbatches",
    "pipeline.ep_overlap": "overlap",
}
"""Keys of a run that errors name, and the keys of this tool in their place."""


@dataclass(frozen=True)
class Plan:
    """Placement, layout and timeline of one schedule, or of a layout without one."""

    placement: Placement
    panel: Panel | None = None
    layout: str | None = None
    """Layout string."""
    stages: tuple[StagePieces, ...] = ()
    """Pieces of the layout's stages."""
    costs: tuple[SegmentTime, ...] = ()
    """Seconds of one sequence by stage, where a model is given."""
    slower: str | None = None
    """Warning that the schedule is slower than 1f1b, with one to use instead; None where it is not."""


def make_plan(args: ViewArgs, place: int) -> Plan:
    """The plan of the schedule in this place of the list. *Raises* ConfigError in the tool's words."""
    try:
        plan = _make_plan(args, place)
        return plan if plan.panel is None or args.overlap else replace(plan, slower=_slower(args, plan))
    except ConfigError as error:
        message = str(error)
        for key, word in _WORDS.items():
            message = message.replace(key, word)
        raise ConfigError(message) from error


def layout_document(plan: Plan) -> dict[str, Any]:
    """A layout as plain values, nothing where there is none."""
    if plan.layout is None:
        return {}
    placement, pieces = plan.placement, parse_layout(plan.layout)
    ranks = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    document: dict[str, Any] = {
        "stages": placement.num_ranks,
        "virtual_stages": placement.num_stages // placement.num_ranks,
        "layout": plan.layout,
        "pieces": pieces,
        "ranks": [list(stages) for stages in ranks],
        "rank_pieces": [[pieces[stage] for stage in stages] for stages in ranks],
    }
    if plan.costs:
        document["stage_ms"] = [1e3 * cost.total for cost in plan.costs]
    return document


def layout_table(plan: Plan) -> Group:
    """A layout by stage."""
    assert plan.layout is not None
    table = TextTable(box=SIMPLE_HEAD)
    for name in ("stage", "rank", "piece", "layers", *(["of the time"] if plan.costs else [])):
        table.add_column(name, justify="left" if name in ("piece", "layers") else "right")
    total = sum(cost.total for cost in plan.costs)
    for stage, piece in enumerate(parse_layout(plan.layout)):
        layers = plan.stages[stage].layers
        numbers = f"{layers.start} to {layers.stop - 1}" if len(layers) > 1 else "".join(map(str, layers))
        share = [f"{plan.costs[stage].total / total:.1%}"] if plan.costs else []
        table.add_row(str(stage), str(plan.placement.rank_of[stage]), piece, numbers, *share)
    return Group(Text(f"layout {plan.layout}", "bold"), table)


def load_preset(name: str) -> ModelConfig:
    """The shape of a preset of the group ``model``. *Raises* ConfigError."""
    folder = Path(str(files("graphmoe.conf"))) / "model"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        raise ConfigError(f"model={name} is no preset{nearest(name, names)}")
    loaded = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(folder / f"{name}.yaml"))
    config = OmegaConf.to_object(loaded)
    assert isinstance(config, ModelConfig)
    return config


def _make_plan(args: ViewArgs, place: int) -> Plan:
    name = args.schedule[place] if args.schedule else None
    model = None if args.model is None else load_preset(args.model)
    layout = None if args.layout is None else _unquoted(args.layout)
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
    costs: list[SegmentTime] = []
    if layout is not None:
        pieces = parse_layout(layout, key="layout")
        letters = "".join(pieces)
        num_layers = letters.count("t") if model is None else model.num_layers
        mtp_depth = letters.count("m") if model is None else model.mtp_depth
        stages = pieces_of(layout, num_layers, mtp_depth, num_ranks * virtual, key="layout")
        costs = [] if model is None else stage_costs(pieces, modelled_parts(model, args.seq_len))
    if name is None:
        return Plan(placement, None, layout, stages, tuple(costs))
    of_stages = _costs(args.cost, placement, costs)
    timeline = simulate(make_table(name, *sizes, overlap=args.overlap, costs=of_stages), of_stages)
    words = [name, *([f"{virtual} stages a rank"] if virtual > 1 else [])]
    panel = Panel(", ".join([*words, *(["overlap"] if args.overlap else [])]), timeline, "")
    return Plan(placement, panel, layout, stages, tuple(costs))


def _slower(args: ViewArgs, plan: Plan) -> str | None:
    """Return a warning where 1f1b would be faster on as many ranks, with a schedule to use instead."""
    assert plan.panel is not None
    shown = plan.panel.timeline

    def timeline_of(name: str) -> Timeline | None:
        if name == shown.schedule:
            return shown
        other = replace(
            args, schedule=[name], virtual_stages=None, layout=None, stages=plan.placement.num_ranks
        )
        try:
            panel = _make_plan(other, 0).panel
        except ConfigError:
            return None
        return panel.timeline if panel else None

    return slower_than_1f1b(shown.schedule, timeline_of)


def _sizes(args: ViewArgs, place: int, name: str | None, layout: str | None) -> tuple[int, int]:
    """Return ranks and virtual stages: as given, else by the layout's pieces, else by default."""
    given = args.virtual_stages or []
    virtual = given[place if len(given) > 1 else 0] if given else None
    num_pieces = 0 if layout is None else len(parse_layout(layout, key="layout"))
    if virtual is None and args.stages is not None and num_pieces and num_pieces % args.stages == 0:
        virtual = num_pieces // args.stages
    if virtual is None:
        virtual = SCHEDULES[name].virtual_stages[0] if name in SCHEDULES else 1
    fitting = max(num_pieces // virtual, 1) if num_pieces else DEFAULT_RANKS
    return args.stages or fitting, virtual


def _costs(keys: CostKeys, placement: Placement, stages: Sequence[SegmentTime]) -> Costs:
    """Return the costs of stages: modelled where the model is known, else equal."""
    activation = None if keys.activation_gib is None else keys.activation_gib * 2**30
    f, b, w = (DEFAULT_COST if given is None else given for given in (keys.f, keys.b, keys.w))
    costs = Costs.of_rank(placement, f, b, w, comm=keys.comm, hidden=keys.hidden, activation_bytes=activation)
    return costs if not stages else modelled_costs(stages, placement, f, costs)


def _unquoted(text: str) -> str:
    """Remove quotes around the text that a shell has left."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
