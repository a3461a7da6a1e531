"""Page with the timelines of a pipeline: a bar for each action, in the row of its rank.

Each rank is a row of height 1 around its number: computation, and a narrow track of transfers below. An
interleaved forward and backward are two bars of half the height.
"""

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from graphmoe.plan.pipeline import Action, Placement, Together
from graphmoe.plan.pipeline.simulate import Span, Timeline
from graphmoe.web_page import Chart, grid, paragraph, table
from graphmoe.web_page import write_page as write_whole

BarKind = Literal["F", "B", "I", "W", "comm"]
# colours of Paul Tol's *bright*, for any colour blindness; later stages of a rank are lighter
KINDS: dict[BarKind, tuple[str, str]] = {
    "F": ("#4477aa", "forward"),
    "B": ("#ee6677", "backward"),
    "I": ("#ccbb44", "gradients of inputs"),
    "W": ("#228833", "gradients of weights"),
    "comm": ("#bbbbbb", "transfer"),
}
_LIGHTEST = 0.55  # share of white in a rank's last stage
_HALF = 0.43
ROW_PX = 40
HEAD_PX, GAP_PX = 70, 60  # pixels above the first panel, and between two, for title and axis


class Panel(NamedTuple):
    title: str
    timeline: Timeline
    unit: str
    scale: float = 1.0  # factor from the timeline's unit to the shown one


class Bar(NamedTuple):
    """Bar of an action or a transfer; times are in the panel's unit."""

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
        return f"{action}: {KINDS[self.kind][1]} of {micro_batch}{turns}"


def write_page(path: Path, command: str, panels: Sequence[Panel]) -> None:
    """Write the panels on a common time axis, then their numbers by rank."""
    says = "A row is a rank; the number in a bar is its micro-batch. Later stages of a rank are lighter."
    content = grid([timeline_chart(panels)]) + table(["", *(panel.title for panel in panels)], _rows(panels))
    write_whole(path, "graphmoe: pipeline", paragraph(f"`{command}`") + paragraph(says), [("", content)])


def timeline_chart(panels: Sequence[Panel]) -> Chart:
    """Return a chart with a row per rank and a trace per kind of action."""
    heights = [panel.timeline.table.placement.num_ranks * ROW_PX for panel in panels]
    plot_px = sum(heights) + GAP_PX * (len(panels) - 1)
    traces, shown = [], set[BarKind]()
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "uniformtext": {"minsize": 8, "mode": "hide"},
        "legend": {"orientation": "h", "y": 1 + 28 / plot_px, "yanchor": "bottom", "x": 0},
        "margin": {"t": HEAD_PX, "b": 60, "l": 10, "r": 10},
        "annotations": [],
    }
    end, top_px = max(bar.end for panel in panels for bar in bars_of(panel)), plot_px
    for number, (panel, height) in enumerate(zip(panels, heights, strict=True), start=1):
        axis, top = str(number) if number > 1 else "", top_px / plot_px
        for kind, bars in bars_by_kind(panel).items():
            trace = _trace(kind, bars, panel, kind not in shown)
            traces.append({**trace, "xaxis": f"x{axis}", "yaxis": f"y{axis}"})
            shown.add(kind)
        layout[f"yaxis{axis}"] = {**_ranks_axis(panel), "domain": [(top_px - height) / plot_px, top]}
        layout[f"xaxis{axis}"] = {"range": [0, end * 1.005], "minallowed": 0, "maxallowed": end * 1.02,
                                  "anchor": f"y{axis}", **({"matches": "x"} if axis else {})}  # fmt: skip
        title = f"<b>{html.escape(panel.title)}</b>  {summary(panel)}"
        layout["annotations"].append({"text": title, "xref": "paper", "yref": "paper", "x": 0, "y": top,
                                      "xanchor": "left", "yanchor": "bottom", "showarrow": False,
                                      "font": {"size": 13}})  # fmt: skip
        top_px -= height + GAP_PX
    unit = panels[0].unit or "in the unit of the costs"
    layout[f"xaxis{axis}"]["title"] = {"text": f"time, {unit}"}
    said = "; ".join(f"{panel.title}: {summary(panel)}" for panel in panels)
    alt = f"Timelines of a pipeline, a row for each rank: {said}"
    height = plot_px + HEAD_PX + 60
    return Chart("Pipeline", alt, traces, layout, height, is_wide=True, is_timeline=True)


