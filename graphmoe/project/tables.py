"""Output of a projection or a search: tables and verdicts as text, and pages with stacked bars."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from graphmoe.config.arguments import text_table
from graphmoe.config.ranges import number_of
from graphmoe.plan.layout import ranks_of_axes
from graphmoe.project.arguments import to_change
from graphmoe.project.document import NEAR, margin_words, precision_words
from graphmoe.report.charts import KINDS, bar_chart
from graphmoe.training.memory import MEMORY_KINDS
from graphmoe.web_page import Chart, folds, grid, paragraph, table, tiles, write_page

TIMES = {"forward_by_segment": "forward", "backward_by_segment": "backward"}
CHOSEN = " *"
NO_ROOM = " if there were memory for it"
WORDS = {**KINDS, "total": "total"}
COLUMNS = ("layout", "schedule", "computed again", "size", "GB", "left", "bubble", "tokens/s/GPU")
"""Heads of a search's table; *size* is of a micro-batch, in sequences."""
SCALED_COLUMNS = (
    "GPUs", "nodes", "tokens/s/GPU", "efficiency", "step s", "bubble", "exchange s", "GB", "bound by",
)  # fmt: skip


def render(document: dict[str, Any]) -> Group:
    time = document["time_s"]
    segments = [
        (name, f"{1e3 * forward:,.3f}", f"{1e3 * time['backward_by_segment'][name]:,.3f}")
        for name, forward in time["forward_by_segment"].items()
    ]
    fits, has_experts = document["fits"], document["num_experts"] > 0
    exchange = f"exchange {time['exposed_exchange']:,.3f} s, " * (has_experts or time["exposed_exchange"] > 0)
    shown: list[RenderableType] = [
        f"[bold]{document['model']}[/bold] on {document['num_ranks']} {document['hardware']}, "
        f"assumptions={document['assumptions']}",
        *([] if fits else [verdict(document)]),
        ranks_of_axes(document["layout"], has_experts=has_experts),
        f"{document['global_batch_size']} sequences of {document['seq_len']} tokens in a step, of which each "
        f"data-parallel rank has {number_of(document['micro_batches'], 'micro-batch')} of "
        f"{document['micro_batch_size']}",
        f"{document['compute']}, {precision_words(document)}",
    ]
    if slots := document["replica_slots"]:
        shown.append(f"slots for replicas on each rank: {slots}")
    if chosen := document["auto"]:
        shown.append(f"auto: {', '.join(chosen)}")
    if pipeline := document["pipeline"]:
        layout = str(pipeline["layout"]).replace("[", r"\[")
        shown.append(f"{pipeline['schedule']}, {pipeline['virtual_stages']} stages a rank, layout {layout}")
    shown += [
        "\n[bold]Memory of a rank[/bold], decimal GB",
        _places(document),
        *_details(document),
        *[f"in host memory: {document['host_gb']:,.1f} GB for each rank"] * (document["host_gb"] > 0),
        f"not counted: {', '.join(document['not_counted'])}",
        f"\n[bold]Time of a step[/bold]{NO_ROOM * (not fits)}, projected from {document['rates_from']}",
        "of one micro-batch, on the rank with most to compute",
        text_table(["segment", "forward ms", "backward ms"], segments, box=SIMPLE_HEAD),
        f"step {document['step_time_s']:,.3f} s, including {exchange}"
        f"gradients and weights {time['exposed_gradients']:,.3f} s, update {time['update']:,.3f} s",
        f"bubble {document['bubble']:.1%}, {document['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
        f"{NO_ROOM * (not fits)}, "
        f"MFU {document['mfu']:.1%} of the peak in bf16, "
        f"{document['flops_per_token'] / 1e9:,.3f} GFLOP per token",
        "",
        verdict(document),
    ]
    return Group(*shown)


