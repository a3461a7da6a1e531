"""Numbers of a trace's steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from graphmoe.trace.events import Trace
from graphmoe.trace.owners import Owner, step_of, unit_and_part

OTHER = Owner("(no segment)", "")
"""Owner of kernels that run in a step outside of all ranges."""
BETWEEN = Owner("(between steps)", "")
UNKNOWN = Owner("(unknown)", "")
"""Owner of kernels whose launch is not in the trace."""
NAME_LENGTH = 200


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or memset of a segment, or an operation on a CPU; per step."""

    name: str
    calls: float
    ms: float
    floor_ms: float | None
    """Least time that the device needs; None where the trace does not say enough."""


@dataclass(frozen=True)
class SegmentTime:
    """A part of a segment, or of a compiled unit; per step."""

    segment: str
    part: str
    calls: float
    """Calls of its range."""
    ms: float
    """Time in which any kernel of it runs; on a CPU time of the host in its range."""
    communication_ms: float | None
    kernels: list[Kernel]
    """The kernels with the most time."""


@dataclass
class Summary:
    """All numbers of a trace; times are milliseconds per step."""

    trace: str
    device: str | None
    on: str
    """gpu or cpu."""
    facts: dict[str, Any]
    num_steps: int
    step_ms: float
    """From the first kernel to the end of the last one; on a CPU, in which the host is in steps."""
    idle: float | None = None
    """Share of that in which nothing runs on the GPU."""
    exposed_ms: float | None = None
    """Communication beside which no other kernel runs."""
    hidden_ms: float | None = None
    """The rest of it."""
    launch_ms: float | None = None
    """Time of the host in calls that launch kernels or graphs."""
    launches: float | None = None
    streams: dict[str, float] = field(default_factory=dict)
    """Time in which each stream is busy."""
    segments: list[SegmentTime] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> str:
        """The kind of ``kernels`` of segments."""
        return "kernels" if self.on == "gpu" else "operations"


def calls_of(trace: Trace) -> Counter[Owner]:
    """Count the ranges of ours inside steps."""
    named = [
        unit_and_part(e.name) for e in trace.host if e.is_range and step_of(trace.steps, e.start) is not None
    ]
    return Counter(Owner(*each) for each in named if each)


def largest(times: Iterable[tuple[str, float, float | None]], steps: int, count: int) -> list[Kernel]:
    """The names with the most time, of (name, microseconds, floor) each."""
    by_name: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for name, took, floor in times:
        by_name[name].append((took, floor))
    found = []
    for name, each in by_name.items():
        floors = [floor for _, floor in each if floor is not None]
        known = sum(floors) / steps / 1e3 if len(floors) == len(each) else None
        total = sum(took for took, _ in each) / steps / 1e3
        found.append(Kernel(name[:NAME_LENGTH], len(each) / steps, total, known))
    return sorted(found, key=lambda kernel: -kernel.ms)[:count]
