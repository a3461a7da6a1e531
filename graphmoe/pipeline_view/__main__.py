"""Look at schedules of a pipeline: makespan, bubble, activations, and a picture of who does what when.

python -m graphmoe.pipeline_view schedule=1f1b,zb1p stages=8 microbatches=32 out=pictures
python -m graphmoe.pipeline_view model=deepseek_v2_lite schedule=zbv stages=4
python -m graphmoe.pipeline_view 'layout="Et|(tt|)*6L"' stages=4 virtual_stages=2
python -m graphmoe.pipeline_view run=outputs/tiny out=pictures
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.pipeline_view.arguments import ViewArgs, check
from graphmoe.pipeline_view.bars import Panel, timeline_document, timeline_table
from graphmoe.pipeline_view.chart import draw_chart
from graphmoe.pipeline_view.page import write_page
from graphmoe.pipeline_view.plans import DEFAULT_COST, Plan, layout_document, layout_table, make_plan
from graphmoe.pipeline_view.sources import recorded_panels

PROG = "graphmoe.pipeline_view"


def main(argv: list[str]) -> None:
    """Show the schedules, the layout or the recorded run of a command line."""
    args = parse_args(ViewArgs, argv, prog=PROG)
    check(args)
    plans: list[Plan] = []
    if args.run is not None:
        panels = recorded_panels(args.run, args.step, args.cost.comm)
    else:
        plans = [make_plan(args, place) for place in range(len(args.schedule or [""]))]
        panels = [plan.panel for plan in plans if plan.panel]
    pictures = draw(args, panels, shlex.join(["python", "-m", PROG, *argv]))
    shown = text(plans, panels, pictures, makespan_in_words(args))
    emit(document(plans, panels, pictures), shown, args.format)


def draw(args: ViewArgs, panels: list[Panel], command: str) -> list[Path]:
    """Write the pictures that are asked for; returns their files. *Raises* ConfigError."""
    pngs, pages = [args.png] if args.png else [], [args.html] if args.html else []
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        pngs.append(args.out / "pipeline.png")
        pages.append(args.out / "pipeline.html")
    for path in pngs:
        draw_chart(path, panels)
    for path in pages:
        write_page(path, command, panels)
    return [*pngs, *pages]


def document(plans: list[Plan], panels: list[Panel], pictures: list[Path]) -> dict[str, Any]:
    """Return one object for a schedule or a layout; for several timelines a list of such, ``schedules``."""
    layouts = [_plan_document(plan) for plan in plans] or [{} for _ in panels]
    timelines = [timeline_document(panel) for panel in panels] or [{}]
    entries = [{**layout, **timeline} for layout, timeline in zip(layouts, timelines, strict=True)]
    shown = entries[0] if len(entries) == 1 else {"schedules": entries}
    return {**shown, "pictures": [str(path) for path in pictures]} if pictures else shown


def _plan_document(plan: Plan) -> dict[str, Any]:
    return {**layout_document(plan), **({"slower_than_1f1b": plan.slower} if plan.panel else {})}


def makespan_in_words(args: ViewArgs) -> str:
    """Define a makespan in words, with its unit where the number has none."""
    what = "makespan: from the first start to the last end of any rank"
    if args.run is not None:
        return what
    forward = f"{DEFAULT_COST if args.cost.f is None else args.cost.f:g}"
    mean = ", in the mean of ranks" if args.model is not None else ""
    return f"{what}, in the unit of costs: a rank's forward of one micro-batch is cost.f={forward}{mean}"


def text(plans: list[Plan], panels: list[Panel], pictures: list[Path], makespan: str) -> RenderableType:
    """Show the same values as tables; a layout of several schedules is shown once."""
    layouts = {(plan.layout, plan.placement): plan for plan in plans if plan.layout is not None}
    shown: list[RenderableType] = [layout_table(plan) for plan in layouts.values()]
    shown += [timeline_table(panel) for panel in panels]
    shown += [Text(plan.slower, "yellow") for plan in plans if plan.slower]
    if panels:
        shown.append(Text(makespan))
    shown += [Text(f"written: {path}") for path in pictures]
    if panels and any(plan.layout is not None and not plan.costs for plan in plans):
        shown.append(Text("all stages cost the same here; model=<preset> weighs them by modelled times"))
    if panels and not pictures:
        shown.append(Text("out=<folder> draws this"))
    return Group(*shown)


if __name__ == "__main__":
    run_tool(main)