def _ranks_axis(panel: Panel) -> dict[str, Any]:
    ranks = range(panel.timeline.table.placement.num_ranks)
    return {
        "range": [ranks.stop - 0.5, -0.5],
        "tickvals": list(ranks),
        "ticktext": [
            f"rank {rank}<br><span style='font-size:9px'>{idle:.0%} idle, "
            f"{re.sub('activations?', 'act.', shown_peak(panel.timeline, rank))}</span>"
            for rank, idle in enumerate(idle_shares(panel.timeline))
        ],
        "fixedrange": True,
        "ticks": "",
        "showgrid": False,
        "zeroline": False,
    }


def _trace(kind: BarKind, bars: Sequence[Bar], panel: Panel, in_legend: bool) -> dict[str, Any]:
    unit = f" {panel.unit}" if panel.unit else ""
    border_px = 0 if kind == "comm" else 0.5  # transfers may be as narrow as the border
    return {
        "type": "bar",
        "orientation": "h",
        "name": KINDS[kind][1],
        "legendgroup": kind,
        "legendrank": list(KINDS).index(kind),
        "showlegend": in_legend,
        "y": [(bar.low + bar.high) / 2 for bar in bars],
        "width": [bar.high - bar.low for bar in bars],
        "base": [bar.start for bar in bars],
        "x": [bar.end - bar.start for bar in bars],
        "marker": {"color": [bar.colour for bar in bars], "line": {"width": border_px, "color": "#ffffff"}},
        **({} if kind == "comm" else {"text": [bar.label for bar in bars]}),
        "textposition": "none" if kind == "comm" else "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": [text_colour(bar.colour) for bar in bars], "size": 11},
        "customdata": [[bar.what, bar.start, bar.end] for bar in bars],
        "hovertemplate": (
            "%{customdata[0]}<br>"
            f"%{{customdata[1]:,.6~g}} to %{{customdata[2]:,.6~g}}{unit}, takes %{{x:,.6~g}}{unit}"
            "<extra></extra>"
        ),
    }


def _rows(panels: Sequence[Panel]) -> Iterator[list[str]]:
    timelines = [panel.timeline for panel in panels]
    yield ["makespan", *(shown_makespan(panel) for panel in panels)]
    yield ["bubble", *(f"{timeline.bubble:.2%}" for timeline in timelines)]
    yield ["micro-batches", *(str(timeline.table.num_micro_batches) for timeline in timelines)]
    idle = [idle_shares(timeline) for timeline in timelines]
    for rank in range(max(map(len, idle), default=0)):
        cells = (
            f"{shares[rank]:.1%} idle, peak {shown_peak(timeline, rank)}" if rank < len(shares) else ""
            for timeline, shares in zip(timelines, idle, strict=True)
        )
        yield [f"rank {rank}", *cells]


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
    found: dict[BarKind, list[Bar]] = {kind: [] for kind in KINDS}
    for bar in sorted(bars_of(panel), key=lambda bar: bar.colour != KINDS[bar.kind][0]):
        found[bar.kind].append(bar)
    return {kind: bars for kind, bars in found.items() if bars}


def _bars(span: Span, placement: Placement, scale: float, has_transfers: bool) -> Iterator[Bar]:
    centre, start, end = span.rank, span.start * scale, span.end * scale
    border = centre + _HALF / 2 if has_transfers else centre + _HALF
    both = span.step if isinstance(span.step, Together) else (span.step,)
    if span.track == "comm":
        for action in both:
            yield Bar("comm", action, span.rank, start, end, border + 0.02, centre + _HALF, KINDS["comm"][0])
        return
    top = centre - _HALF
    height = (border - top) / len(both)
    for place, action in enumerate(both):
        low = top + place * height
        beside = both[1 - place] if len(both) == 2 else None
        colour = _shade(KINDS[action.kind][0], action.stage, placement.stages_of(span.rank))
        yield Bar(action.kind, action, span.rank, start, end, low, low + height, colour, beside)


def _shade(colour: str, stage: int, stages: Sequence[int]) -> str:
    share = _LIGHTEST * stages.index(stage) / max(len(stages) - 1, 1)
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in bytes.fromhex(colour[1:]))
