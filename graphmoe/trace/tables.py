"""A trace's summary and the comparison of two as tables, and the workbook of AMD's TraceLens."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphmoe.trace.summary import SegmentTime, Summary

SHOWN_NAME = 64
"""Characters of a kernel's name in a table; format=json has more."""
TRACELENS = "TraceLens_generate_perf_report_pytorch"
"""Command of github.com/AMD-AGI/TraceLens; PyPI's package ``tracelens`` is another project, never called."""
TRACELENS_S = 1800
_FIGURES = {
    "step ms": lambda s: s.step_ms,
    "GPU idle %": lambda s: None if s.idle is None else 100 * s.idle,
    "exposed communication ms": lambda s: s.exposed_ms,
    "hidden communication ms": lambda s: s.hidden_ms,
    "host launches ms": lambda s: s.launch_ms,
    "launches": lambda s: s.launches,
}


@dataclass(frozen=True)
class Row:
    """A figure of both; None where a trace does not have it."""

    name: str
    first: float | None
    second: float | None

    @property
    def difference(self) -> float | None:
        """The second less the first; a name that only one trace has is 0 in the other."""
        if self.first is None and self.second is None:
            return None
        return (self.second or 0.0) - (self.first or 0.0)


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
        [Row(name, value(first), value(second)) for name, value in _FIGURES.items()],
        _compared(_segment_times(first), _segment_times(second)),
        _compared(_kernel_times(first), _kernel_times(second))[:num_kernels],
        " and ".join(dict.fromkeys([first.kinds, second.kinds])),
        notes,
    )


def _compared(first: Mapping[str, float], second: Mapping[str, float]) -> list[Row]:
    rows = [Row(name, first.get(name), second.get(name)) for name in dict.fromkeys([*first, *second])]
    return sorted(rows, key=lambda row: -abs(row.difference or 0.0))


def _segment_times(summary: Summary) -> dict[str, float]:
    return {f"{s.segment}:{s.part}" if s.part else s.segment: s.ms for s in summary.segments}


def _kernel_times(summary: Summary) -> dict[str, float]:
    found: dict[str, float] = {}
    for segment in summary.segments:
        for kernel in segment.kernels:
            found[kernel.name] = found.get(kernel.name, 0.0) + kernel.ms
    return found


def summary_text(summary: Summary) -> RenderableType:
    """The lines of the whole steps, then segments, then their largest kernels."""
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


def tracelens_report(trace: Path) -> tuple[Path | None, str | None]:
    """Let TraceLens, if it is on PATH, write a workbook beside a trace; return the file or the problem."""
    command = shutil.which(TRACELENS)
    if command is None:
        return None, None
    report = trace.with_name(f"{trace.name.split('.')[0]}.tracelens.xlsx")
    words = [command, "--profile_json_path", str(trace), "--output_xlsx_path", str(report)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TRACELENS_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{TRACELENS} of {trace}: {error}"
    if done.returncode or not report.exists():
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        return None, f"{TRACELENS} of {trace} ended with status {done.returncode}: {' '.join(last)}"
    return report, None
