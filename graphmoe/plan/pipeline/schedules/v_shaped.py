"""Tables on a V: each rank has one stage of the way to the last rank and one of the way back.

Sources: "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 6, for ZB-V; "Pipeline Parallelism
with Controllable Memory" (arXiv 2405.15362), sections 2 and 3, for V-half, V-min and the way in which all
three are made: a block has the times of one micro-batch on each rank (`blocks`), and each rank takes the next
action in the blocks of all micro-batches as soon as it can. Blocks follow the costs of the stages, and so do
the actions that fill the time between.
"""

import bisect
import functools
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from graphmoe.plan.pipeline.actions import Action, Kind, Placement, Table
from graphmoe.plan.pipeline.schedules.blocks import Block, Work, block_of, busy
from graphmoe.plan.pipeline.simulate import Costs

FILLING = 2
"""Micro-batches for each rank with which blocks are compared; tables with more take the same block."""
PATIENCE = (0.25, 0.75)
"""Shares of the time of a rank's other work within which it waits for arrivals; both are compared."""
LONGER = 1.03
"""Factor by which periods grow until a block keeps no more than it may."""
SLOWER_LEGS = ((0.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0))
"""Legs of a block that may take longer than they must, where memory allows."""
SHARES = (1.0, 0.8, 0.6, 0.4, 0.2)
"""Shares of the longest time that such a leg could take from rank to rank."""


def folded(
    schedule: str,
    limit_of: Callable[[int], int],
    num_ranks: int,
    num_micro_batches: int,
    virtual_stages: int,
    *,
    costs: Costs | None = None,
) -> Table:
    """Return a table whose ranks keep at most ``limit_of(num_ranks)`` activations of virtual stages."""
    assert virtual_stages == 2
    limit = limit_of(num_ranks)
    placement = Placement.folded(num_ranks)
    costs = costs or Costs.of_rank(placement, 1, 1, 1)
    costs = Costs(costs.forward, costs.backward_input, costs.backward_weight, costs.comm)
    assert len(costs.forward) == placement.num_stages
    if limit > 2 * num_ranks or limit >= 2 * num_micro_batches:
        limit = 2 * num_ranks  # of few micro-batches no rank can keep more than it may
    compared = min(num_micro_batches, FILLING * num_ranks)
    block, patience = _best_block(costs, num_ranks, compared, limit)
    steps, _ = _run(block, costs, num_micro_batches, limit, patience)
    return Table(schedule, placement, num_micro_batches, steps)


@functools.lru_cache(maxsize=1024)
def _best_block(costs: Costs, num_ranks: int, num_micro_batches: int, limit: int) -> tuple[Block, float]:
    tried = [(block, patience) for block in _blocks(costs, num_ranks, limit) for patience in PATIENCE]
    ends = [_run(block, costs, num_micro_batches, limit, patience)[1] for block, patience in tried]
    least = min(ends)
    return next(way for way, end in zip(tried, ends, strict=True) if end <= least * (1 + 1e-9))


def _blocks(costs: Costs, num_ranks: int, limit: int) -> Iterator[Block]:
    """Yield the fastest block of the shortest period that keeps to ``limit``, and slower ones of that period.

    A rank keeps less as periods grow, down to both activations of one micro-batch.
    """
    period = busy(costs, num_ranks) or 1.0
    while (fastest := block_of(costs, num_ranks, period)).kept(costs) > limit:
        period *= LONGER
    yield fastest
    hop = sum(costs.forward + costs.backward_input) / (4 * num_ranks) + costs.comm
    most = max(limit * period / (2 * num_ranks) - 2 * hop, 0.0)
    for legs in SLOWER_LEGS:
        slower = (
            block_of(costs, num_ranks, period, tuple(share * most * leg for leg in legs)) for share in SHARES
        )
        yield from next(([block] for block in slower if block.kept(costs) <= limit), [])


Turn = tuple[float, Work, int]
"""Time of an F or I by the block, that work, and its micro-batch."""


