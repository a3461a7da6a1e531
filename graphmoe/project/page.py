"""Pages with stacked bars of a projection: memory by kind, time by segment, layouts of a search."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphmoe.project.arguments import to_change
from graphmoe.project.document import NEAR, margin_words, precision_words
from graphmoe.project.tables import COLUMNS, cells, listed, recommendation
from graphmoe.report.charts import bar_chart
from graphmoe.training.memory import MEMORY_KINDS
from graphmoe.web_page import Chart, folds, grid, paragraph, table, tiles, write_page

TIMES = {"forward_by_segment": "forward", "backward_by_segment": "backward"}


def write_projection(path: Path, command: str, document: Mapping[str, Any]) -> None:
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
    header += "".join(map(paragraph, _caveats(document)))
    memory = _memory_chart(names, places, card, "GB of a rank, a bar for the ranks of each place along pp")
    charts = [memory, _time_chart(document["time_s"])]
    write_page(path, _title(document), paragraph(f"`{command}`") + header, [("", grid(charts))])


def write_search(path: Path, command: str, document: Mapping[str, Any]) -> None:
    best, card = listed(document), document["card_gb"]
    header = paragraph(f"`{command}`")
    header += paragraph(
        f"{document['global_batch_size']} sequences of {document['seq_len']} tokens in a step: "
        f"{document['num_fitting']} candidates fit, {len(document['rejected'])} do not run."
    )
    if not best:
        header += paragraph(f"Nothing fits {document['num_ranks']} cards of {card:,.0f} GB.")
        write_page(path, _title(document), header, [])
        return
    recommended = document["recommended"]
    shown = [(line, cells(line), line["words"] == recommended["words"]) for line in best]
    marks = [f"{number}{CHOSEN * chosen}" for number, (_, _, chosen) in enumerate(shown, 1)]
    names = [f"{mark}. {row[0]}, {row[1]}" for mark, (_, row, _) in zip(marks, shown, strict=True)]
    header += paragraph(f"Recommended{CHOSEN}, {recommendation(document)}:")
    header += paragraph(f"`{recommended['command']}`")
    notes = [to_change(recommended["command"], card), *_caveats(document)]
    header += "".join(map(paragraph, notes))
    memory = _memory_chart(names, [line["memory_gb"] for line in best], card, "memory of a rank, GB")
    rates = [line["tokens_per_s_per_gpu"] for line in best]
    alt = f"Tokens/s of a GPU, {min(rates):,.0f} to {max(rates):,.0f}"
    speed = bar_chart("Throughput", alt, {"tokens/s/GPU": rates}, names, "tokens/s", "tokens/s/GPU")
    content = grid([memory, speed])
    content += table(("", *COLUMNS), [(mark, *row) for mark, (_, row, _) in zip(marks, shown, strict=True)])
    typed = [(name, paragraph(f"`{line['words']}`")) for name, line in zip(names, best, strict=True)]
    sections = [("", content), ("What to type", folds(typed))]
    write_page(path, _title(document), header, sections)


CHOSEN = " *"


def _title(document: Mapping[str, Any]) -> str:
    return f"graphmoe: {document['model']} on {document['num_ranks']} {document['hardware']}, projected"


def _caveats(document: Mapping[str, Any]) -> list[str]:
    lines = listed(document) if "best" in document else [document]
    near = any(line.get("fits", True) and not line["fits_with_margin"] for line in lines)
    not_counted = f"Not counted in memory: {', '.join(document['not_counted'])}."
    return [
        f"Nothing of this was run. Times are projected from {document['rates_from']}; "
        f"{precision_words(document)}.",
        f"{margin_words(document)}." if near else not_counted,
    ]


def _memory_chart(
    names: Sequence[str], places: Sequence[Mapping[str, float]], card_gb: float, below: str
) -> Chart:
    sizes = {kind: [place[kind] for place in places] for kind in MEMORY_KINDS[:-1]}
    largest = max(map(sum, zip(*sizes.values(), strict=True)))
    alt = f"Memory by kind, {len(names)} bars, the largest {largest:,.1f} GB of {card_gb:,.0f} GB of the card"
    chart = bar_chart("Memory by kind", alt, sizes, names, "GB", below)
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": card_gb, "x1": card_gb}
    chart.layout["shapes"] = [line | {"line": {"dash": "dash", "color": "#d65f5f"}}]
    says = {"text": f"card, {card_gb:,.0f} GB", "yref": "paper", "y": 1, "x": card_gb}
    chart.layout["annotations"] = [says | {"xanchor": "right", "yanchor": "bottom", "showarrow": False}]
    return chart


def _time_chart(times: Mapping[str, Mapping[str, float]]) -> Chart:
    sizes = {name: [1e3 * times[key][name] for key in TIMES] for name in times["forward_by_segment"]}
    sums = ", ".join(f"{word} {1e3 * sum(times[key].values()):,.1f} ms" for key, word in TIMES.items())
    alt, below = f"Time of a micro-batch by segment: {sums}", "on the rank with most to compute"
    return bar_chart("Time by segment", alt, sizes, [*TIMES.values()], "ms", f"ms of a micro-batch, {below}")
