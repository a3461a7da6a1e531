"""Order in which units of a forward and of another micro-batch's backward are queued.

A transfer between ranks hides beside products that do not wait for it: those of the other micro-batch. So the
two take turns, and a turn is over where the next unit would wait for a transfer of its own micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class OrderedUnit:
    """A unit at one place of the model, or its gradients."""

    name: str
    needs: frozenset[int] = frozenset()
    """Numbers, in the same list, of the units whose results it reads."""
    transfers: bool = False
    """True where its work is a transfer between ranks, beside which others may run."""


def backward_of(forward: Sequence[OrderedUnit]) -> list[OrderedUnit]:
    """Return the gradients of units in their own order, each a unit that needs those of its readers.

    The order is the reverse, but for transfers, which start as soon as the tensors to send are there.
    """
    last = len(forward) - 1
    readers: list[set[int]] = [set() for _ in forward]
    for number, unit in enumerate(forward):
        for source in unit.needs:
            readers[last - source].add(last - number)
    units = [
        OrderedUnit(unit.name, frozenset(needs), unit.transfers)
        for unit, needs in zip(reversed(forward), readers, strict=True)
    ]
    return units


def transfers_first(units: Sequence[OrderedUnit]) -> list[int]:
    """Return an order in which each unit comes after those that it needs, and transfers come early."""
    order: list[int] = []
    left = dict.fromkeys(range(len(units)))
    while left:
        ready = [number for number in left if units[number].needs <= set(order)]
        assert ready, "units need each other"
        chosen = next((number for number in ready if units[number].transfers), ready[0])
        order.append(chosen)
        del left[chosen]
    return order


def turns(units: Sequence[OrderedUnit], order: Sequence[int]) -> list[list[int]]:
    """Cut the order before each unit that waits for a transfer that has started since the last cut."""
    cut: list[list[int]] = []
    under_way: set[int] = set()
    for number in order:
        if not cut or units[number].needs & under_way:
            cut.append([])
            under_way = set()
        cut[-1].append(number)
        if units[number].transfers:
            under_way.add(number)
    return cut


def interleaved(
    forward: Sequence[Sequence[int]], backward: Sequence[Sequence[int]]
) -> list[tuple[Direction, int]]:
    """Turns of the two one after the other, the forward first; what one has more follows at the end."""
    order: list[tuple[Direction, int]] = []
    for i in range(max(len(forward), len(backward))):
        for direction, of in (("forward", forward), ("backward", backward)):
            order += [(direction, number) for number in (of[i] if i < len(of) else ())]  # type: ignore[misc]
    return order
