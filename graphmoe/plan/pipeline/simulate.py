"""Timelines of a pipeline, recorded or simulated."""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from graphmoe.plan.pipeline import Action, Kind, Placement, Step, Table, Together, parts
from graphmoe.plan.pipeline.check import KINDS, in_order, needs, peak_activations, peaks, result

Track = Literal["compute", "comm"]


@dataclass(frozen=True)
class Span:
    """A rank's step or transfer, in the unit of the costs (microseconds if recorded)."""

    rank: int
    track: Track
    step: Step
    """For transfers (track ``comm``), the action that waits for the input."""
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    table: Table
    spans: tuple[Span, ...]
    """Spans, sorted by rank, then time."""
    makespan: float
    busy: float
    peak_bytes: tuple[float, ...] | None = None
    """Peak bytes of each rank, if measured or if activation sizes are known."""

    @property
    def bubble(self) -> float:
        """Idle share of makespan * ranks, 0 to 1."""
        offered = self.makespan * self.table.placement.num_ranks
        return (offered - self.busy) / offered if offered else 0.0

    @functools.cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Peak of each rank's saved activations; 1 is one micro-batch's of all the rank's stages."""
        return peak_activations(self.table)


def timeline_of(like: Table, spans: Iterable[Span], peak_bytes: Iterable[float] | None = None) -> Timeline:
    """Return the timeline of measured spans, in any order; those of one rank and track must not overlap."""
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
    """Times of actions by stage, in one unit. B (backward) takes I (dgrad) plus W (wgrad)."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    comm: float = 0.0
    """Transfer time to another rank; does not occupy the ranks."""
    hidden: float = 0.0
    """Time that an overlapped forward and backward save; at most the shorter of both."""
    activation_bytes: tuple[float, ...] | None = None

    @classmethod
    def of_rank(
        cls, placement: Placement, forward: float, backward_input: float, backward_weight: float, *,
        comm: float = 0.0, hidden: float = 0.0, activation_bytes: float | None = None,
    ) -> Costs:  # fmt: skip
        """Return the costs of stages: those of a rank, also ``hidden``, divided equally among its stages."""
        shares = [len(placement.stages_of(rank)) for rank in placement.rank_of]
        assert len(set(shares)) == 1 or not hidden, (
            "pairs of ranks with more or fewer stages save differently"
        )
        each = (forward, backward_input, backward_weight)
        forwards, inputs, weights = (tuple(time / share for share in shares) for time in each)
        sizes = None if activation_bytes is None else tuple(activation_bytes / share for share in shares)
        return cls(forwards, inputs, weights, comm, hidden / shares[0], sizes)

    def of(self, step: Step) -> float:
        if isinstance(step, Together):
            forward, backward = self.of(step.forward), self.of(step.backward)
            return forward + backward - min(self.hidden, forward, backward)
        kind, stage, _ = step
        if kind == "F":
            return self.forward[stage]
        if kind == "B":
            return self.backward_input[stage] + self.backward_weight[stage]
        return (self.backward_input if kind == "I" else self.backward_weight)[stage]


def simulate(table: Table, costs: Costs) -> Timeline:
    """Return the timeline if steps start as early as rank and inputs allow, and transfers do not contend.
    *Raises* `TableError`."""
    placement = table.placement
    spans: list[Span] = []
    ends: dict[Action, float] = {}
    busy = makespan = 0.0
    for rank, step, start, end in _timed(table, costs):
        for action in parts(step):
            for need in needs(action, placement.num_stages) if costs.comm else ():
                if placement.rank_of[need.stage] != rank:
                    spans.append(Span(rank, "comm", action, ends[need], ends[need] + costs.comm))
        spans.append(Span(rank, "compute", step, start, end))
        ends.update((result(action), end) for action in parts(step))
        busy += costs.of(step)
        makespan = max(makespan, end)
    in_time = tuple(sorted(spans, key=lambda span: (span.rank, span.start, span.end)))
    peak_bytes = None if costs.activation_bytes is None else peaks(table, costs.activation_bytes)
    return Timeline(table, in_time, makespan, busy, peak_bytes)


def makespan_of(table: Table, costs: Costs) -> float:
    """Return the simulated end time of the last step, faster than `simulate`, as no spans are recorded."""
    return max(map(operator.itemgetter(3), _timed(table, costs)), default=0.0)


def _timed(table: Table, costs: Costs) -> Iterator[tuple[int, Step, float, float]]:
    ranks, numbers = table.ranks, _numbers(table.placement, costs.comm)
    ends, waiting = dict[int, float](), dict[int, list[int]]()
    free, position = [0.0] * len(ranks), [0] * len(ranks)
    awake = deque(range(len(ranks)))
    while awake:
        rank = awake.popleft()
        steps, end = ranks[rank], free[rank]
        for index in range(position[rank], len(steps)):
            step, start, latest = steps[index], end, 0
            actions = parts(step)
            for kind, stage, micro_batch in actions:
                for need, delay in numbers[kind][stage][1]:
                    arrival = ends.get(need + micro_batch, math.inf) + delay
                    if arrival > start:
                        start, latest = arrival, need + micro_batch
            if start == math.inf:
                waiting.setdefault(latest, []).append(rank)
                free[rank], position[rank] = end, index
                break
            end = start + costs.of(step)
            for kind, stage, micro_batch in actions:
                done = numbers[kind][stage][0] + micro_batch
                ends[done] = end
                if done in waiting:
                    awake.extend(waiting.pop(done))
            yield rank, step, start, end
    if waiting:
        deque(in_order(table), maxlen=0)  # names the ranks that wait


def _numbers(placement: Placement, comm: float) -> dict[Kind, list[tuple[int, list[tuple[int, float]]]]]:
    stages, rank_of = range(placement.num_stages), placement.rank_of
    # results of micro-batch 0; those of micro-batch n are n higher, and no pipeline has 2**32
    own = {(kind, stage): (3 * stage + i) * 2**32 for i, kind in enumerate("FIW") for stage in stages}

    def numbered(action: Action) -> tuple[int, list[tuple[int, float]]]:
        rank = rank_of[action.stage]
        found = needs(action, placement.num_stages)
        delays = [comm if rank_of[need.stage] != rank else 0.0 for need in found]
        return own[result(action)[:2]], [*zip((own[need[:2]] for need in found), delays, strict=True)]

    return {kind: [numbered(Action(kind, stage, 0)) for stage in stages] for kind in KINDS}
