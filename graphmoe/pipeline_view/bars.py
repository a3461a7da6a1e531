"""Bars of a picture, one for each action of a timeline, and a PNG with them.

A rank has a row of height 1 around its number. Transfers, where there are any, have a narrow track below the
track of computation; a forward and a backward that take turns are two bars of half the height.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from graphmoe.config.schema import ConfigError
from graphmoe.pipeline_view.arguments import MATPLOTLIB
from graphmoe.plan.pipeline.actions import Action, Placement, Together
from graphmoe.plan.pipeline.simulate import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


WIDTH_IN, DPI = 16.0, 120
ROW_IN, HEAD_IN, LEGEND_IN = 0.34, 0.75, 0.45
"""Heights of a rank's row, of what is around a panel, and of the legend."""
_FONT, _SMALLEST_FONT = 7.0, 4.5
_DIGIT_WIDTH = 0.64
"""Width of a digit as a share of the font's size."""


class Panel(NamedTuple):
    """A timeline, and its title and unit in a picture."""

    title: str
    timeline: Timeline
    unit: str
    """Unit of times as they are shown, such as ms; may be empty."""
    scale: float = 1.0
    """Factor from the timeline's own unit to the shown one."""


class Bar(NamedTuple):
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
    spans, placement = panel.timeline.spans, panel.timeline.placement
    has_transfers = any(span.track == "comm" for span in spans)
    return [bar for span in spans for bar in _bars(span, placement, panel.scale, has_transfers)]


def text_colour(colour: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    red, green, blue = bytes.fromhex(colour[1:])
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


def shown_makespan(panel: Panel) -> str:
    return f"{panel.timeline.makespan * panel.scale:,.6g} {panel.unit}".strip()


def axis_title(panels: Sequence[Panel]) -> str:
    return f"time, {panels[0].unit}" if panels[0].unit else "time, in the unit of the costs"


def summary(panel: Panel) -> str:
    """A panel's numbers on one line."""
    timeline = panel.timeline
    peaks = timeline.peak_activations if timeline.peak_bytes is None else timeline.peak_bytes
    most = max(range(timeline.placement.num_ranks), key=peaks.__getitem__)
    peak = shown_peak(timeline, most)
    return f"makespan {shown_makespan(panel)}, bubble {timeline.bubble:.1%}, peak {peak}"


def kinds_of(bars: Sequence[Bar]) -> list[BarKind]:
    """Return the kinds of some bars, in the order of the legend."""
    found = {bar.kind for bar in bars}
    return [kind for kind in COLOURS if kind in found]


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


def draw_chart(path: Path, panels: Sequence[Panel]) -> None:
    """Write the panels one below the other on a common axis of time.

    *Raises* ConfigError where the file cannot be written or matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            f"{path}: a PNG needs matplotlib: {MATPLOTLIB}; html=... needs nothing more"
        ) from error

    drawn = [bars_of(panel) for panel in panels]
    ranks = [panel.timeline.placement.num_ranks for panel in panels]
    height = sum(ROW_IN * count + HEAD_IN for count in ranks) + LEGEND_IN
    figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    rows = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=ranks)[:, 0]
    end = max((bar.end for bars in drawn for bar in bars), default=1.0)
    for axes, panel, bars in zip(rows, panels, drawn, strict=True):
        axes.set_xlim(0, end)
        _draw(axes, panel, bars)
        _label(axes, bars, points_per_time=0.86 * WIDTH_IN * 72 / end)
    rows[-1].set_xlabel(axis_title(panels))
    kinds = kinds_of([bar for bars in drawn for bar in bars])
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in kinds],
        loc="outside upper left",
        ncols=len(COLOURS),
        frameon=False,
    )
    try:
        figure.savefig(path, dpi=DPI, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error


def _draw(axes: Axes, panel: Panel, bars: Sequence[Bar]) -> None:
    from matplotlib.collections import PolyCollection

    corners = [
        [(bar.start, bar.low), (bar.end, bar.low), (bar.end, bar.high), (bar.start, bar.high)] for bar in bars
    ]
    colours = [bar.colour for bar in bars]
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.4))
    num_ranks = panel.timeline.placement.num_ranks
    idle = idle_shares(panel.timeline)
    axes.set_ylim(num_ranks - 0.5, -0.5)
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    right = axes.secondary_yaxis("right")
    right.set_yticks(
        range(num_ranks),
        [f"{idle[rank]:.1%} idle, {shown_peak(panel.timeline, rank)}" for rank in range(num_ranks)],
        fontsize=8,
    )
    for side in (axes, right):
        side.tick_params(axis="y", length=0)
        side.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{panel.title}: {summary(panel)}", loc="left", fontsize=10)


def _label(axes: Axes, bars: Sequence[Bar], points_per_time: float) -> None:
    for bar in bars:
        if bar.kind == "comm":
            continue
        room = (bar.end - bar.start) * points_per_time - 1
        size = min(_FONT, room / (_DIGIT_WIDTH * len(bar.label)), 0.8 * 72 * ROW_IN * (bar.high - bar.low))
        if size >= _SMALLEST_FONT:
            axes.text(
                (bar.start + bar.end) / 2,
                (bar.low + bar.high) / 2,
                bar.label,
                size=size,
                color=text_colour(bar.colour),
                ha="center",
                va="center_baseline",
                clip_on=True,
                in_layout=False,
            )
