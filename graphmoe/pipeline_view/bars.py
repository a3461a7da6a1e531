"""Bars of a picture, one for each action of a timeline, and its numbers as a document and a table.

A rank has a row of height 1 around its number. Transfers, where there are any, have a narrow track below the
track of computation; a forward and a backward that take turns are two bars of half the height.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from graphmoe.plan.pipeline.actions import Action, Placement, Together
from graphmoe.plan.pipeline.simulate import Span, Timeline

BarKind = Literal["F", "B", "I", "W", "comm"]
COLOURS: dict[BarKind, str] = {
    "F": "#4477aa",
    "B": "#ee6677",
    "I": "#ccbb44",
    "W": "#228833",
    "comm": "#bbbbbb",
}
"""Paul Tol's *bright*, told apart with any kind of colour blindness; further stages of a rank are lighter."""
WORDS: dict[BarKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    "comm": "transfer",
}
_LIGHTEST = 0.55
"""Share of the way to white that the colour of a rank's last stage goes."""
_HALF = 0.43
"""Half the height of a row's bars."""


@dataclass(frozen=True)
class Panel:
    """A timeline, and its title and unit in a picture."""

    title: str
    timeline: Timeline
    unit: str
    """Unit of times as they are shown, such as ms; may be empty."""
    scale: float = 1.0
    """Factor from the timeline's own unit to the shown one."""


@dataclass(frozen=True)
class Bar:
    """One action or transfer; its times have the unit of the panel."""

    kind: BarKind
    action: Action
    rank: int
    start: float
    end: float
    low: float
    """Edges of the bar across the row, with ``high``; a row lies around the number of its rank."""
    high: float
    colour: str
    beside: Action | None = None
    """Action that takes turns with this one."""

    @property
    def label(self) -> str:
        """Text in the bar: its micro-batch."""
        return str(self.action.micro_batch)

    @property
    def what(self) -> str:
        """Description of the bar in words."""
        action = self.action
        micro_batch = f"micro-batch {action.micro_batch}, stage {action.stage}, rank {self.rank}"
        if self.kind == "comm":
            return f"waits for what {action} reads: {micro_batch}"
        turns = f", in turns with {self.beside}" if self.beside else ""
        return f"{action}: {WORDS[self.kind]} of {micro_batch}{turns}"


def bars_of(panel: Panel) -> list[Bar]:
    """Return all bars of a panel, from left to right for each rank."""
    timeline = panel.timeline
    has_transfers = any(span.track == "comm" for span in timeline.spans)
    return [
        bar for span in timeline.spans for bar in _bars(span, timeline.placement, panel.scale, has_transfers)
    ]


def text_colour(colour: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    red, green, blue = _channels(colour)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#222222"


def idle_shares(timeline: Timeline) -> list[float]:
    """Return for each rank the share of the makespan in which it computes nothing."""
    busy = [0.0] * timeline.placement.num_ranks
    for span in timeline.spans:
        busy[span.rank] += span.end - span.start if span.track == "compute" else 0.0
    return [1 - time / timeline.makespan if timeline.makespan else 0.0 for time in busy]


def shown_peak(timeline: Timeline, rank: int) -> str:
    """'5.2 GiB' where bytes are known, otherwise '8 activations'."""
    if timeline.peak_bytes is not None:
        return f"{timeline.peak_bytes[rank] / 2**30:.3g} GiB"
    peak = f"{timeline.peak_activations[rank]:.4g}"
    return f"{peak} activation" if peak == "1" else f"{peak} activations"


def summary(panel: Panel) -> str:
    """A panel's numbers on one line."""
    timeline = panel.timeline
    time = f"{timeline.makespan * panel.scale:,.6g} {panel.unit}".strip()
    most = max(range(timeline.placement.num_ranks), key=lambda rank: _peaks(timeline)[rank])
    return f"makespan {time}, bubble {timeline.bubble:.1%}, peak {shown_peak(timeline, most)}"


def kinds_of(bars: Sequence[Bar]) -> list[BarKind]:
    """Return the kinds of some bars, in the order of the legend."""
    found = {bar.kind for bar in bars}
    return [kind for kind in COLOURS if kind in found]


def _peaks(timeline: Timeline) -> tuple[float, ...]:
    return timeline.peak_activations if timeline.peak_bytes is None else timeline.peak_bytes


def _bars(span: Span, placement: Placement, scale: float, has_transfers: bool) -> Iterator[Bar]:
    """The bars of a span: two where a forward and a backward take turns."""
    centre, start, end = span.rank, span.start * scale, span.end * scale
    border = centre + _HALF / 2 if has_transfers else centre + _HALF
    both = span.step if isinstance(span.step, Together) else (span.step,)
    if span.track == "comm":
        for action in both:
            yield Bar("comm", action, span.rank, start, end, border + 0.02, centre + _HALF, COLOURS["comm"])
        return
    top = centre - _HALF
    height = (border - top) / len(both)
    for place, action in enumerate(both):
        low = top + place * height
        beside = both[1 - place] if len(both) == 2 else None
        colour = _shade(COLOURS[action.kind], action.stage, placement.stages_of(span.rank))
        yield Bar(action.kind, action, span.rank, start, end, low, low + height, colour, beside)


def _shade(colour: str, stage: int, stages: Sequence[int]) -> str:
    """The colour, lighter for later stages of the rank."""
    share = _LIGHTEST * stages.index(stage) / max(len(stages) - 1, 1)
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in _channels(colour))


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


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
