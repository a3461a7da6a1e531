"""A trace's summary, and the comparison of two, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphmoe.trace.comparison import Comparison, Row
from graphmoe.trace.summary import SegmentTime, Summary

SHOWN_NAME = 64
"""Characters of a kernel's name in a table; format=json has more."""


def summary_text(summary: Summary) -> RenderableType:
    """What is to be seen first, then segments, then their largest kernels."""
    tables = (Text(), _segments(summary), Text(), _kernels(summary))
    return Group(*map(Text, head(summary)), *tables, *_notes(summary.notes))


def comparison_text(comparison: Comparison) -> RenderableType:
    """Two traces side by side."""
    names = ("first", "second")
    paths = [Text(f"{name}: {path}") for name, path in zip(names, comparison.traces, strict=True)]
    known = [row for row in comparison.figures if row.difference is not None]
    tables = [
        _side_by_side("step", known, names),
        _side_by_side("segment, ms per step", comparison.segments, names),
        _side_by_side(f"{comparison.kinds} that differ most, ms per step", comparison.kernels, names),
    ]
    parts: list[RenderableType] = [*paths]
    for table in tables:
        parts += [Text(), table]
    return Group(*parts, *_notes(comparison.notes))


def head(summary: Summary) -> Iterator[str]:
    """The lines above the tables."""
    numbers, facts = summary.facts.get("steps"), summary.facts
    which = f"steps {numbers[0]} to {numbers[-1]}" if numbers else f"{summary.num_steps} steps"
    rank = f", rank {facts['rank']} of {facts['num_ranks']}" if "rank" in facts else ""
    yield summary.trace
    yield f"{which}{rank}, {summary.device or 'unknown device'}; all times per step"
    if summary.on == "cpu":
        yield f"step {summary.step_ms:.3f} ms of the host"
        return
    assert summary.idle is not None
    yield f"step {summary.step_ms:.3f} ms, GPU idle {summary.idle:.1%}"
    yield f"communication {summary.exposed_ms:.3f} ms exposed, {summary.hidden_ms:.3f} ms hidden"
    yield f"host {summary.launch_ms:.3f} ms in {summary.launches:.0f} launches"
    yield "busy " + ", ".join(f"stream {name}: {ms:.3f} ms" for name, ms in summary.streams.items())


def _segments(summary: Summary) -> Table:
    table = _table("segment", "part", "calls", "ms", "of step", *_on_gpu(summary, "communication ms"))
    for row in summary.segments:
        share = f"{row.ms / summary.step_ms:.1%}" if summary.step_ms else "-"
        message = "-" if row.communication_ms is None else f"{row.communication_ms:.3f}"
        cells = (row.segment, row.part, _count(row.calls), f"{row.ms:.3f}", share)
        table.add_row(*cells, *_on_gpu(summary, message))
    return table


def _kernels(summary: Summary) -> Table:
    kind = summary.kinds.removesuffix("s")
    table = _table("segment", "part", kind, "calls", "ms", *_on_gpu(summary, "floor ms"), left=3)
    for row in summary.segments:
        for place, kernel in enumerate(row.kernels):
            floor = "unknown" if kernel.floor_ms is None else f"{kernel.floor_ms:.3f}"
            cells = (_short(kernel.name), _count(kernel.calls), f"{kernel.ms:.3f}")
            table.add_row(*(("", "") if place else _name(row)), *cells, *_on_gpu(summary, floor))
    return table


def _on_gpu(summary: Summary, cell: str) -> tuple[str, ...]:
    """A cell of a column that a trace of a CPU has nothing for."""
    return (cell,) if summary.on == "gpu" else ()


def _name(row: SegmentTime) -> tuple[str, str]:
    return row.segment, row.part


def _side_by_side(title: str, rows: Sequence[Row], names: tuple[str, str]) -> Table:
    table = _table(title, *names, "difference", left=1)
    for row in rows:
        cells = [_number(value) for value in (row.first, row.second)]
        table.add_row(_short(row.name), *cells, _number(row.difference, "+"))
    return table


def _table(*columns: str, left: int = 2) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        is_name = place < left  # a narrow terminal breaks names, never numbers
        table.add_column(column, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    return table


def _notes(notes: Sequence[str]) -> list[Text]:
    return [Text(), *(Text(f"note: {note}") for note in notes)] if notes else []


def _short(name: str) -> str:
    return name if len(name) <= SHOWN_NAME else f"{name[: SHOWN_NAME - 3]}..."


def _count(calls: float) -> str:
    return "-" if not calls else f"{calls:g}" if calls == int(calls) else f"{calls:.1f}"


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"
