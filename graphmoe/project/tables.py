"""Tables of a projection and of a search, and verdicts, for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from graphmoe.project.document import NEAR, margin_words
from graphmoe.project.memory import MEMORY_KINDS

AXES = ("pp", "tp", "cp", "ep", "etp")
"""Axes that a table names where something is cut along them."""
WORDS = {
    "params": "weights",
    "grads": "gradients",
    "main_params": "main",
    "moments": "moments",
    "activations": "activations",
    "buffers": "buffers",
    "total": "total",
}


def render(document: dict[str, Any]) -> Group:
    """Show all tables of a projection."""
    sizes = document["layout"]
    dense, experts = (
        " * ".join(f"{axis} {sizes[axis]}" for axis in axes)
        for axes in (("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp"))
    )
    shown: list[RenderableType] = [
        f"[bold]{document['model']}[/bold] on {document['num_ranks']} {document['hardware']}, "
        f"assumptions={document['assumptions']}",
        f"ranks of all that is dense: {dense}; of experts: {experts}",
        f"{document['global_batch_size']} sequences of {document['seq_len']} tokens in a step, of which each "
        f"data-parallel rank has {document['micro_batches']} micro-batches of {document['micro_batch_size']}",
    ]
    if pipeline := document["pipeline"]:
        layout = str(pipeline["layout"]).replace("[", r"\[")
        shown.append(f"{pipeline['schedule']}, {pipeline['virtual_stages']} stages a rank, layout {layout}")
    shown += [
        "\n[bold]Memory of a rank[/bold], decimal GB",
        _places(document),
        *_details(document),
        f"not counted: {', '.join(document['not_counted'])}",
        f"\n[bold]Time of a step[/bold], projected from {document['rates_from']}",
        *_times(document),
        "",
        verdict(document),
    ]
    return Group(*shown)


def verdict(document: dict[str, Any]) -> str:
    """Say whether the worst rank fits its card, and where it does not, which kind of memory is largest."""
    memory, card = document["memory_gb"], document["card_gb"]
    total = memory["total"]
    numbers = f"rank {document['worst_rank']} needs {total:,.1f} GB and the card has {card:,.0f} GB"
    if document["fits"]:
        near = "" if document["fits_with_margin"] else f". [bold]{margin_words(document)}[/bold]"
        return f"[bold]fits[/bold]: {numbers}, {document['left_gb']:,.1f} GB more{near}"
    largest = max(MEMORY_KINDS[:-1], key=lambda kind: memory[kind])
    *ways, last = _ways(document, largest)
    return (
        f"[bold]DOES NOT FIT[/bold]: {numbers}, {total - card:,.1f} GB too few; most are {WORDS[largest]}, "
        f"{memory[largest]:,.1f} GB: try {', '.join(ways)}{' or ' if ways else ''}{last}"
    )


def _ways(document: dict[str, Any], largest: str) -> list[str]:
    """Return the settings to change for less of a kind of memory."""
    if largest not in ("activations", "buffers"):
        return ["a larger parallel.ep", "parallel.pp", "parallel.tp"]
    size = document["micro_batch_size"]
    ways = [f"train.micro_batch_size=1 (it is {size})"] if size > 1 else []
    if largest == "buffers":
        return [*ways, "a larger parallel.cp"]
    ways += ["recompute.*", "a larger parallel.cp", "a larger parallel.tp"]
    return [*ways, "another pipeline.schedule"] if document["layout"]["pp"] > 1 else ways


def _times(document: dict[str, Any]) -> list[RenderableType]:
    """Show segments of the slowest place along pp, and the step that follows from them."""
    time = document["time_s"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("segment")
    for name in ("forward ms", "backward ms"):
        table.add_column(name, justify="right")
    for name, forward in time["forward_by_segment"].items():
        backward = time["backward_by_segment"][name]
        table.add_row(name, f"{1e3 * forward:,.3f}", f"{1e3 * backward:,.3f}")
    gradients, update = time["exposed_gradients"], time["update"]
    return [
        "of one micro-batch, on the rank with most to compute",
        table,
        f"step {document['step_time_s']:,.3f} s, of which exchange {time['exposed_exchange']:,.3f} s, "
        f"gradients and weights {gradients:,.3f} s, update {update:,.3f} s",
        f"bubble {document['bubble']:.1%}, {document['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, "
        f"MFU {document['mfu']:.1%}, {document['flops_per_token'] / 1e9:,.3f} GFLOP per token",
    ]


def _places(document: dict[str, Any]) -> Table:
    """Show a row for each place along pp, whose ranks are alike; equal neighbours share one."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("ranks", no_wrap=True)
    for kind in MEMORY_KINDS:
        table.add_column(WORDS[kind], justify="right", no_wrap=True)
    of_ranks, worst = document["memory_gb_per_rank"], document["worst_rank"]
    of_place = len(of_ranks) // document["layout"]["pp"]
    start = 0
    while start < len(of_ranks):
        end = start
        while end < len(of_ranks) and of_ranks[end] == of_ranks[start]:
            end += of_place
        cells = [f"{of_ranks[start][kind]:,.1f}" for kind in MEMORY_KINDS]
        is_worst = start <= worst < end
        ranks = f"{start}..{end - 1}" if end - start > 1 else str(start)
        table.add_row(ranks + (" worst" if is_worst else ""), *cells, style="bold" if is_worst else None)
        start = end
    return table


