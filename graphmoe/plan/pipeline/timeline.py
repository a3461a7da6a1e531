"""Timelines of a pipeline: the results of a simulation or of a recorded run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from graphmoe.plan.pipeline.actions import Placement, Step, Table
from graphmoe.plan.pipeline.check import peak_activations

Track = Literal["compute", "comm"]


@dataclass(frozen=True)
class Span:
    """One step or transfer of one rank; times have the unit of the costs, for a run microseconds."""

    rank: int
    track: Track
    step: Step
    """Step of the rank; on the track ``comm`` the action that waits for its input to arrive."""
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All spans of one step of training, and the numbers that follow from them."""

    schedule: str
    placement: Placement
    num_micro_batches: int
    spans: tuple[Span, ...]
    """Spans in the order of ranks, then of time."""
    makespan: float
    """Time from the first start to the last end of any rank."""
    bubble: float
    """The share of makespan * ranks in which a rank computes nothing, 0 to 1."""
    peak_activations: tuple[float, ...]
    """Most that each rank kept at once, in activations of its whole stage for one micro-batch."""
    peak_bytes: tuple[float, ...] | None = None
    """Most bytes that each rank kept at once, where measured or where the size of an activation is known."""


def timeline_of(
    schedule: str,
    placement: Placement,
    num_micro_batches: int,
    spans: Iterable[Span],
    peak_bytes: Iterable[float] | None = None,
) -> Timeline:
    """Make a timeline of measured spans; times are counted from the first start.

    The spans of one rank and track must not overlap. They may come in any order.
    """
    measured = sorted(spans, key=lambda span: (span.rank, span.start, span.end))
    if not measured:
        raise ValueError("a step has no spans")
    begin, end = min(span.start for span in measured), max(span.end for span in measured)
    moved = tuple(Span(s.rank, s.track, s.step, s.start - begin, s.end - begin) for s in measured)
    busy = sum(span.end - span.start for span in moved if span.track == "compute")
    makespan = end - begin
    table = table_of(schedule, placement, num_micro_batches, moved)
    return Timeline(
        schedule,
        placement,
        num_micro_batches,
        moved,
        makespan,
        1 - busy / (makespan * placement.num_ranks) if makespan else 0.0,
        tuple(peak_activations(table)),
        None if peak_bytes is None else tuple(float(most) for most in peak_bytes),
    )


def table_of(schedule: str, placement: Placement, num_micro_batches: int, spans: Iterable[Span]) -> Table:
    """Return the steps that each rank computed; the spans of a rank are in the order of time."""
    ranks: list[list[Step]] = [[] for _ in range(placement.num_ranks)]
    for span in spans:
        if span.track == "compute":
            ranks[span.rank].append(span.step)
    return Table(schedule, placement, num_micro_batches, tuple(map(tuple, ranks)))
