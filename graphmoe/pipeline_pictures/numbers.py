"""The numbers of a timeline: for a document, and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from graphmoe.pipeline_pictures.bars import Panel, idle_shares, shown_peak, summary
from runtime.pipeline.actions import Action, Together
from runtime.pipeline.timeline import Span


def timeline_document(panel: Panel) -> dict[str, Any]:
    """A timeline as plain values; times have the unit of the costs, or that of the recording."""
    timeline = panel.timeline
    ranks = range(timeline.placement.num_ranks)
    rows: list[dict[str, list[dict[str, Any]]]] = [{"compute": [], "comm": []} for _ in ranks]
    for span in timeline.spans:
        rows[span.rank][span.lane] += _actions(span, panel.scale)
    return {
        "schedule": timeline.schedule,
        "unit": panel.unit or None,
        "num_ranks": len(ranks),
        "num_stages": timeline.placement.num_stages,
        "num_micro_batches": timeline.num_micro_batches,
        "stages": [list(timeline.placement.stages_of(rank)) for rank in ranks],
        "makespan": timeline.makespan * panel.scale,
        "bubble": timeline.bubble,
        "peak_activations": list(timeline.peak_activations),
        "peak_bytes": None if timeline.peak_bytes is None else list(timeline.peak_bytes),
        "busy": [1 - idle for idle in idle_shares(timeline)],
        "actions": [row["compute"] for row in rows],
        "transfers": [row["comm"] for row in rows],
    }


def timeline_table(panel: Panel) -> Table:
    """The numbers of each rank, below those of the whole."""
    table = Table(title=f"{panel.title}: {summary(panel)}", title_justify="left", box=SIMPLE_HEAD)
    for name, justify in (("rank", "right"), ("stages", "left"), ("busy", "right"), ("peak", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    timeline = panel.timeline
    for rank, idle in enumerate(idle_shares(timeline)):
        stages = " ".join(map(str, timeline.placement.stages_of(rank)))
        table.add_row(str(rank), stages, f"{1 - idle:.1%}", shown_peak(timeline, rank))
    return table


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
