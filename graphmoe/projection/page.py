"""Pages with stacked bars of what was projected: memory by kind, time by segment, layouts of a search."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphmoe.pages import write_page
from graphmoe.projection.memory import MEMORY_KINDS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

KINDS = MEMORY_KINDS[:-1]
TIMES = {"forward_by_segment": "forward", "backward_by_segment": "backward"}


def write_projection(path: Path, command: str, document: Mapping[str, Any]) -> None:
    """Memory of each place along pp, and time by segment, of a document of `project`."""
    size = document["num_ranks"] // document["layout"]["pp"]
    places = document["memory_gb_per_rank"][::size]
    names = [f"{place * size}..{(place + 1) * size - 1}" for place in range(len(places))]
    memory = memory_figure(names, places, document["card_gb"], "ranks of a place along pp")
    time = time_figure(document["time_s"])
    write_page(
        path,
        "Projection",
        command,
        _figure(memory, first=True)
        + f"<p>step {document['step_time_s']:,.3f} s, bubble {document['bubble']:.1%}, "
        f"{document['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, "
        f"MFU {document['mfu']:.1%}; rates are assumed</p>" + _figure(time),
    )


def write_search(path: Path, command: str, document: Mapping[str, Any]) -> None:
    """Memory and throughput of the layouts that a search lists, and what to type for each."""
    best = document["best"]
    numbers = [str(number) for number in range(1, len(best) + 1)]
    memory = memory_figure(numbers, [line["memory_gb"] for line in best], document["card_gb"], "layout")
    rows = "".join(
        f"<tr><td>{number}</td><td>{line['tokens_per_s_per_gpu']:,.0f}</td><td>{line['mfu']:.1%}</td>"
        f"<td>{line['bubble']:.1%}</td><td><code>{html.escape(line['words'])}</code></td></tr>"
        for number, line in zip(numbers, best, strict=True)
    )
    head = "<tr><th>layout</th><th>tokens/s/GPU</th><th>MFU</th><th>bubble</th><th>what to type</th></tr>"
    rates = [line["tokens_per_s_per_gpu"] for line in best]
    write_page(
        path,
        "Search of layouts",
        command,
        f"<p>{document['num_fitting']} candidates fit, {len(document['rejected'])} do not run; rates are "
        f"assumed</p>" + _figure(memory, first=True) + _figure(rate_figure(numbers, rates))
        + f"<table>{head}{rows}</table>",
    )  # fmt: skip


def memory_figure(
    names: Sequence[str], bars: Sequence[Mapping[str, float]], card_gb: float, axis: str
) -> Figure:
    """A bar for each name, stacked by kind in decimal GB, and a line at what the card has."""
    from plotly.graph_objects import Bar, Figure

    figure = Figure([Bar(name=kind, x=names, y=[bar[kind] for bar in bars]) for kind in KINDS])
    figure.add_hline(card_gb, line_dash="dash", annotation_text=f"card, {card_gb:,.0f} GB")
    figure.update_yaxes(title_text="memory of a rank, GB", rangemode="tozero")
    return _stacked(figure, axis)


def time_figure(times: Mapping[str, Mapping[str, float]]) -> Figure:
    """Forward and backward of one micro-batch, stacked by segment in ms."""
    from plotly.graph_objects import Bar, Figure

    segments = times["forward_by_segment"]
    bars = [
        Bar(name=name, x=[*TIMES.values()], y=[1e3 * times[key][name] for key in TIMES]) for name in segments
    ]
    figure = Figure(bars)
    figure.update_yaxes(title_text="time of a micro-batch, ms")
    return _stacked(figure, "on the rank with most to compute")


def rate_figure(names: Sequence[str], rates: Sequence[float]) -> Figure:
    """Throughput of each layout."""
    from plotly.graph_objects import Bar, Figure

    figure = Figure([Bar(name="tokens/s/GPU", x=names, y=rates)])
    figure.update_yaxes(title_text="tokens/s/GPU", rangemode="tozero")
    return _stacked(figure, "layout")


def _stacked(figure: Figure, axis: str) -> Figure:
    figure.update_layout(barmode="stack", template="plotly_white", height=420, margin={"t": 40, "r": 20})
    figure.update_xaxes(title_text=axis, type="category")
    return figure


def _figure(figure: Figure, *, first: bool = False) -> str:
    """The figure as HTML; the first of a page brings the library."""
    plot: str = figure.to_html(full_html=False, include_plotlyjs=first)
    return f'<div class="wide"><div class="figure">{plot}</div></div>'
