"""Two traces side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphmoe.trace.summary import Summary

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
        """The second less the first; what only one has is 0 in the other."""
        if self.first is None and self.second is None:
            return None
        return (self.second or 0.0) - (self.first or 0.0)


@dataclass
class Comparison:
    """What differs between two traces, per step."""

    traces: tuple[str, str]
    figures: list[Row]
    segments: list[Row]
    """Milliseconds, those of the largest difference first."""
    kernels: list[Row]
    kinds: str
    """What the rows of ``kernels`` are: kernels, operations, or both."""
    notes: list[str]


def compare(first: Summary, second: Summary, num_kernels: int) -> Comparison:
    """Compare summaries that have all of their kernels."""
    notes = list(dict.fromkeys([*first.notes, *second.notes]))
    if first.device != second.device:
        notes.append(f"the devices differ: {first.device} and {second.device}")
    return Comparison(
        (first.trace, second.trace),
        [Row(name, value(first), value(second)) for name, value in _FIGURES.items()],
        _rows(_segments(first), _segments(second)),
        _rows(_kernels(first), _kernels(second))[:num_kernels],
        " and ".join(dict.fromkeys([first.kinds, second.kinds])),
        notes,
    )


def _rows(first: Mapping[str, float], second: Mapping[str, float]) -> list[Row]:
    rows = [Row(name, first.get(name), second.get(name)) for name in dict.fromkeys([*first, *second])]
    return sorted(rows, key=lambda row: -abs(row.difference or 0.0))


def _segments(summary: Summary) -> dict[str, float]:
    return {f"{s.segment}:{s.part}" if s.part else s.segment: s.ms for s in summary.segments}


def _kernels(summary: Summary) -> dict[str, float]:
    found: dict[str, float] = {}
    for segment in summary.segments:
        for kernel in segment.kernels:
            found[kernel.name] = found.get(kernel.name, 0.0) + kernel.ms
    return found
