"""Compile report: one table for people, one JSON document for tools."""

import io
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console
from torch import fx

from graphmoe.config.arguments import text_table
from graphmoe.config.ranges import shown_size
from graphmoe.passes.base import PassReport
from graphmoe.runtime.compile.code import Compiled, CompileTurns, Turn, compile_graph
from graphmoe.runtime.torch_compat import cache_counts

REPORT_FILE = "compile_report.json"


@dataclass
class UnitReport:
    unit: str
    graphs: int = 0  # compiled graphs: forward, dgrad, wgrad, and the wgrad that adds
    seconds: float = 0.0
    cache: Counter[str] = field(default_factory=Counter)
    passes: list[PassReport] = field(default_factory=list)
    shared_by: int = 1  # positions in the model that run this code
    kept_bytes: int = 0
    recomputed: int = 0
    of_other_ranks: int = 0  # graphs compiled by another rank while this one waited

    @property
    def from_cache(self) -> int:
        # graphs found in torch's caches, except those that another rank just compiled
        return self.cache["fx_hits"] - self.of_other_ranks

    @property
    def source(self) -> str:
        if not self.graphs:
            return "-"
        return "cache" if self.from_cache == self.graphs else "compiled"

    @contextmanager
    def measured(self) -> Iterator[None]:
        started = time.perf_counter()
        with cache_counts() as counts:
            yield
        self.seconds += time.perf_counter() - started
        self.cache.update(counts)

    def compile(self, graph: fx.GraphModule, turns: CompileTurns | None) -> Compiled:
        hits, asked = self.cache["fx_hits"], time.perf_counter()
        with nullcontext(Turn()) if turns is None else turns.turn(graph) as turn:
            # the wait for another rank counts as compile time
            self.seconds += time.perf_counter() - asked
            with self.measured():
                code = compile_graph(graph)
            turn.compiles = self.cache["fx_hits"] == hits
        self.of_other_ranks += turn.elsewhere and not turn.compiles
        self.graphs += 1
        return code


def to_json(
    reports: Sequence[UnitReport], recompiled: int, uuid: str, why_compiled: str = ""
) -> dict[str, Any]:
    """Return the report; ``passes`` are sums over compile units."""
    cache = Counter[str]()
    for report in reports:
        cache.update(report.cache)
    return {
        "graphs": sum(report.graphs for report in reports),
        "breaks": 0,  # a segment that cannot be one graph is an error
        "recompiled": recompiled,
        "seconds": sum(report.seconds for report in reports),
        "cache": cache,
        "passes_uuid": uuid,
        "passes": {name: _total(rows) for name, rows in _by_pass(reports).items()},
        "units": [
            {
                "unit": report.unit,
                "graphs": report.graphs,
                "seconds": report.seconds,
                "source": report.source,
                "why_compiled": why_compiled if report.source == "compiled" else None,
                "used": report.shared_by,
                "kept_bytes": report.kept_bytes,
                "recomputed": report.recomputed,
                "cache": report.cache,
                "passes": [asdict(row) for row in report.passes],
            }
            for report in reports
        ],
    }


def cache_line(reports: Sequence[UnitReport], why_compiled: str) -> str:
    graphs, found = sum(r.graphs for r in reports), sum(r.from_cache for r in reports)
    missed = Counter[str]()
    for report in reports:
        missed[report.unit] += report.graphs - report.from_cache
    listed = [f"{unit} ({count})" for unit, count in missed.items() if count]
    line = f"compile cache: {found} of {graphs} graphs found"
    return f"{line}; compiled {', '.join(listed)}: {why_compiled}" if listed else line


def to_text(reports: Sequence[UnitReport]) -> str:
    """Return tables of compile units and passes, then the reasons why passes replaced no match."""
    units = [
        [r.unit, f"{r.shared_by}x", str(r.graphs), shown_size(r.kept_bytes), str(r.recomputed)]
        + [f"{r.seconds:.1f}", r.source]
        for r in reports
    ]
    passes, reasons = list[list[str]](), list[str]()
    for name, rows in _by_pass(reports).items():
        total = _total(rows)
        kept = "-"
        if total["saved_bytes_before"] is not None:
            kept = f"{shown_size(total['saved_bytes_before'])} -> {shown_size(total['saved_bytes_after'])}"
        operations = f"{total['nodes_before']} -> {total['nodes_after']}"
        left = total["left"]
        matches = f"{total['matches']} of {total['matches'] + left}" if left else str(total["matches"])
        passes.append([name, matches, operations, kept, f"{total['ms']:.1f}"])
        reasons += [f"left by {name} in {row.unit}: {reason}\n" for row in rows for reason in row.left]
    console = Console(file=io.StringIO(), width=110)
    how: dict[str, Any] = {"box": HEAVY_HEAD, "title_justify": "left", "pad_edge": True}
    of_unit = ("unit", "used", "graphs", "kept", "again", "seconds", "from")
    of_pass = ("pass", "matches", "operations", "kept for backward", "ms")
    console.print(text_table(of_unit, units, names=(0, 6), title="compiled units", **how))
    console.print(text_table(of_pass, passes, names=(0,), title="passes", **how))
    return console.file.getvalue() + "".join(reasons)  # type: ignore[attr-defined]


def _by_pass(reports: Sequence[UnitReport]) -> dict[str, list[PassReport]]:
    rows: dict[str, list[PassReport]] = {}
    for report in reports:
        for row in report.passes:
            rows.setdefault(row.name, []).append(row)
    return rows


def _total(rows: Sequence[PassReport]) -> dict[str, Any]:
    # operations and bytes count only if the pass changed the unit
    changed = [row for row in rows if row.matches]
    measured = [row for row in changed if row.saved_bytes_before is not None]
    return {
        "matches": sum(row.matches for row in rows),
        "left": sum(len(row.left) for row in rows),
        "nodes_before": sum(row.nodes_before for row in changed),
        "nodes_after": sum(row.nodes_after for row in changed),
        "saved_bytes_before": sum(row.saved_bytes_before or 0 for row in measured) if measured else None,
        "saved_bytes_after": sum(row.saved_bytes_after or 0 for row in measured) if measured else None,
        "ms": sum(row.ms for row in rows),
    }