def verdict(document: dict[str, Any]) -> str:
    """Return text: whether the worst rank fits its card, and if not, which kind of memory is largest."""
    memory, card = document["memory_gb"], document["card_gb"]
    total = memory["total"]
    numbers = f"rank {document['worst_rank']} needs {total:,.1f} GB and the card has {card:,.0f} GB"
    if document["fits"]:
        near = "" if document["fits_with_margin"] else f". [bold]{margin_words(document)}[/bold]"
        return f"[bold]fits[/bold]: {numbers}, {document['left_gb']:,.1f} GB to spare{near}"
    largest = max(MEMORY_KINDS[:-1], key=lambda kind: memory[kind])
    return (
        f"[bold]DOES NOT FIT[/bold]: {numbers}, {total - card:,.1f} GB too few; most are {WORDS[largest]}, "
        f"{memory[largest]:,.1f} GB: try {joined_or(_ways(document, largest))}"
    )


def _ways(document: dict[str, Any], largest: str) -> list[str]:
    by_size = {"activations": ("cp", "tp"), "buffers": ("cp",)}
    size, larger = document["micro_batch_size"], document["larger"]
    ways = [f"train.micro_batch_size=1 (it is {size})"] * (size > 1 and largest in by_size)
    ways += ["recompute=all"] * (largest == "activations" and not document["recompute_all"])
    keys = (f"parallel.{axis}" for axis in by_size.get(largest, ("ep", "pp", "tp")))
    ways += [f"{key}={larger[key]}" for key in keys if key in larger]
    ways += ["another pipeline.schedule"] * (largest == "activations" and document["layout"]["pp"] > 1)
    return ways or ["more nodes", "a card with more memory"]


def _places(document: dict[str, Any]) -> Table:
    of_ranks, worst = document["memory_gb_per_rank"], document["worst_rank"]
    rows, styles, end = [], [], 0
    for memory, alike in itertools.groupby(of_ranks):
        start, end = end, end + len([*alike])
        ranks = f"{start}..{end - 1}" if end - start > 1 else str(start)
        is_worst = start <= worst < end
        rows.append([ranks + " worst" * is_worst, *(f"{memory[kind]:,.1f}" for kind in MEMORY_KINDS)])
        styles.append("bold" if is_worst else None)
    columns = ["ranks", *(WORDS[kind] for kind in MEMORY_KINDS)]
    return text_table(columns, rows, styles=styles, box=SIMPLE_HEAD, padding=0)


def _details(document: dict[str, Any]) -> list[RenderableType]:
    if "activations_gb_by_segment" not in document:
        return []
    columns = (
        document["activations_gb_by_segment"],
        _joined(document["activations_gb_by_layer"]),
        document["buffers_gb"],
    )
    cells = ([(name, f"{size:,.3f}") for name, size in column.items()] for column in columns)
    rows = [sum(row, ()) for row in itertools.zip_longest(*cells, fillvalue=("", ""))]
    in_flight = document["activations_in_flight"]
    return [
        "[bold]Worst rank[/bold]: activations of one micro-batch by segment and by layer, and buffers",
        text_table(["segment", "GB", "part", "GB", "buffers", "GB"], rows, names=range(6), box=SIMPLE_HEAD),
        f"activations in flight at most: {in_flight:.2f} times those of one micro-batch",
    ]


def _joined(by_part: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}

    def kind_and_size(item: tuple[str, float]) -> tuple[str, float]:
        part, size = item
        return (part.partition(" ")[0] if " " in part else part), float(f"{size:.9e}")

    for _, alike in itertools.groupby(by_part.items(), kind_and_size):
        (first, size), *others = alike
        found[f"{first} to {others[-1][0].partition(' ')[2]}, each" if others else first] = size
    return found


