"""V schedules: stages run from rank 0 to the last rank and back, so each rank has two.

Sources: arXiv 2401.10241, section 6, for ZB-V; arXiv 2405.15362, sections 2 and 3, for V-half and V-min. Each
rank runs the next action of all `blocks` as soon as it can; the costs of stages decide what fills gaps.
"""

import bisect
import functools
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphmoe.plan.pipeline import Action, Kind, Placement, Table
from graphmoe.plan.pipeline.schedules.blocks import Block, block_of, busy
from graphmoe.plan.pipeline.simulate import Costs, makespan_of

FILLING = 2  # micro-batches per rank at which blocks are compared; longer tables use the same block
COMPARED = 4  # most micro-batches per rank at which tables by given and equal costs are compared
CLEAR = 0.02  # relative difference of short tables beyond which longer ones rank the same
PATIENCE = (0.25, 0.75)  # shares of the other work's time that a rank waits for input; both are tried
LONGER = 1.03  # growth factor of periods until a block fits its limit
# legs of a block that may be slower than necessary if memory allows
SLOWER_LEGS = ((0.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0))
SHARES = (1.0, 0.8, 0.6, 0.4, 0.2)  # shares of the longest delay that such a leg can have


def folded(
    schedule: str, limit_of: Callable[[int], int], num_ranks: int, num_micro_batches: int,
    virtual_stages: int, *, costs: Costs | None = None, stands_for: int | None = None,
) -> Table:  # fmt: skip
    """Return a table in which a rank saves activations of at most ``limit_of(num_ranks)`` stages at a time.

    ``stands_for``: micro-batches of the run that a shorter table represents.
    """
    assert virtual_stages == 2
    limit = limit_of(num_ranks)
    placement = Placement.folded(num_ranks)
    costs = costs or Costs.of_rank(placement, 1, 1, 1)
    costs = Costs(costs.forward, costs.backward_input, costs.backward_weight, costs.comm)
    assert len(costs.forward) == placement.num_stages
    if limit > 2 * num_ranks or limit >= 2 * num_micro_batches:
        limit = 2 * num_ranks  # with few micro-batches no rank can exceed its limit
    compared = min(stands_for or num_micro_batches, COMPARED * num_ranks)
    followed = _followed(costs, num_ranks, compared, limit)
    steps, _ = _steps(followed, num_ranks, num_micro_batches, limit)
    return Table(schedule, placement, num_micro_batches, steps)


@functools.lru_cache(maxsize=1024)
def _followed(costs: Costs, num_ranks: int, compared: int, limit: int) -> Costs:
    # a block of unequal costs saves activations for longer, so its ranks may wait for memory more often
    placement = Placement.folded(num_ranks)
    equal, ratio = Costs.of_rank(placement, 1, 1, 1), 1.0
    for count in sorted({min(compared, FILLING * num_ranks), compared}):
        steps, _ = _steps(equal, num_ranks, count, limit)
        _, makespan = _steps(costs, num_ranks, count, limit)
        ratio = makespan / (makespan_of(Table("", placement, count, steps), costs) or 1.0)
        if abs(ratio - 1) > CLEAR:  # more micro-batches do not change which is faster
            break
    return costs if ratio <= 1 else equal


@functools.lru_cache(maxsize=32)
def _steps(
    costs: Costs, num_ranks: int, num_micro_batches: int, limit: int
) -> tuple[tuple[tuple[Action, ...], ...], float]:
    compared = min(num_micro_batches, FILLING * num_ranks)
    block, patience = _best_block(costs, num_ranks, compared, limit)
    ranks, makespan = _run(block, costs, num_micro_batches, limit, patience)
    kinds: tuple[Kind, ...] = ("F", "I", "W")
    each = [(kind, stage) for kind in kinds for stage in range(2 * num_ranks)]
    return tuple(tuple(Action(*each[work], number) for work, number in steps) for steps in ranks), makespan


@functools.lru_cache(maxsize=1024)
def _best_block(costs: Costs, num_ranks: int, num_micro_batches: int, limit: int) -> tuple[Block, float]:
    tried = [(block, patience) for block in _blocks(costs, num_ranks, limit) for patience in PATIENCE]
    ends = [_run(block, costs, num_micro_batches, limit, patience)[1] for block, patience in tried]
    least = min(ends)
    return next(way for way, end in zip(tried, ends, strict=True) if end <= least * (1 + 1e-9))