def _details(document: dict[str, Any]) -> list[RenderableType]:
    """Show the worst rank's activations of a micro-batch by segment and layer, and its buffers."""
    if "activations_gb_by_segment" not in document:
        return []
    table = Table("segment", "GB", "part", "GB", "buffers", "GB", box=SIMPLE_HEAD, padding=(0, 1))
    columns = (
        document["activations_gb_by_segment"],
        _joined(document["activations_gb_by_layer"]),
        document["buffers_gb"],
    )
    rows = [[(name, f"{size:,.3f}") for name, size in column.items()] for column in columns]
    for i in range(max(map(len, rows))):
        table.add_row(*(cell for row in rows for cell in (row[i] if i < len(row) else ("", ""))))
    in_flight = document["activations_in_flight"]
    title = "[bold]Worst rank[/bold]: activations of one micro-batch by segment and by layer, and buffers"
    return [title, table, f"activations in flight at most: {in_flight:.2f} times those of one micro-batch"]


def _joined(by_part: dict[str, float]) -> dict[str, float]:
    """Join neighbouring layers that keep the same bytes into one line, with the bytes of each."""
    found: dict[str, float] = {}
    runs: list[tuple[str, str, float]] = []
    for part, size in by_part.items():
        kind = part.partition(" ")[0]
        if runs and runs[-1][0].partition(" ")[0] == kind and abs(runs[-1][2] - size) < 1e-9 and " " in part:
            runs[-1] = (runs[-1][0], part, size)
        else:
            runs.append((part, part, size))
    for first, last, size in runs:
        found[first if first == last else f"{first} to {last.partition(' ')[2]}, each"] = size
    return found


def render_search(document: dict[str, Any]) -> Group:
    """Show the best layouts as a table, counts of the others, and the command that is recommended."""
    card, recommended = document["card_gb"], document["recommended"]
    num_rejected = len(document["rejected"])
    shown: list[RenderableType] = [
        f"[bold]{document['model']}[/bold] on {document['num_ranks']} {document['hardware']}: "
        f"{document['global_batch_size']} sequences of {document['seq_len']} tokens in a step, micro-batches "
        f"of {document['micro_batch_size']}",
        f"{document['num_fitting']} candidates fit {card:,.0f} GB, {num_rejected} do not run; "
        f"the {document['num_simulated']} that may be among the best were projected, from "
        f"{document['rates_from']}",
    ]
    if recommended:
        lines = listed(document)
        shown.append(_best(lines, recommended))
        if not all(line["fits_with_margin"] for line in lines):
            shown.append(f"! {margin_words(document)}")
    else:
        shown.append(f"[bold]NOTHING FITS[/bold] {_nearest(document)}")
    if document["rejected"]:
        shown += ["", "[bold]Why others do not run[/bold]", _reasons(document["rejected"])]
    if recommended:
        command = Text(recommended["command"], no_wrap=True, overflow="ignore")
        shown += ["", f"[bold]Recommended[/bold], {recommendation(document)}:", command]
    return Group(*shown)


def listed(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the best layouts, and the recommended one where it is none of them."""
    best, recommended = document["best"], document["recommended"]
    is_there = recommended is None or any(_is_same(line, recommended) for line in best)
    return best if is_there else [*best, recommended]


def recommendation(document: Mapping[str, Any]) -> str:
    """Give the reason for the recommended layout, and the memory that it leaves."""
    recommended = document["recommended"]
    left = f"{recommended['left_gb']:,.1f} GB of the card's {document['card_gb']:,.0f} left"
    if recommended["fits_with_margin"]:
        return f"the fastest that is not {NEAR}, {left}"
    return f"the fastest, with only {left}, as all that fit are {NEAR}"


def _is_same(line: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(line["words"] == other["words"])


def _best(best: list[dict[str, Any]], recommended: dict[str, Any]) -> Table:
    """Show a row for each of the best layouts, bold for the recommended one."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    for name in ("layout", "schedule", "computed again"):
        table.add_column(name)
    for name in ("GB", "left", "bubble", "tokens/s/GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in best:
        sizes = [f"{name}{line['layout'][name]}" for name in AXES if line["layout"][name] > 1]
        if "parallel.cp_method=ring" in line["words"]:
            sizes.append("ring")
        pipeline = line["pipeline"]
        table.add_row(
            " ".join(sizes) or "dp",
            f"{pipeline['schedule']} x{pipeline['virtual_stages']}" if pipeline else "-",
            escape(line["recompute"].removeprefix("recompute=").removeprefix("recompute.")) or "as given",
            f"{line['memory_gb']['total']:,.1f}",
            f"{'' if line['fits_with_margin'] else '! '}{line['left_gb']:,.1f}",
            f"{line['bubble']:.1%}",
            f"{line['tokens_per_s_per_gpu']:,.0f}",
            style="bold" if _is_same(line, recommended) else None,
        )
    return table


def _reasons(rejected: list[dict[str, Any]]) -> Table:
    """Show reasons that differ only in their numbers as one line, with the first candidate as an example."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in rejected:
        groups.setdefault(_without_numbers(line["reason"]), []).append(line)
    table = Table("candidates", "for example", box=SIMPLE_HEAD, padding=(0, 1))
    for lines in sorted(groups.values(), key=len, reverse=True):
        reason, _, more = lines[0]["reason"].partition("; ")
        example = f"{lines[0]['words']}: {reason}" + (", and more" if more else "")
        table.add_row(str(len(lines)), escape(example))
    return table


def _without_numbers(reason: str) -> str:
    """Replace each number, and each list of numbers, by one sign; of several rules only the first is kept."""
    return re.sub(r"\d[\d.,]*((,| or) ?\d[\d.,]*)*", "#", reason.partition("; ")[0])


def _nearest(document: dict[str, Any]) -> str:
    """Describe the candidate that exceeds the card by least."""
    large = [line for line in document["rejected"] if "total_gb" in line]
    if not large:
        return "for other reasons than memory"
    line = min(large, key=lambda candidate: float(candidate["total_gb"]))
    return f"nearest is {escape(line['words'])}, of {line['total_gb']:,.1f} GB"
