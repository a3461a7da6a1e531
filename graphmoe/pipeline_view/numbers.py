"""The numbers of a timeline: for a document, and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from graphmoe.pipeline_view.bars import Panel, idle_shares, shown_peak, summary
from graphmoe.plan.pipeline.actions import Action, Together
from graphmoe.plan.pipeline.timeline import Span


def timeline_document(panel: Panel) -> dict[str, Any]:
    """A timeline as plain values. ``stages`` is the number of ranks, as on the command line."""
    timeline = panel.timeline
    ranks = range(timeline.placement.num_ranks)
    rows: list[dict[str, list[dict[str, Any]]]] = [{"compute": [], "comm": []} for _ in ranks]
    for span in timeline.spans:
        rows[span.rank][span.track] += _actions(span, panel.scale)
    return {
        "schedule": timeline.schedule,
        "title": panel.title,
        "stages": len(ranks),
        "virtual_stages": timeline.placement.num_stages // len(ranks),
        "microbatches": timeline.num_micro_batches,
        "ranks": [list(timeline.placement.stages_of(rank)) for rank in ranks],
        "unit": panel.unit or None,
        "makespan": timeline.makespan * panel.scale,
        "bubble": timeline.bubble,
        "peak_activations": list(timeline.peak_activations),
        "peak_bytes": None if timeline.peak_bytes is None else list(timeline.peak_bytes),
        "busy": [1 - idle for idle in idle_shares(timeline)],
        "actions": [row["compute"] for row in rows],
        "transfers": [row["comm"] for row in rows],
    }


def timeline_table(panel: Panel) -> Group:
    """The numbers of each rank, below those of the whole."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("rank", "stages", "busy", "peak"):
        table.add_column(name, justify="left" if name == "stages" else "right")
    timeline = panel.timeline
    for rank, idle in enumerate(idle_shares(timeline)):
        stages = " ".join(map(str, timeline.placement.stages_of(rank)))
        table.add_row(str(rank), stages, f"{1 - idle:.1%}", shown_peak(timeline, rank))
    return Group(Text(f"{panel.title}: {summary(panel)}", "bold"), table)


def _actions(span: Span, scale: float) -> Iterator[dict[str, Any]]:
    """The actions of a span, two with the same times where they take turns."""
    both = (span.step.forward, span.step.backward) if isinstance(span.step, Together) else (span.step,)
    for place, action in enumerate(both):
        yield {
            "action": str(action),
            **_fields(action),
            "start": span.start * scale,
            "end": span.end * scale,
            **({"in_turns_with": str(both[1 - place])} if len(both) == 2 else {}),
        }


def _fields(action: Action) -> dict[str, Any]:
    return {"kind": action.kind, "stage": action.stage, "micro_batch": action.micro_batch}
