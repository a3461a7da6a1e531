"""Timelines of a pipeline: of a recorded run, or simulated from the time that each step is said to take."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from graphmoe.plan.pipeline.actions import Action, Placement, Step, Table, Together, parts
from graphmoe.plan.pipeline.check import in_order, needs, peak_activations, peaks, result

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

    table: Table
    """Steps that each rank computed."""
    spans: tuple[Span, ...]
    """Spans in the order of ranks, then of time."""
    makespan: float
    """Time from the first start to the last end of any rank."""
    busy: float
    """Time that all ranks compute, in sum."""
    peak_bytes: tuple[float, ...] | None = None
    """Most bytes that each rank kept at once, where measured or where the size of an activation is known."""

    @property
    def bubble(self) -> float:
        """The share of makespan * ranks in which a rank computes nothing, 0 to 1."""
        offered = self.makespan * self.table.placement.num_ranks
        return (offered - self.busy) / offered if offered else 0.0

    @functools.cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Most that each rank kept at once, in activations of its whole stage for one micro-batch."""
        return peak_activations(self.table)


def timeline_of(like: Table, spans: Iterable[Span], peak_bytes: Iterable[float] | None = None) -> Timeline:
    """Make a timeline of measured spans, of the schedule of a table; times are counted from the first start.

    The spans of one rank and track must not overlap. They may come in any order.
    """
    measured = sorted(spans, key=lambda span: (span.rank, span.start, span.end))
    if not measured:
        raise ValueError("a step has no spans")
    begin, end = min(span.start for span in measured), max(span.end for span in measured)
    moved = tuple(Span(s.rank, s.track, s.step, s.start - begin, s.end - begin) for s in measured)
    ranks: list[list[Step]] = [[] for _ in range(like.placement.num_ranks)]
    busy = 0.0
    for span in moved:
        if span.track == "compute":
            ranks[span.rank].append(span.step)
            busy += span.end - span.start
    table = replace(like, ranks=tuple(map(tuple, ranks)))
    peaks = None if peak_bytes is None else tuple(map(float, peak_bytes))
    return Timeline(table, moved, end - begin, busy, peaks)


@dataclass(frozen=True)
class Costs:
    """Times of steps by stage, all in one unit. B takes as long as I and W together."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    comm: float = 0.0
    """Time from an action's end to the arrival of its result on another rank; no rank is busy with it."""
    hidden: float = 0.0
    """Time that a forward and a backward save when they run together; at most the shorter of both."""
    activation_bytes: tuple[float, ...] | None = None
    """Bytes that are kept of each stage for one micro-batch."""

    @classmethod
    def of_rank(
        cls,
        placement: Placement,
        forward: float,
        backward_input: float,
        backward_weight: float,
        *,
        comm: float = 0.0,
        hidden: float = 0.0,
        activation_bytes: float | None = None,
    ) -> Costs:
        """Make equal stages from the costs of a rank's whole stage, which its virtual stages share.

        The saving of a pair is of whole stages too; a message has the same size however stages are cut.
        """
        shares = [len(placement.stages_of(rank)) for rank in placement.rank_of]
        assert len(set(shares)) == 1 or not hidden, (
            "pairs of ranks with more or fewer stages save differently"
        )
        return cls(
            tuple(forward / share for share in shares),
            tuple(backward_input / share for share in shares),
            tuple(backward_weight / share for share in shares),
            comm,
            hidden / shares[0],
            None if activation_bytes is None else tuple(activation_bytes / share for share in shares),
        )

    def of(self, step: Step) -> float:
        """Return the time that a rank computes for a step."""
        if isinstance(step, Together):
            forward, backward = self.of(step.forward), self.of(step.backward)
            return forward + backward - min(self.hidden, forward, backward)
        backward_input, backward_weight = self.backward_input[step.stage], self.backward_weight[step.stage]
        whole = backward_input + backward_weight
        times = {"F": self.forward[step.stage], "B": whole, "I": backward_input, "W": backward_weight}
        return times[step.kind]


def simulate(table: Table, costs: Costs) -> Timeline:
    """Simulate a table in which each step starts as early as its rank and its inputs allow.

    Transfers cost no rank its time and do not wait for each other. Both halves of a `Together` start and end
    with it. Raises `TableError` on a deadlock.
    """
    placement = table.placement
    spans: list[Span] = []
    ends: dict[Action, float] = {}
    free = [0.0] * placement.num_ranks
    busy = 0.0
    for rank, step in in_order(table):
        start = free[rank]
        for action in parts(step):
            for need in needs(action, placement.num_stages):
                arrived = ends[need]
                if costs.comm and placement.rank_of[need.stage] != rank:
                    arrived += costs.comm
                    spans.append(Span(rank, "comm", action, ends[need], arrived))
                start = max(start, arrived)
        free[rank] = start + costs.of(step)
        busy += costs.of(step)
        ends.update((result(action), free[rank]) for action in parts(step))
        spans.append(Span(rank, "compute", step, start, free[rank]))
    in_time = tuple(sorted(spans, key=lambda span: (span.rank, span.start, span.end)))
    peak_bytes = None if costs.activation_bytes is None else peaks(table, costs.activation_bytes)
    return Timeline(table, in_time, max(free), busy, peak_bytes)
