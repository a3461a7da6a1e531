"""A trace's summary, and the comparison of two, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphmoe.config.arguments import text_table
from graphmoe.trace.summary import Summary

SHOWN_NAME = 64
"""Characters of a kernel's name in a table; format=json has more."""
_FIGURES = {
    "step ms": lambda s: s.step_ms,
    "GPU idle %": lambda s: None if s.idle is None else 100 * s.idle,
    "exposed communication ms": lambda s: s.exposed_ms,
    "hidden communication ms": lambda s: s.hidden_ms,
    "host launches ms": lambda s: s.launch_ms,
    "launches": lambda s: s.launches,
}


class Row(NamedTuple):
    """A figure of both; None where a trace does not have it."""

    name: str
    first: float | None
    second: float | None
    difference: float | None
    """The second less the first; a name that only one trace has is 0 in the other."""


@dataclass
class Comparison:
    """Numbers of two traces side by side, per step."""

    traces: tuple[str, str]
    figures: list[Row]
    segments: list[Row]
    """Milliseconds, those of the largest difference first."""
    kernels: list[Row]
    kinds: str
    """Kinds of the rows of ``kernels``: kernels, operations, or both."""
    notes: list[str]


def compare(first: Summary, second: Summary, num_kernels: int) -> Comparison:
    """Compare summaries that have all of their kernels."""
    notes = list(dict.fromkeys([*first.notes, *second.notes]))
    if first.device != second.device:
        notes.append(f"the devices differ: {first.device} and {second.device}")
    return Comparison(
        (first.trace, second.trace),
        _rows(*({name: value(s) for name, value in _FIGURES.items()} for s in (first, second))),
        _sorted(_rows(_segment_times(first), _segment_times(second))),
        _sorted(_rows(_kernel_times(first), _kernel_times(second)))[:num_kernels],
        " and ".join(dict.fromkeys([first.kinds, second.kinds])),
        notes,
    )


def _rows(first: Mapping[str, float | None], second: Mapping[str, float | None]) -> list[Row]:
    pairs = ((name, first.get(name), second.get(name)) for name in dict.fromkeys([*first, *second]))
    return [Row(name, a, b, None if a is b is None else (b or 0.0) - (a or 0.0)) for name, a, b in pairs]


def _sorted(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -abs(row.difference or 0.0))


def _segment_times(summary: Summary) -> dict[str, float | None]:
    return {f"{s.segment}:{s.part}" if s.part else s.segment: s.ms for s in summary.segments}


def _kernel_times(summary: Summary) -> dict[str, float]:
    found: dict[str, float] = {}
    for kernel in (kernel for segment in summary.segments for kernel in segment.kernels):
        found[kernel.name] = found.get(kernel.name, 0.0) + kernel.ms
    return found


def summary_text(summary: Summary) -> RenderableType:
    """The lines of the whole steps, then segments, then their largest kernels."""
    tables = (Text(), _segments(summary), Text(), _kernels(summary))
    return Group(*map(Text, _head(summary)), *tables, *_notes(summary.notes))


def comparison_text(comparison: Comparison) -> RenderableType:
    """Two traces side by side."""
    parts: list[RenderableType] = [
        Text(f"{name}: {path}") for name, path in zip(("first", "second"), comparison.traces, strict=True)
    ]
    for title, rows in {
        "step": [row for row in comparison.figures if row.difference is not None],
        "segment, ms per step": comparison.segments,
        f"{comparison.kinds} that differ most, ms per step": comparison.kernels,
    }.items():
        cells = [(_short(name), _ms(a), _ms(b), _ms(more, "+")) for name, a, b, more in rows]
        parts += [Text(), text_table([title, "first", "second", "difference"], cells, left=1)]
    return Group(*parts, *_notes(comparison.notes))


def _head(summary: Summary) -> Iterator[str]:
    """The lines above the tables."""
    numbers, facts = summary.facts.get("steps"), summary.facts
    which = f"steps {numbers[0]} to {numbers[-1]}" if numbers else f"{summary.num_steps} steps"
    rank = f", rank {facts['rank']} of {facts['num_ranks']}" if "rank" in facts else ""
    yield summary.trace
    yield f"{which}{rank}, {summary.device or 'unknown device'}; all times per step"
    if summary.on == "cpu":
        yield f"step {summary.step_ms:.3f} ms of the host"
        return
    yield f"step {summary.step_ms:.3f} ms, GPU idle {summary.idle:.1%}"
    yield f"communication {summary.exposed_ms:.3f} ms exposed, {summary.hidden_ms:.3f} ms hidden"
    yield f"host {summary.launch_ms:.3f} ms in {summary.launches:.0f} launches"
    yield "busy " + ", ".join(f"stream {name}: {ms:.3f} ms" for name, ms in summary.streams.items())


def _segments(summary: Summary) -> Table:
    """A row for each segment; a column that a CPU has nothing for is left out."""
    rows = [
        (
            row.segment,
            row.part,
            _count(row.calls),
            _ms(row.ms),
            f"{row.ms / summary.step_ms:.1%}" if summary.step_ms else "-",
            _ms(row.communication_ms),
        )
        for row in summary.segments
    ]
    return _without_last(summary, ["segment", "part", "calls", "ms", "of step", "communication ms"], rows, 2)


def _kernels(summary: Summary) -> Table:
    rows = [
        (
            *(("", "") if place else (row.segment, row.part)),
            _short(kernel.name),
            _count(kernel.calls),
            _ms(kernel.ms),
            "unknown" if kernel.floor_ms is None else _ms(kernel.floor_ms),
        )
        for row in summary.segments
        for place, kernel in enumerate(row.kernels)
    ]
    kind = summary.kinds.removesuffix("s")
    return _without_last(summary, ["segment", "part", kind, "calls", "ms", "floor ms"], rows, 3)


def _without_last(summary: Summary, columns: list[str], rows: Sequence[tuple[str, ...]], left: int) -> Table:
    most = len(columns) - (summary.on == "cpu")
    return text_table(columns[:most], [row[:most] for row in rows], left=left)


def _notes(notes: list[str]) -> list[Text]:
    return [Text(), *(Text(f"note: {note}") for note in notes)] if notes else []


def _short(name: str) -> str:
    return name if len(name) <= SHOWN_NAME else f"{name[: SHOWN_NAME - 3]}..."


def _count(calls: float) -> str:
    return "-" if not calls else f"{calls:g}" if calls == int(calls) else f"{calls:.1f}"


def _ms(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"
