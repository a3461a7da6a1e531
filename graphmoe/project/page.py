"""Pages with stacked bars of a projection: memory by kind, time by segment, layouts of a search."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphmoe.project.document import NEAR, margin_words
from graphmoe.project.memory import MEMORY_KINDS
from graphmoe.project.tables import COLUMNS, cells, listed, recommendation
from graphmoe.web_page import COLOURS, Chart, grid, paragraph, table, tiles, write_page

TIMES = {"forward_by_segment": "forward", "backward_by_segment": "backward"}


def write_projection(path: Path, command: str, document: Mapping[str, Any]) -> None:
    """Write memory of each place along pp, and time by segment, of a document of `project`."""
    size = document["num_ranks"] // document["layout"]["pp"]
    places = document["memory_gb_per_rank"][::size]
    names = [f"{place * size}..{(place + 1) * size - 1}" for place in range(len(places))]
    worst, card, left = document["memory_gb"]["total"], document["card_gb"], document["left_gb"]
    near = "" if document["fits_with_margin"] else f", {NEAR}"
    room = f"{left:,.1f} GB left{near}" if document["fits"] else f"{-left:,.1f} GB too few"
    header = tiles(
        [
            ("memory of the worst rank", f"{worst:,.1f} GB", f"the card has {card:,.0f} GB, {room}"),
            ("step", f"{document['step_time_s']:,.3f} s", f"bubble {document['bubble']:.1%}"),
            ("tokens/s/GPU", f"{document['tokens_per_s_per_gpu']:,.0f}", ""),
            ("MFU", f"{document['mfu']:.1%}", "of the card's peak in bf16"),
        ]
    )
    if document["fits"] and not document["fits_with_margin"]:
        header += paragraph(margin_words(document) + ".")
    memory = _memory_chart(names, places, card, "ranks of a place along pp")
    charts = [memory, _time_chart(document["time_s"])]
    write_page(path, "graphmoe: projection", paragraph(f"`{command}`") + header, [("", grid(charts))])


def write_search(path: Path, command: str, document: Mapping[str, Any]) -> None:
    """Write memory and throughput of the layouts that a search lists, and the words to type for each."""
    best, card = listed(document), document["card_gb"]
    numbers = [str(number) for number in range(1, len(best) + 1)]
    rows = [(number, *cells(line), line["words"]) for number, line in zip(numbers, best, strict=True)]
    said = f"{document['num_fitting']} candidates fit, {len(document['rejected'])} do not run."
    content = paragraph(f"Nothing fits {document['num_ranks']} cards of {card:,.0f} GB.")
    if best:
        memory = _memory_chart(numbers, [line["memory_gb"] for line in best], card, "layout")
        rates = [line["tokens_per_s_per_gpu"] for line in best]
        alt = f"Tokens/s of a GPU, {min(rates):,.0f} to {max(rates):,.0f}"
        speed = _bars("Throughput", alt, {"tokens/s/GPU": rates}, numbers, "layout", "tokens/s/GPU")
        content = grid([memory, speed]) + table(("", *COLUMNS, "what to type"), rows)
        if not all(line["fits_with_margin"] for line in best):
            content += paragraph(margin_words(document) + ".")
        content += paragraph(f"Recommended, {recommendation(document)}:")
        content += paragraph(f"`{document['recommended']['command']}`")
    header = paragraph(f"`{command}`") + paragraph(said)
    write_page(path, "graphmoe: search of layouts", header, [("", content)])


def _memory_chart(
    names: Sequence[str], bars: Sequence[Mapping[str, float]], card_gb: float, axis: str
) -> Chart:
    heights = {kind: [bar[kind] for bar in bars] for kind in MEMORY_KINDS[:-1]}
    largest = max(sum(bar[kind] for kind in heights) for bar in bars)
    alt = f"Memory by kind, {len(names)} bars, the largest {largest:,.1f} GB of {card_gb:,.0f} GB of the card"
    chart = _bars("Memory by kind", alt, heights, names, axis, "memory of a rank, GB")
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": card_gb, "y1": card_gb}
    says = {"text": f"card, {card_gb:,.0f} GB", "xref": "paper", "x": 1, "y": card_gb, "yanchor": "bottom"}
    chart.layout["shapes"] = [line | {"line": {"dash": "dash", "color": "#d65f5f"}}]
    chart.layout["annotations"] = [says | {"xanchor": "right", "showarrow": False}]
    return chart


def _time_chart(times: Mapping[str, Mapping[str, float]]) -> Chart:
    heights = {name: [1e3 * times[key][name] for key in TIMES] for name in times["forward_by_segment"]}
    sums = ", ".join(f"{word} {1e3 * sum(times[key].values()):,.1f} ms" for key, word in TIMES.items())
    alt, below = f"Time of a micro-batch by segment: {sums}", "on the rank with most to compute"
    return _bars("Time by segment", alt, heights, [*TIMES.values()], below, "ms of a micro-batch")


def _bars(
    title: str,
    alt: str,
    heights: Mapping[str, Sequence[float]],
    places: Sequence[str],
    below: str,
    beside: str,
) -> Chart:
    traces = [
        {"type": "bar", "name": name, "x": [*places], "y": [*each], "marker": {"color": colour}}
        for (name, each), colour in zip(heights.items(), itertools.cycle(COLOURS), strict=False)
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": below}, "type": "category"},
        "yaxis": {"title": {"text": beside}, "rangemode": "tozero"},
    }
    return Chart(title, alt, traces, layout, height_px=380)
