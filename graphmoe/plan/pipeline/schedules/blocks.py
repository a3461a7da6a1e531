"""Blocks of V schedules: the start times of one micro-batch on each rank, repeated every period.

Source: "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), section 2. A rank's actions,
shifted by whole periods into the same one, must not overlap.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from graphmoe.plan.pipeline.simulate import Costs

Work = tuple[Literal["F", "I"], int]
Array = npt.NDArray[np.float64]

# all orders of a rank's work in a period: F there, F back, I there, I back, W of both stages
ORDERS = np.array([(0, *order) for order in itertools.permutations(range(1, 6))])
# orders with distinct starts if W of both stages is equally long
ORDERS_ALIKE = ORDERS[ORDERS.argsort(axis=1)[:, 4] < ORDERS.argsort(axis=1)[:, 5]]
NOTHING = 1e-9  # rounding tolerance, as a share of a period


@dataclass(frozen=True)
class Block:
    """Start times of micro-batch 0 on each rank; later ones are shifted by the period."""

    times: tuple[dict[Work, float], ...]
    period: float

    def kept(self, costs: Costs) -> int:
        """Return the most activations that a rank saves if each wgrad directly follows its dgrad."""
        num_stages, most = 2 * len(self.times), 0
        for rank, times in enumerate(self.times):
            lives = [
                (times["F", s], times["I", s] + costs.backward_input[s])
                for s in (rank, num_stages - 1 - rank)
            ]
            for moment, _ in lives:
                open_ones = (self._between(moment, start, end) for start, end in lives)
                most = max(most, sum(open_ones))
        return most

    def _between(self, moment: float, start: float, end: float) -> int:
        begun = math.floor((moment - start) / self.period + NOTHING)
        return begun - math.floor((moment - end) / self.period + NOTHING)


def busy(costs: Costs, num_ranks: int) -> float:
    return max(sum(_durations(costs, rank, num_ranks)) for rank in range(num_ranks))


@functools.lru_cache(maxsize=1024)
def block_of(
    costs: Costs, num_ranks: int, period: float, slower: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
) -> Block:
    """Return the fastest block; ``slower``: extra transfer time of forward down, up, backward down, up."""
    works = []
    for rank in range(num_ranks):
        *inner, first, second = _durations(costs, rank, num_ranks)
        # spare time goes next to W: a short path saves fewer activations, a longer one leaves wgrad to the
        # end
        rest = (period - sum(inner) - first - second) / 2
        works.append((*inner, first + rest, second + rest))
    between = [costs.comm + more for more in slower]
    phases = _phases([np.array(work) for work in works], between, period)
    times: list[dict[Work, float]] = [{} for _ in range(num_ranks)]
    ready, before = phases[0][0], 0
    for leg, forwards in enumerate((True, False, True, False)):
        for rank in range(num_ranks) if forwards else reversed(range(num_ranks)):
            ready += between[leg] if rank != before else 0.0
            wait = phases[rank][leg] - ready
            start = ready + (wait - math.floor(wait / period + NOTHING) * period)
            stage = rank if leg in (0, 3) else 2 * num_ranks - 1 - rank
            times[rank]["F" if leg < 2 else "I", stage] = start
            ready, before = start + works[rank][leg], rank
    return Block(tuple(times), period)


def _durations(costs: Costs, rank: int, num_ranks: int) -> tuple[float, ...]:
    back = 2 * num_ranks - 1 - rank
    forward, inputs, weights = costs.forward, costs.backward_input, costs.backward_weight
    return (forward[rank], forward[back], inputs[back], inputs[rank], weights[rank], weights[back])


def _phases(works: list[Array], between: list[float], period: float) -> list[list[float]]:
    # dynamic program from the last rank to the first: for each order of a rank, the best order of the next
    starts = [_starts(work) for work in works]
    last, work = starts[-1], works[-1]
    # a micro-batch turns on the last rank, twice, and on the first
    waits = _later(last[:, 1] - last[:, 0] - work[0], period) + _later(
        last[:, 3] - last[:, 2] - work[2], period
    )
    chosen: list[tuple[npt.NDArray[np.intp], Array]] = []
    known: dict[bytes, tuple[Array, Array]] = {}
    for here in reversed(range(len(works) - 1)):
        key = works[here].tobytes() + works[here + 1].tobytes()
        if key not in known:
            known[key] = _hop(starts[here], starts[here + 1], works[here], works[here + 1], between, period)
        of_hop, shift = known[key]
        both = of_hop + waits
        best = _first_least(both / period, axis=1)
        chosen.append((best, shift))
        waits = both[np.arange(len(best)), best]
    first = starts[0]
    waits = waits + _later(first[:, 2] - first[:, 1] - works[0][1], period)
    order, offset = int(_first_least(waits / period, axis=0)), 0.0
    phases = [first[order, :4].tolist()]
    for rank, (best, shift) in enumerate(reversed(chosen), start=1):
        after = int(best[order])
        offset += float(shift[order, after])
        order = after
        phases.append((starts[rank][order, :4] + offset).tolist())
    return phases


def _starts(work: Array) -> Array:
    orders = ORDERS_ALIKE if work[4] == work[5] else ORDERS
    in_order = work[orders]
    found = np.empty_like(in_order)
    np.put_along_axis(found, orders, np.cumsum(in_order, axis=1) - in_order, axis=1)
    return found


def _hop(
    here: Array, after: Array, work: Array, work_after: Array, between: list[float], period: float
) -> tuple[Array, Array]:
    # waits of all legs and the next rank's delay, for each pair of orders; the leg with the least total wait
    # does not wait
    x, y = here.T[:, :, None], after.T[:, None, :]
    legs = (
        x[0] - y[0] + work[0] + between[0],
        x[1] - y[1] - work_after[1] - between[1],
        x[2] - y[2] + work[2] + between[2],
        x[3] - y[3] - work_after[3] - between[3],
    )
    waits, shares = np.empty((4, *legs[0].shape)), np.empty((4, *legs[0].shape))
    for number, shift in enumerate(legs):  # one pair of legs at a time, to fit the processor's cache
        of_pairs = [
            _later(shift - leg if towards else leg - shift, period)
            for towards, leg in zip((True, False, True, False), legs, strict=True)
            if leg is not shift
        ]
        np.add(of_pairs[0], of_pairs[1], out=waits[number])
        waits[number] += of_pairs[2]
        np.round(np.divide(waits[number], period, out=shares[number]), 8, out=shares[number])
    best = np.argmin(shares, axis=0)[None]
    return np.take_along_axis(waits, best, 0)[0], np.take_along_axis(np.stack(legs), best, 0)[0]


def _later(time: Array, period: float) -> Array:
    moved = np.floor(time / period + NOTHING)
    moved *= period
    return np.subtract(time, moved, out=moved)


def _first_least(values: Array, axis: int) -> npt.NDArray[np.intp]:
    return np.asarray(np.argmin(np.round(values, 8), axis=axis))
