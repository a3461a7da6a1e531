"""Schedules with pairs of a forward and another micro-batch's dgrad, and wgrad where ranks would wait.

Source of the order on a V: DualPipeV (DeepSeek's DualPipe; arXiv 2412.19437, section 3.2.1), with all wgrad
apart and placed by a simulation.
"""

import functools
import heapq
import math
from collections import deque
from collections.abc import Sequence

from graphmoe.plan.pipeline import Action, Kind, Placement, Step, Table, Together, parts
from graphmoe.plan.pipeline.check import needs, result
from graphmoe.plan.pipeline.schedules.one_f_one_b import num_warm_up, without
from graphmoe.plan.pipeline.simulate import Costs

# shares of wgrad's time that a rank waits rather than run it; each is tried
PATIENCE = (0.01, 0.25, 0.5, 0.75)
COMPARED = 3  # micro-batches per rank at which they are compared; longer tables repeat


def dualpipe_v(
    schedule: str, num_ranks: int, num_micro_batches: int, virtual_stages: int, *,
    costs: Costs | None = None, stands_for: int | None = None,
) -> Table:  # fmt: skip
    """Return a table on a V. A rank saves activations of one micro-batch more than 1F1B's first rank."""
    assert virtual_stages == 2
    placement = Placement.folded(num_ranks)
    costs = costs or Costs.of_rank(placement, 1, 1, 1)
    costs = Costs(costs.forward, costs.backward_input, costs.backward_weight, costs.comm, costs.hidden)
    limit, compared = 2 * num_ranks + 2, min(stands_for or num_micro_batches, COMPARED * num_ranks)
    short, orders = (
        tuple(_on_a_v(rank, num_ranks, number) for rank in range(num_ranks))
        for number in (compared, num_micro_batches)
    )
    steps, _ = _run(orders, placement, costs, limit, _patience(short, placement, costs, limit))
    return Table(schedule, placement, num_micro_batches, steps)


def zb1p_in_pairs(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> Table:
    """Return zb1p's table with pairs. A rank saves at most as much as the first rank of overlapped 1F1B."""
    assert virtual_stages == 1
    placement, orders = Placement.loop(num_ranks), list[tuple[Step, ...]]()
    for rank in range(num_ranks):
        warm_up = min(num_warm_up(rank, num_ranks, 1, overlap=True), num_micro_batches)
        forwards = [Action("F", rank, number) for number in range(num_micro_batches)]
        backwards = [forward._replace(kind="I") for forward in forwards]
        pairs = map(Together, forwards[warm_up:], backwards)
        orders.append((*forwards[:warm_up], *pairs, *backwards[num_micro_batches - warm_up :]))
    steps, _ = _run(orders, placement, Costs.of_rank(placement, 1, 1, 1), 2 * num_ranks, PATIENCE[0])
    return Table("zb1p", placement, num_micro_batches, steps)


def _on_a_v(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Step, ...]:
    # a table of fewer micro-batches is a longer one without the missing ones
    total, after = max(num_micro_batches, 2 * num_ranks), num_ranks - 1 - rank
    stages = {"down": rank, "up": 2 * num_ranks - 1 - rank}
    numbers: dict[tuple[Kind, str], int] = {}

    def take(kind: Kind, leg: str) -> Action:
        numbers[kind, leg] = number = numbers.get((kind, leg), -1) + 1
        return Action(kind, stages[leg], number)

    steps: list[Step] = [take("F", "down") for _ in range(2 * after)]
    for _ in range(rank + 1):
        steps += take("F", "down"), take("F", "up")
    for _ in range(after):
        steps += take("I", "up"), take("F", "up")
    for _ in range(total - 2 * num_ranks + rank + 1):
        steps.append(Together(take("F", "down"), take("I", "up")))
        steps.append(Together(take("F", "up"), take("I", "down")))
    for _ in range(after):
        steps += take("I", "up"), Together(take("F", "up"), take("I", "down"))
    for _ in range(rank + 1):
        steps += take("I", "up"), take("I", "down")
    steps += [take("I", "down") for _ in range(after)]
    return tuple(kept for step in steps if (kept := without(step, num_micro_batches)))


@functools.lru_cache(maxsize=64)
def _patience(orders: tuple[tuple[Step, ...], ...], placement: Placement, costs: Costs, limit: int) -> float:
    return min(PATIENCE, key=lambda patience: _run(orders, placement, costs, limit, patience)[1])


def _run(
    orders: Sequence[Sequence[Step]], placement: Placement, costs: Costs, limit: int, patience: float
) -> tuple[tuple[tuple[Step, ...], ...], float]:
    """Return the orders with wgrad, and their end; ``limit``: stages that a rank saves before a forward."""
    ranks, num_stages = range(placement.num_ranks), placement.num_stages
    left, owed = [deque(order) for order in orders], [deque[Action]() for _ in ranks]
    done: list[list[Step]] = [[] for _ in ranks]
    kept, free, ends = [0] * len(ranks), [0.0] * len(ranks), dict[Action, float]()
    events = [(0.0, rank) for rank in ranks]

    def arrival(step: Step, rank: int) -> float:
        found = [need for action in parts(step) for need in needs(action, num_stages)]
        comm = [costs.comm * (placement.rank_of[need.stage] != rank) for need in found]
        return max((ends.get(need, math.inf) + c for need, c in zip(found, comm, strict=True)), default=0.0)

    def choose(rank: int, now: float) -> Step | None:
        weights = owed[rank]
        if not left[rank]:
            return weights.popleft() if weights else None
        is_full = kept[rank] >= limit and any(action.kind == "F" for action in parts(left[rank][0]))
        wait = arrival(left[rank][0], rank) - now
        if weights and (is_full or wait > patience * costs.of(weights[0])):
            return weights.popleft()
        return left[rank].popleft() if wait <= 0 else None

    while events:
        now, rank = heapq.heappop(events)
        if now < free[rank] or (step := choose(rank, now)) is None:
            continue  # an arrival is an event too
        free[rank] = end = now + costs.of(step)
        done[rank].append(step)
        heapq.heappush(events, (end, rank))
        for action in parts(step):
            kind, stage, _ = action
            ends[result(action)] = end
            kept[rank] += (kind == "F") - (kind == "W")
            if kind == "I":
                owed[rank].append(action._replace(kind="W"))
            reader = stage + (1 if kind == "F" else -1)
            if kind != "W" and 0 <= reader < num_stages and placement.rank_of[reader] != rank:
                heapq.heappush(events, (end + costs.comm, placement.rank_of[reader]))
    return tuple(map(tuple, done)), max(free)
