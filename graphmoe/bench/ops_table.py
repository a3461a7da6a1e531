"""The table of ``suite=ops``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from graphmoe.bench.cases import BYTES_PER_S, FLOPS_PER_S, Row


def render_operations(document: dict[str, Any]) -> Iterator[str]:
    """The table, and what a reader must know of it."""
    yield "| case | alternative | median ms | p10 to p90 | floor ms | time / floor | memory MiB |"
    yield "|---|---|---|---|---|---|---|"
    yield from map(_line, document["rows"])
    yield ""
    yield from _notes(document)


def brief(rows: Sequence[Row]) -> str:
    """The alternatives of a case and their times, for the log."""
    return ", ".join(
        f"{row.alternative} {row.error}" if row.error else f"{row.alternative} {row.median_ms:.3f} ms"
        for row in rows
    )


def _line(row: dict[str, Any]) -> str:
    name = f"{row['alternative']} (peer)" if row["is_peer"] else row["alternative"]
    if row["error"]:
        reason = row["error"].replace("|", "/")
        return f"| {row['case']} | {name} | failed: {reason} | | {row['floor_ms']:.4g} | | |"
    memory = "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**20:,.0f} {row['memory_kind']}"
    cells = [
        row["case"],
        name,
        f"{row['median_ms']:.4f}",
        f"{row['p10_ms']:.4f} to {row['p90_ms']:.4f}",
        f"{row['floor_ms']:.4g}",
        f"{row['time_over_floor']:.2f}",
        memory,
    ]
    return f"| {' | '.join(cells)} |"


def _notes(document: dict[str, Any]) -> Iterator[str]:
    yield (
        f"Times: medians of up to {document['method']['repeats']} calls with cold caches, alternatives in "
        f"turns. Floors: FLOPs at {FLOPS_PER_S / 1e12:.0f} TFLOP/s (grouped_mlp, linear_cross_entropy), "
        f"bytes at {BYTES_PER_S / 1e12:.1f} TB/s (the others), both as measured on an H200."
    )
    yield (
        "Memory: kept for the backward beside x and y (kept); most in use above the inputs and the "
        "gradients dh and dw (peak)."
    )
    for row in document["rows"]:
        if row["note"]:
            yield f"Note: {row['case']}, {row['alternative']}: {row['note']}."