@dataclass
class _Rank:
    """One rank while its steps are chosen."""

    turns: list[Turn]
    """Next turn of each F and I, in the order of time; work without another turn is left out."""
    arrivals: dict[Work, list[float]]
    """Times from which micro-batches can begin, as far as they are known."""
    owed: deque[Action] = field(default_factory=deque)
    """Weight gradients whose turn has not come."""
    kept: int = 0
    free_from: float = 0.0
    steps: list[Action] = field(default_factory=list)

    def do(self, action: Action, place: int, period: float, num_micro_batches: int) -> None:
        """Add a step; ``place`` is the index of an F or I among the turns."""
        self.steps.append(action)
        if action.kind == "W":
            self.owed.popleft()
            self.kept -= 1
            return
        time, work, number = self.turns.pop(place)
        if number + 1 < num_micro_batches:
            bisect.insort(self.turns, (time + period, work, number + 1))
        if action.kind == "F":
            self.kept += 1
        else:
            self.owed.append(Action("W", action.stage, action.micro_batch))


@dataclass(frozen=True)
class _Rules:
    """Rules by which ranks choose their actions."""

    period: float
    seconds: Mapping[Kind, tuple[float, ...]]
    limit: int
    patience: float

    def choose(self, rank: _Rank, now: float) -> tuple[Action | None, int, float]:
        """Return a free rank's next action and its place among the turns, or the time of the next arrival.

        The action is the next of the block, else a weight gradient, else a later one of the block.
        """
        soon = math.inf
        owed = rank.owed[0] if rank.owed else None
        for place, turn in enumerate(rank.turns):
            _, work, number = turn
            times = rank.arrivals[work]
            arrival = times[number] if number < len(times) else math.inf
            if work[0] == "F" and not self._fits(rank, place):
                arrival = math.inf
            if arrival > now:
                soon = arrival if arrival < soon else soon
            elif not place or soon - now >= self.patience * self.seconds[work[0]][work[1]]:
                return Action(*work, number), place, math.inf
            if not place and owed and soon - now >= self.patience * self.seconds["W"][owed.stage]:
                return owed, 0, math.inf
        if owed and soon - now >= self.patience * self.seconds["W"][owed.stage]:
            return owed, 0, math.inf
        return None, 0, soon

    def _fits(self, rank: _Rank, place: int) -> bool:
        """Return True where a forward may be kept now.

        A forward that is not next must leave room for all forwards before it. So the block's own order stays
        possible, and no rank runs out of room for a forward that others wait for.
        """
        time, before = rank.turns[place][0], 0
        for first, work, _ in rank.turns[:place]:
            if work[0] == "F":
                before += math.ceil((time - first) / self.period - 1e-9)
        return rank.kept + before < self.limit


def _run(
    block: Block, costs: Costs, num_micro_batches: int, limit: int, patience: float
) -> tuple[tuple[tuple[Action, ...], ...], float]:
    """Let each free rank act by the rules; return the steps of all ranks, and the makespan."""
    last, period = 2 * len(block.times) - 1, block.period
    seconds: dict[Kind, tuple[float, ...]] = {
        "F": costs.forward,
        "I": costs.backward_input,
        "W": costs.backward_weight,
    }
    rules = _Rules(period, seconds, limit, patience)
    ranks = [
        _Rank(sorted((time, work, 0) for work, time in times.items()), {work: [] for work in times})
        for times in block.times
    ]
    ranks[0].arrivals["F", 0] = [0.0] * num_micro_batches
    events = [(0.0, number) for number in range(len(ranks))]
    while events:
        now, number = heapq.heappop(events)
        rank = ranks[number]
        if now < rank.free_from:
            continue
        action, place, wake = rules.choose(rank, now)
        if action is not None:
            kind, stage, _ = action
            rank.free_from = wake = now + seconds[kind][stage]
            rank.do(action, place, period, num_micro_batches)
            reader = stage + (1 if kind == "F" else -1)
            if kind == "F" and stage == last:
                rank.arrivals["I", last].append(wake)
            elif (kind == "F" or kind == "I") and reader >= 0:
                other = min(reader, last - reader)
                arrival = wake + (costs.comm if other != number else 0.0)
                ranks[other].arrivals[kind, reader].append(arrival)
                heapq.heappush(events, (arrival, other))
        if wake < math.inf:
            heapq.heappush(events, (wake, number))
    assert all(len(rank.steps) == 6 * num_micro_batches for rank in ranks), "ranks wait for each other"
    return tuple(tuple(rank.steps) for rank in ranks), max(rank.free_from for rank in ranks)
