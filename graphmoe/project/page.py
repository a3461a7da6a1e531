"""Pages with stacked bars of a projection: memory by kind, time by segment, layouts of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphmoe.project.document import NEAR, margin_words
from graphmoe.project.memory import MEMORY_KINDS
from graphmoe.project.tables import listed, recommendation
from graphmoe.web_page.page import COLOURS, Chart, grid, paragraph, table, tiles, write_page

KINDS = MEMORY_KINDS[:-1]
TIMES = {"forward_by_segment": "forward", "backward_by_segment": "backward"}


def write_projection(path: Path, command: str, document: Mapping[str, Any]) -> None:
    """Write memory of each place along pp, and time by segment, of a document of `project`."""
    size = document["num_ranks"] // document["layout"]["pp"]
    places = document["memory_gb_per_rank"][::size]
    names = [f"{place * size}..{(place + 1) * size - 1}" for place in range(len(places))]
    worst, card = document["memory_gb"]["total"], document["card_gb"]
    header = tiles(
        [
            ("memory of the worst rank", f"{worst:,.1f} GB", _remark(document)),
            ("step", f"{document['step_time_s']:,.3f} s", f"bubble {document['bubble']:.1%}"),
            ("tokens/s/GPU", f"{document['tokens_per_s_per_gpu']:,.0f}", ""),
            ("MFU", f"{document['mfu']:.1%}", "of the card's peak in bf16"),
        ]
    )
    if document["fits"] and not document["fits_with_margin"]:
        header += paragraph(margin_words(document) + ".")
    memory = memory_chart(names, places, card, "ranks of a place along pp")
    charts = [memory, time_chart(document["time_s"])]
    write_page(path, "graphmoe: projection", paragraph(f"`{command}`") + header, [("", grid(charts))])


def _remark(document: Mapping[str, Any]) -> str:
    """Name the size of the card, and the room that the worst rank leaves or lacks."""
    left, has = document["left_gb"], f"the card has {document['card_gb']:,.0f} GB"
    if not document["fits"]:
        return f"{has}, {-left:,.1f} GB too few"
    return f"{has}, {left:,.1f} GB left{_mark(document)}"


def _mark(line: Mapping[str, Any]) -> str:
    return "" if line["fits_with_margin"] else f", {NEAR}"


def write_search(path: Path, command: str, document: Mapping[str, Any]) -> None:
    """Write memory and throughput of the layouts that a search lists, and the words to type for each."""
    best, card = listed(document), document["card_gb"]
    numbers = [str(number) for number in range(1, len(best) + 1)]
    rows = [
        (
            number,
            f"{line['tokens_per_s_per_gpu']:,.0f}",
            f"{line['mfu']:.1%}",
            f"{line['bubble']:.1%}",
            f"{line['memory_gb']['total']:,.1f}",
            f"{line['left_gb']:,.1f}{_mark(line)}",
            line["words"],
        )
        for number, line in zip(numbers, best, strict=True)
    ]
    head = ("layout", "tokens/s/GPU", "MFU", "bubble", "GB", "GB left", "what to type")
    said = f"{document['num_fitting']} candidates fit, {len(document['rejected'])} do not run."
    content = paragraph(f"Nothing fits {document['num_ranks']} cards of {card:,.0f} GB.")
    if best:
        memory = memory_chart(numbers, [line["memory_gb"] for line in best], card, "layout")
        rates = [line["tokens_per_s_per_gpu"] for line in best]
        content = grid([memory, rate_chart(numbers, rates)]) + table(head, rows)
        if not all(line["fits_with_margin"] for line in best):
            content += paragraph(margin_words(document) + ".")
        content += paragraph(f"Recommended, {recommendation(document)}:")
        content += paragraph(f"`{document['recommended']['command']}`")
    header = paragraph(f"`{command}`") + paragraph(said)
    write_page(path, "graphmoe: search of layouts", header, [("", content)])


def memory_chart(
    names: Sequence[str], bars: Sequence[Mapping[str, float]], card_gb: float, axis: str
) -> Chart:
    """Draw a bar for each name, stacked by kind in decimal GB, and a line at the size of the card."""
    traces = [_bar(kind, names, [bar[kind] for bar in bars], n) for n, kind in enumerate(KINDS)]
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": card_gb, "y1": card_gb}
    says = {"text": f"card, {card_gb:,.0f} GB", "xref": "paper", "x": 1, "y": card_gb, "yanchor": "bottom"}
    layout = {
        **_stacked(axis, "memory of a rank, GB"),
        "shapes": [line | {"line": {"dash": "dash", "color": "#d65f5f"}}],
        "annotations": [says | {"xanchor": "right", "showarrow": False}],
    }
    largest = max(sum(bar[kind] for kind in KINDS) for bar in bars)
    alt = f"Memory by kind, {len(names)} bars, the largest {largest:,.1f} GB of {card_gb:,.0f} GB of the card"
    return Chart("Memory by kind", alt, traces, layout, height_px=380)


def time_chart(times: Mapping[str, Mapping[str, float]]) -> Chart:
    """Draw forward and backward of one micro-batch, stacked by segment in ms."""
    traces = [
        _bar(name, [*TIMES.values()], [1e3 * times[key][name] for key in TIMES], n)
        for n, name in enumerate(times["forward_by_segment"])
    ]
    sums = ", ".join(f"{word} {1e3 * sum(times[key].values()):,.1f} ms" for key, word in TIMES.items())
    axes = _stacked("on the rank with most to compute", "ms of a micro-batch")
    return Chart("Time by segment", f"Time of a micro-batch by segment: {sums}", traces, axes, height_px=380)


def rate_chart(names: Sequence[str], rates: Sequence[float]) -> Chart:
    """Draw the throughput of each layout."""
    alt = f"Tokens/s of a GPU, {min(rates):,.0f} to {max(rates):,.0f}"
    axes = _stacked("layout", "tokens/s/GPU")
    return Chart("Throughput", alt, [_bar("tokens/s/GPU", names, rates, 0)], axes, height_px=380)


def _bar(name: str, places: Sequence[str], heights: Sequence[float], number: int) -> dict[str, Any]:
    colour = {"color": COLOURS[number % len(COLOURS)]}
    return {"type": "bar", "name": name, "x": [*places], "y": [*heights], "marker": colour}


def _stacked(below: str, beside: str) -> dict[str, Any]:
    return {
        "barmode": "stack",
        "xaxis": {"title": {"text": below}, "type": "category"},
        "yaxis": {"title": {"text": beside}, "rangemode": "tozero"},
    }