def render_search(document: dict[str, Any]) -> Group:
    recommended = document["recommended"]
    shown: list[RenderableType] = [
        f"[bold]{document['model']}[/bold] on {document['num_ranks']} {document['hardware']}: "
        f"{document['global_batch_size']} sequences of {document['seq_len']} tokens in a step, micro-batches "
        f"of {joined_or(document['micro_batch_sizes'])}; {precision_words(document)}",
        f"{document['num_fitting']} candidates fit {document['card_gb']:,.0f} GB, "
        f"{len(document['rejected'])} do not run; the {document['num_simulated']} that may be among the best "
        f"were projected, from {document['rates_from']}",
    ]
    if recommended:
        lines = listed(document)
        styles = ["bold" if line["words"] == recommended["words"] else None for line in lines]
        rows = map(cells, lines)
        shown.append(text_table(COLUMNS, rows, names=range(3), styles=styles, box=SIMPLE_HEAD, padding=0))
        if not all(line["fits_with_margin"] for line in lines):
            shown.append(f"! {margin_words(document)}")
    else:
        shown.append(f"[bold]NOTHING FITS[/bold] {_nearest(document)}")
    if document["rejected"]:
        reasons = text_table(["candidates", "for example"], _reasons(document), names=(0, 1), box=SIMPLE_HEAD)
        shown += ["", "[bold]Why others do not run[/bold]", reasons]
    if recommended:
        command = Text(recommended["command"], no_wrap=True, overflow="ignore")
        shown += ["", f"[bold]Recommended[/bold], {recommendation(document)}:"]
        shown += [to_change(recommended["command"], document["card_gb"]), command]
    return Group(*shown)


def render_scaled(document: dict[str, Any]) -> Group:
    shown: list[RenderableType] = [
        f"[bold]{document['model']}[/bold] on {document['hardware']}, {' '.join(_axes(document)) or 'dp'}: "
        f"{number_of(document['micro_batches'], 'micro-batch')} of {document['micro_batch_size']} on each "
        f"data-parallel rank; {precision_words(document)}; projected from {document['rates_from']}",
        *[f"auto: {', '.join(document['auto'])}"] * bool(document["auto"]),
        text_table(SCALED_COLUMNS, map(scaled_cells, document["rows"]), box=SIMPLE_HEAD, padding=0),
    ]
    rows, left_out = document["rows"], document["left_out"]
    if not all(row["fits"] for row in rows):
        shown.append(f"memory: not enough, the card has {document['card_gb']:,.0f} GB")
    if not all(row["fits_with_margin"] for row in rows if row["fits"]):
        shown.append(f"! {margin_words(document)}")
    if left_out:
        reasons = (f"{', '.join(f'{n:,}' for n in counts)} ({why})" for why, counts in left_out.items())
        shown.append(f"left out, in GPUs: {escape('; '.join(reasons))}")
    return Group(*shown)


def scaled_cells(row: Mapping[str, Any]) -> list[str]:
    largest = ", ".join(f"{name} {share:.0%}" for name, share in [*row["shares"].items()][:2])
    return [
        f"{row['num_ranks']:,}",
        f"{row['nodes']:,}",
        f"{row['tokens_per_s_per_gpu']:,.0f}",
        f"{row['efficiency']:.1%}" if row["fits"] else "-",
        f"{row['step_time_s']:,.3f}",
        f"{row['bubble']:.1%}",
        f"{row['time_s']['exposed_exchange']:,.3f}",
        f"{'! ' * (row['fits'] and not row['fits_with_margin'])}{row['memory_gb']['total']:,.1f}",
        largest if row["fits"] else row["bound_by"],
    ]


def _axes(line: Mapping[str, Any]) -> list[str]:
    sizes = ((axis, line["layout"][axis]) for axis in ("pp", "tp", "cp", "ep", "etp"))
    return [f"{axis}{size}" for axis, size in sizes if size > 1]


