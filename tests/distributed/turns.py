"""Order in which an `Overlap` queues the units of two micro-batches."""

import itertools
from collections.abc import Sequence

from torch import Tensor

from graphmoe.ops.gradients import PendingWeightGrads
from graphmoe.runtime.compile.units import Unit
from graphmoe.runtime.overlap.runner import Backward, Call, Direction, Overlap

Order = list[tuple[Direction, str]]
"""Directions and names of units."""


def watched(overlap: Overlap) -> Order:
    """Return the units that the overlap queues from now on, as a list that grows."""
    order: Order = []
    run_unit, back = overlap.run_unit, overlap._back

    def run_and_note(unit: Unit, read: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
        def note_and_call(own: Sequence[Tensor], later: PendingWeightGrads) -> Sequence[Tensor]:
            order.append(("forward", unit.name))
            return call(own, later)

        return run_unit(unit, read, note_and_call)

    def note_and_back(backward: Backward, number: int) -> PendingWeightGrads:
        order.append(("backward", backward.units[number].name))
        return back(backward, number)

    overlap.run_unit, overlap._back = run_and_note, note_and_back  # type: ignore[method-assign]
    return order


def num_changes(order: Order) -> int:
    """Count the times that a forward follows a backward, or a backward a forward."""
    return sum(one != other for (one, _), (other, _) in itertools.pairwise(order))
