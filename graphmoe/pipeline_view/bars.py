"""Bars of a picture, one per action of a timeline.

Each rank is a row of height 1 around its number: computation, and a narrow track of transfers below. An
interleaved forward and backward are two bars of half the height.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from graphmoe.plan.pipeline.actions import Action, Placement, Together
from graphmoe.plan.pipeline.simulate import Span, Timeline

BarKind = Literal["F", "B", "I", "W", "comm"]
# Paul Tol's *bright*, for any colour blindness; later stages of a rank are lighter
COLOURS: dict[BarKind, str] = {
    "F": "#4477aa",
    "B": "#ee6677",
    "I": "#ccbb44",
    "W": "#228833",
    "comm": "#bbbbbb",
}
WORDS: dict[BarKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    "comm": "transfer",
}
_LIGHTEST = 0.55  # share of white in a rank's last stage
_HALF = 0.43


class Panel(NamedTuple):
    title: str
    timeline: Timeline
    unit: str
    scale: float = 1.0  # factor from the timeline's unit to the shown one


class Bar(NamedTuple):
    """Action or transfer, in the panel's unit."""

    kind: BarKind
    action: Action
    rank: int
    start: float
    end: float
    low: float
    high: float
    colour: str
    beside: Action | None = None

    @property
    def label(self) -> str:
        return str(self.action.micro_batch)

    @property
    def what(self) -> str:
        action = self.action
        micro_batch = f"micro-batch {action.micro_batch}, stage {action.stage}, rank {self.rank}"
        if self.kind == "comm":
            return f"waits for what {action} reads: {micro_batch}"
        turns = f", in turns with {self.beside}" if self.beside else ""
        return f"{action}: {WORDS[self.kind]} of {micro_batch}{turns}"


def bars_of(panel: Panel) -> list[Bar]:
    spans, placement = panel.timeline.spans, panel.timeline.table.placement
    has_transfers = any(span.track == "comm" for span in spans)
    return [bar for span in spans for bar in _bars(span, placement, panel.scale, has_transfers)]


def text_colour(colour: str) -> str:
    red, green, blue = bytes.fromhex(colour[1:])
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#222222"


def idle_shares(timeline: Timeline) -> list[float]:
    """Return each rank's idle share of the makespan."""
    busy = [0.0] * timeline.table.placement.num_ranks
    for span in timeline.spans:
        busy[span.rank] += span.end - span.start if span.track == "compute" else 0.0
    return [1 - time / timeline.makespan if timeline.makespan else 0.0 for time in busy]


def shown_peak(timeline: Timeline, rank: int) -> str:
    if timeline.peak_bytes is not None:
        return f"{timeline.peak_bytes[rank] / 2**30:.3g} GiB"
    peak = f"{timeline.peak_activations[rank]:.4g}"
    return f"{peak} activation" if peak == "1" else f"{peak} activations"


def shown_makespan(panel: Panel) -> str:
    return f"{panel.timeline.makespan * panel.scale:,.6g} {panel.unit}".strip()


def summary(panel: Panel) -> str:
    timeline = panel.timeline
    peaks = timeline.peak_activations if timeline.peak_bytes is None else timeline.peak_bytes
    most = max(range(timeline.table.placement.num_ranks), key=peaks.__getitem__)
    peak = shown_peak(timeline, most)
    return f"makespan {shown_makespan(panel)}, bubble {timeline.bubble:.1%}, peak {peak}"


def bars_by_kind(panel: Panel) -> dict[BarKind, list[Bar]]:
    """Return a panel's bars by kind, in the legend's order; the legend has each first bar's colour."""
    found: dict[BarKind, list[Bar]] = {kind: [] for kind in COLOURS}
    for bar in sorted(bars_of(panel), key=lambda bar: bar.colour != COLOURS[bar.kind]):
        found[bar.kind].append(bar)
    return {kind: bars for kind, bars in found.items() if bars}


def _bars(span: Span, placement: Placement, scale: float, has_transfers: bool) -> Iterator[Bar]:
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
    share = _LIGHTEST * stages.index(stage) / max(len(stages) - 1, 1)
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in bytes.fromhex(colour[1:]))