def _blocks(costs: Costs, num_ranks: int, limit: int) -> Iterator[Block]:
    # longer periods save fewer activations, down to both of one micro-batch
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


Turn = tuple[float, int, int]


@dataclass(frozen=True)
class _Rules:
    """Rules for a rank's next action; lists have F (forward) of all stages, then I (dgrad), W (wgrad)."""

    num_stages: int
    period: float
    seconds: tuple[float, ...]
    waits: list[float]
    """Seconds that a rank waits for input rather than do this work."""
    limit: int
    arrivals: list[list[float]]
    """Known earliest starts of each micro-batch's F and I."""


class _Rank:
    def __init__(self, rules: _Rules, turns: list[Turn]) -> None:
        self.rules = rules
        self.turns = turns  # next F and I of each stage, in order of time; exhausted ones are left out
        self.owed = deque[tuple[int, int]]()  # deferred weight gradients
        self.steps: list[tuple[int, int]] = []  # work and micro-batch
        self.kept, self.free_from = 0, 0.0

    def do_next(self, now: float, num_micro_batches: int) -> int | None:
        rules, turns = self.rules, self.turns
        place = self._choose(now)
        if place is None:
            return None
        if place < 0:
            self.steps.append(self.owed.popleft())
            self.kept -= 1
        else:
            time, work, number = turns.pop(place)
            self.steps.append((work, number))
            if number + 1 < num_micro_batches:
                bisect.insort(turns, (time + rules.period, work, number + 1))
            if work < rules.num_stages:
                self.kept += 1
            else:
                self.owed.append((work + rules.num_stages, number))
        work = self.steps[-1][0]
        self.free_from = now + rules.seconds[work]
        return work

    def _choose(self, now: float) -> int | None:
        rules, soon, owed = self.rules, math.inf, self.owed
        arrivals, waits = rules.arrivals, rules.waits
        # in this order: the block's next, wgrad, a later one of the block
        for place, (_, work, number) in enumerate(self.turns):
            times = arrivals[work]
            arrival = times[number] if number < len(times) else math.inf
            if work < rules.num_stages and not self._fits(place):
                arrival = math.inf
            if arrival > now:
                soon = arrival if arrival < soon else soon
            elif not place or soon - now >= waits[work]:
                return place
            if not place and owed and soon - now >= waits[owed[0][0]]:
                return -1
        return -1 if owed and soon - now >= waits[owed[0][0]] else None

    def _fits(self, place: int) -> bool:
        # a later forward must leave memory for all forwards before it, so the block's own order stays
        # feasible
        rules, before = self.rules, 0
        if place:
            time = self.turns[place][0]
            for first, work, _ in self.turns[:place]:
                if work < rules.num_stages:
                    before += math.ceil((time - first) / rules.period - 1e-9)
        return self.kept + before < rules.limit


def _run(
    block: Block, costs: Costs, num_micro_batches: int, limit: int, patience: float
) -> tuple[list[list[tuple[int, int]]], float]:
    num_stages = 2 * len(block.times)
    seconds = costs.forward + costs.backward_input + costs.backward_weight
    waits, arrivals = [patience * each for each in seconds], [list[float]() for _ in seconds]
    rules = _Rules(num_stages, block.period, seconds, waits, limit, arrivals)
    numbers = {"F": 0, "I": num_stages}
    ranks = [
        _Rank(rules, sorted((time, numbers[kind] + stage, 0) for (kind, stage), time in times.items()))
        for times in block.times
    ]
    arrivals[0] = [0.0] * num_micro_batches
    readers = [*range(1, num_stages), 2 * num_stages - 1, None, *range(num_stages, 2 * num_stages - 1)]
    readers += [None] * num_stages
    placement = Placement.folded(len(ranks)).rank_of
    events = [(0.0, number) for number in range(len(ranks))]
    while events:
        now, number = heapq.heappop(events)
        rank = ranks[number]
        if now < rank.free_from or (work := rank.do_next(now, num_micro_batches)) is None:
            continue  # an arrival is an event too
        heapq.heappush(events, (rank.free_from, number))
        if (reader := readers[work]) is not None:
            other, arrival = placement[reader % num_stages], rank.free_from
            if other != number:
                arrival += costs.comm
                heapq.heappush(events, (arrival, other))
            arrivals[reader].append(arrival)
    assert all(len(rank.steps) == 6 * num_micro_batches for rank in ranks), "ranks wait for each other"
    return [rank.steps for rank in ranks], max(rank.free_from for rank in ranks)
