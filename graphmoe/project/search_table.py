"""What a search found, for people: the best layouts, and the others by why they do not run."""

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

AXES = ("pp", "tp", "cp", "ep", "etp")
"""That a table names where they are cut."""


def render_search(document: dict[str, Any]) -> Group:
    """The best layouts as a table, counts of the others, and the command of what is recommended."""
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
    """The best layouts, and the recommended one where it is none of them."""
    best, recommended = document["best"], document["recommended"]
    is_there = recommended is None or any(_is_same(line, recommended) for line in best)
    return best if is_there else [*best, recommended]


def recommendation(document: Mapping[str, Any]) -> str:
    """Why a search recommends what it does, and how much that leaves."""
    recommended = document["recommended"]
    left = f"{recommended['left_gb']:,.1f} GB of the card's {document['card_gb']:,.0f} left"
    if recommended["fits_with_margin"]:
        return f"the fastest that is not {NEAR}, {left}"
    return f"the fastest, with only {left}, as all that fit are {NEAR}"


def _is_same(line: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(line["words"] == other["words"])


def _best(best: list[dict[str, Any]], recommended: dict[str, Any]) -> Table:
    """A row for each, that of the recommended one bold."""
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
    """Reasons that differ in their numbers alone as one line, with the first candidate that has it."""
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
    """The reason with lists of numbers, and numbers, as one sign; of several rules the first counts."""
    return re.sub(r"\d[\d.,]*((,| or) ?\d[\d.,]*)*", "#", reason.partition("; ")[0])


def _nearest(document: dict[str, Any]) -> str:
    """The candidate that is too large by least."""
    large = [line for line in document["rejected"] if "total_gb" in line]
    if not large:
        return "for other reasons than memory"
    line = min(large, key=lambda candidate: float(candidate["total_gb"]))
    return f"nearest is {escape(line['words'])}, of {line['total_gb']:,.1f} GB"
