"""Look at schedules of a pipeline: makespan, bubble, activations, and each rank's actions over time.

python -m graphmoe.pipeline_view schedule=1f1b,zb1p stages=8 microbatches=32 out=pictures
python -m graphmoe.pipeline_view model=deepseek_v2_lite schedule=zbv stages=4
python -m graphmoe.pipeline_view 'layout="Et|(tt|)*6L"' stages=4 virtual_stages=2
python -m graphmoe.pipeline_view run=outputs/tiny out=pictures
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.text import Text

from graphmoe.config.arguments import emit, parse_args, run_tool, text_table
from graphmoe.pipeline_view.arguments import ViewArgs, check
from graphmoe.pipeline_view.page import Panel, idle_shares, shown_peak, summary, write_page
from graphmoe.pipeline_view.plans import DEFAULT_COST, Plan, make_plan, recorded_panels
from graphmoe.plan.pipeline import Together
from graphmoe.plan.pipeline.layouts import parse_layout
from graphmoe.plan.pipeline.simulate import Span

PROG = "graphmoe.pipeline_view"


def main(argv: list[str]) -> None:
    args = parse_args(ViewArgs, argv, prog=PROG, places=("schedule",))
    check(args)
    plans: list[Plan] = []
    if args.run is not None:
        panels = recorded_panels(args.run, args.step, args.cost.comm)
    else:
        plans = [make_plan(args, place) for place in range(len(args.schedule or [""]))]
        panels = [plan.panel for plan in plans if plan.panel]
    pictures = [] if args.out is None else [args.out / "pipeline.html"]
    for path in pictures:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_page(path, shlex.join(["python", "-m", PROG, *argv]), panels)
    emit(document(plans, panels, pictures), Group(*text(args, plans, panels, pictures)), args.format)


def document(plans: list[Plan], panels: list[Panel], pictures: list[Path]) -> dict[str, Any]:
    """Return the JSON document: one schedule or layout, or a list ``schedules`` of several."""
    layouts = [
        {**layout_document(plan), **({"slower_than_1f1b": plan.slower} if plan.panel else {})}
        for plan in plans
    ] or [{} for _ in panels]
    timelines = [timeline_document(panel) for panel in panels] or [{}]
    entries = [{**layout, **timeline} for layout, timeline in zip(layouts, timelines, strict=True)]
    shown = entries[0] if len(entries) == 1 else {"schedules": entries}
    return {**shown, "pictures": [str(path) for path in pictures]} if pictures else shown


def text(
    args: ViewArgs, plans: list[Plan], panels: list[Panel], pictures: list[Path]
) -> Iterator[RenderableType]:
    """Yield the document's content as tables; a layout shared by several schedules is shown once."""
    yield from (
        layout_table(plan) for plan in {(p.layout, p.placement): p for p in plans if p.layout}.values()
    )
    yield from map(timeline_table, panels)
    yield from (Text(plan.slower, "yellow") for plan in plans if plan.slower)
    if panels:
        said = "makespan: from the first start to the last end of any rank"
        if args.run is None:
            forward = f"{DEFAULT_COST if args.cost.f is None else args.cost.f:g}"
            said += f", in the unit of costs: a rank's forward of one micro-batch is cost.f={forward}"
            said += ", in the mean of ranks" * (args.model is not None)
        yield Text(said)
    yield from (Text(f"written: {path}") for path in pictures)
    if panels and any(plan.layout is not None and not plan.costs for plan in plans):
        yield Text("all stages cost the same here; model=<preset> weighs them by modelled times")
    if panels and not pictures:
        yield Text("out=<folder> draws this")


def layout_document(plan: Plan) -> dict[str, Any]:
    if plan.layout is None:
        return {}
    placement, pieces = plan.placement, parse_layout(plan.layout)
    ranks = [list(placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    return {
        "stages": placement.num_ranks,
        "virtual_stages": placement.num_stages // placement.num_ranks,
        "layout": plan.layout,
        "pieces": pieces,
        "ranks": ranks,
        "rank_pieces": [[pieces[stage] for stage in stages] for stages in ranks],
        **({"stage_ms": [1e3 * cost.total for cost in plan.costs]} if plan.costs else {}),
    }


def layout_table(plan: Plan) -> Group:
    total = sum(cost.total for cost in plan.costs)
    rows = []
    for stage, piece in enumerate(parse_layout(plan.layout or "")):
        layers = plan.stages[stage].layers
        numbers = f"{layers.start} to {layers.stop - 1}" if len(layers) > 1 else "".join(map(str, layers))
        share = [f"{plan.costs[stage].total / total:.1%}"] if plan.costs else []
        rows.append([str(stage), str(plan.placement.rank_of[stage]), piece, numbers, *share])
    columns = ["stage", "rank", "piece", "layers", *(["of the time"] if plan.costs else [])]
    table = text_table(columns, rows, names=(2, 3), box=SIMPLE_HEAD)
    return Group(Text(f"layout {plan.layout}", "bold"), table)


def timeline_document(panel: Panel) -> dict[str, Any]:
    """Return a timeline as plain values. ``stages`` is the number of ranks, as on the command line."""
    timeline = panel.timeline
    ranks = range(timeline.table.placement.num_ranks)
    rows: list[dict[str, list[dict[str, Any]]]] = [{"compute": [], "comm": []} for _ in ranks]
    for span in timeline.spans:
        rows[span.rank][span.track] += _actions(span, panel.scale)
    return {
        "schedule": timeline.table.schedule,
        "title": panel.title,
        "stages": len(ranks),
        "virtual_stages": timeline.table.placement.num_stages // len(ranks),
        "microbatches": timeline.table.num_micro_batches,
        "ranks": [list(timeline.table.placement.stages_of(rank)) for rank in ranks],
        "unit": panel.unit or None,
        "makespan": timeline.makespan * panel.scale,
        "bubble": timeline.bubble,
        "peak_activations": list(timeline.peak_activations),
        "peak_bytes": timeline.peak_bytes and list(timeline.peak_bytes),
        "busy": [1 - idle for idle in idle_shares(timeline)],
        "actions": [row["compute"] for row in rows],
        "transfers": [row["comm"] for row in rows],
    }


def timeline_table(panel: Panel) -> Group:
    timeline, rows = panel.timeline, []
    for rank, idle in enumerate(idle_shares(timeline)):
        stages = " ".join(map(str, timeline.table.placement.stages_of(rank)))
        rows.append((str(rank), stages, f"{1 - idle:.1%}", shown_peak(timeline, rank)))
    table = text_table(["rank", "stages", "busy", "peak"], rows, names=(1,), box=SIMPLE_HEAD)
    return Group(Text(f"{panel.title}: {summary(panel)}", "bold"), table)


def _actions(span: Span, scale: float) -> Iterator[dict[str, Any]]:
    both = span.step if isinstance(span.step, Together) else (span.step,)
    for place, action in enumerate(both):
        yield {
            "action": str(action),
            "kind": action.kind,
            "stage": action.stage,
            "micro_batch": action.micro_batch,
            "start": span.start * scale,
            "end": span.end * scale,
            **({"in_turns_with": str(both[1 - place])} if len(both) == 2 else {}),
        }


if __name__ == "__main__":
    run_tool(main)
