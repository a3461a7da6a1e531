"""Page with the timelines of a pipeline: one file, which needs no network."""

import html
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from graphmoe.pipeline_view.bars import (
    COLOURS,
    WORDS,
    Bar,
    BarKind,
    Panel,
    bars_by_kind,
    bars_of,
    idle_shares,
    shown_makespan,
    shown_peak,
    summary,
    text_colour,
)
from graphmoe.web_page import Chart, grid, paragraph, table
from graphmoe.web_page import write_page as write_whole

ROW_PX = 40
HEAD_PX, GAP_PX = 70, 60  # pixels above the first panel, and between two, for title and axis


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
    return Chart("Pipeline", alt, traces, layout, plot_px + HEAD_PX + 60, is_wide=True, min_width_px=640,
                 has_own_title=True, is_zoomed=True)  # fmt: skip


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
        "name": WORDS[kind],
        "legendgroup": kind,
        "legendrank": list(COLOURS).index(kind),
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
    cells = [
        [
            f"{idle:.1%} idle, peak {shown_peak(timeline, rank)}"
            for rank, idle in enumerate(idle_shares(timeline))
        ]
        for timeline in timelines
    ]
    for rank, of_rank in enumerate(itertools.zip_longest(*cells, fillvalue="")):
        yield [f"rank {rank}", *of_rank]
