"""The makespan of one table under many costs: `simulate` without spans, in an order that is found once."""

from __future__ import annotations

from typing import NamedTuple

from graphmoe.plan.pipeline.actions import Action, Step, Table, Together, parts
from graphmoe.plan.pipeline.dependencies import in_order, needs, result
from graphmoe.plan.pipeline.simulate import Costs


class _Visit(NamedTuple):
    """A step by the numbers of what it is made of."""

    rank: int
    cost: int
    here: tuple[int, ...]
    """Results of the same rank that it needs."""
    arriving: tuple[int, ...]
    """Those of others."""
    results: tuple[int, ...]


class Walk:
    """All steps of a table, each after what it needs. *Raises* TableError on a deadlock."""

    def __init__(self, table: Table) -> None:
        self.num_ranks, self.num_micro_batches = table.placement.num_ranks, table.num_micro_batches
        rank_of, num_stages = table.placement.rank_of, table.placement.num_stages
        self._costs: dict[object, tuple[int, Step]] = {}
        self._visits: list[_Visit] = []
        numbers: dict[Action, int] = {}
        for rank, step in in_order(table):
            needed = [need for action in parts(step) for need in needs(action, num_stages)]
            cost, _ = self._costs.setdefault(_kind(step), (len(self._costs), step))
            self._visits.append(
                _Visit(
                    rank,
                    cost,
                    tuple(numbers[need] for need in needed if rank_of[need.stage] == rank),
                    tuple(numbers[need] for need in needed if rank_of[need.stage] != rank),
                    tuple(numbers.setdefault(result(action), len(numbers)) for action in parts(step)),
                )
            )
        self._num_results = len(numbers)

    def makespan(self, costs: Costs) -> float:
        """That of `simulate`."""
        seconds = [costs.of(step) for _, step in self._costs.values()]
        ends, free, comm = [0.0] * self._num_results, [0.0] * self.num_ranks, costs.comm
        for rank, cost, here, arriving, results in self._visits:
            start = free[rank]
            for need in here:
                if ends[need] > start:
                    start = ends[need]
            for need in arriving:
                if ends[need] + comm > start:
                    start = ends[need] + comm
            free[rank] = end = start + seconds[cost]
            for number in results:
                ends[number] = end
        return max(free)


def _kind(step: Step) -> object:
    """Equal for steps that take the same time."""
    if isinstance(step, Together):
        return step.forward[:2], step.backward[:2]
    return step[:2]