def joined_or(values: Sequence[object]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def listed(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the layouts to show, fastest first: best per shape, recommended, best with ep of 8 or more."""
    lines = document["shapes"] or document["best"]
    more = [line for line in (document["recommended"], document["with_ep"]) if line]
    words = {line["words"]: line for line in (*more[::-1], *lines)}
    return sorted(words.values(), key=lambda line: float(line["tokens_per_s_per_gpu"]), reverse=True)


def recommendation(document: Mapping[str, Any]) -> str:
    """Return text that says why the layout is recommended."""
    recommended, plain = document["recommended"], document["without_fp8"]
    left = f"{recommended['left_gb']:,.1f} GB of the card's {document['card_gb']:,.0f} left"
    if recommended["fits_with_margin"]:
        in_bf16 = of_ep = ""
        if plain and recommended["fp8"] != "none":
            rate = f"{plain['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
            in_bf16 = f"; without products in 8 bits {cells(plain)[0]} has {rate}"
        shared = document["with_ep"]
        if shared and shared["words"] != recommended["words"]:
            rate = f"{shared['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
            of_ep = f"; the best with parallel.ep of 8 or more, {cells(shared)[0]}, has {rate}"
        return f"the fastest that is not {NEAR}, {left}{of_ep}{in_bf16}"
    return f"the fastest, with only {left}, as all that fit are {NEAR}"


def cells(line: dict[str, Any]) -> list[str]:
    cuts = _axes(line)
    cuts += ["ring"] * ("parallel.cp_method=ring" in line["words"])
    cuts += ["fp8"] * (line["fp8"] != "none")
    pipeline = line["pipeline"]
    return [
        " ".join(cuts) or "dp",
        f"{pipeline['schedule']} x{pipeline['virtual_stages']}" if pipeline else "-",
        line["recompute"].removeprefix("recompute=").removeprefix("recompute.") or "as given",
        str(line["micro_batch_size"]),
        f"{line['memory_gb']['total']:,.1f}",
        f"{'' if line['fits_with_margin'] else '! '}{line['left_gb']:,.1f}",
        f"{line['bubble']:.1%}",
        f"{line['tokens_per_s_per_gpu']:,.0f}",
    ]


def _reasons(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in document["rejected"]:
        kind = re.sub(r"\d[\d.,]*((,| or) ?\d[\d.,]*)*", "#", line["reason"].partition("; ")[0])
        groups.setdefault(kind, []).append(line)
    for lines in sorted(groups.values(), key=len, reverse=True):
        reason, _, more = lines[0]["reason"].partition("; ")
        yield str(len(lines)), f"{lines[0]['words']}: {reason}" + (", and more" if more else "")


def _nearest(document: dict[str, Any]) -> str:
    large = [line for line in document["rejected"] if "total_gb" in line]
    if not large:
        return "for other reasons than memory"
    line = min(large, key=lambda candidate: float(candidate["total_gb"]))
    return f"nearest is {escape(line['words'])}, of {line['total_gb']:,.1f} GB"


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
            ("tokens/s/GPU", f"{document['tokens_per_s_per_gpu']:,.0f}", NO_ROOM * (not document["fits"])),
            ("MFU", f"{document['mfu']:.1%}", "of the card's peak in bf16"),
        ]
    )
    header += "".join(map(paragraph, _caveats(document)))
    memory = _memory_chart(names, places, card, "GB of a rank, a bar for the ranks of each place along pp")
    times = document["time_s"]
    sizes = {name: [1e3 * times[key][name] for key in TIMES] for name in times["forward_by_segment"]}
    sums = ", ".join(f"{word} {1e3 * sum(times[key].values()):,.1f} ms" for key, word in TIMES.items())
    alt, below = (
        f"Time of a micro-batch by segment: {sums}",
        "ms of a micro-batch, on the rank with most to compute",
    )
    time = bar_chart("Time by segment", alt, sizes, [*TIMES.values()], "ms", below)
    write_page(path, _title(document), paragraph(f"`{command}`") + header, [("", grid([memory, time]))])


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
