"""What a search found, for people: the best layouts, and the others by why they do not run."""

from __future__ import annotations

import re
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

AXES = ("pp", "tp", "cp", "ep", "etp")
"""That a table names where they are cut."""


def render_search(document: dict[str, Any]) -> Group:
    """The best layouts as a table, the command of the first, and counts of the others."""
    best, card = document["best"], document["card_gb"]
    num_rejected = len(document["rejected"])
    shown: list[RenderableType] = [
        f"[bold]{document['model']}[/bold] on {document['num_ranks']} {document['hardware']}: "
        f"{document['global_batch_size']} sequences of {document['seq_len']} tokens in a step, micro-batches "
        f"of {document['micro_batch_size']}",
        f"{document['num_fitting']} candidates fit {card:,.0f} GB, {num_rejected} do not run; "
        f"the {document['num_simulated']} that may be among the best were projected, from "
        f"{document['rates_from']}",
    ]
    if best:
        shown += [_best(best), "add to the command for the first:", f"  {escape(best[0]['words'])}"]
    else:
        shown.append(f"[bold]NOTHING FITS[/bold] {_nearest(document)}")
    return Group(*shown, "", "[bold]Why others do not run[/bold]", _reasons(document["rejected"]))


def _best(best: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0)
    for name in ("layout", "schedule", "computed again"):
        table.add_column(name)
    for name in ("GB", "bubble", "MFU", "tokens/s/GPU"):
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
            f"{line['bubble']:.1%}",
            f"{line['mfu']:.1%}",
            f"{line['tokens_per_s_per_gpu']:,.0f}",
        )
    return table


def _reasons(rejected: list[dict[str, Any]]) -> Table:
    """Reasons that differ in their numbers alone as one line, with the first candidate that has it."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in rejected:
        groups.setdefault(_without_numbers(line["reason"]), []).append(line)
    table = Table("candidates", "for example", box=SIMPLE_HEAD, padding=(0, 1))
    for lines in sorted(groups.values(), key=len, reverse=True):
        table.add_row(str(len(lines)), escape(f"{lines[0]['words']}: {lines[0]['reason']}"))
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
