"""In which order the units of a forward and those of another micro-batch's backward are queued.

A transfer between ranks hides beside products that do not wait for it: those of the other micro-batch. So the
two take turns, and a turn is over where the next unit would wait for a transfer of its own micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Piece:
    """A unit at one place of the model, or its gradients."""

    name: str
    needs: frozenset[int] = frozenset()
    """Numbers, in the same list, of the pieces whose results it reads."""
    transfers: bool = False
    """Whether its work is a transfer between ranks, beside which others may run."""


def backward_of(forward: Sequence[Piece]) -> list[Piece]:
    """The gradients of pieces in their own order, each a piece that needs those of its readers.

    That is the reverse, but for transfers: they start as soon as what they send is there.
    """
    last = len(forward) - 1
    readers: list[set[int]] = [set() for _ in forward]
    for number, piece in enumerate(forward):
        for source in piece.needs:
            readers[last - source].add(last - number)
    pieces = [
        Piece(piece.name, frozenset(needs), piece.transfers)
        for piece, needs in zip(reversed(forward), readers, strict=True)
    ]
    return pieces


def transfers_first(pieces: Sequence[Piece]) -> list[int]:
    """An order in which what each piece needs comes before it, transfers as early as they can."""
    order: list[int] = []
    left = dict.fromkeys(range(len(pieces)))
    while left:
        ready = [number for number in left if pieces[number].needs <= set(order)]
        assert ready, "pieces need each other"
        chosen = next((number for number in ready if pieces[number].transfers), ready[0])
        order.append(chosen)
        del left[chosen]
    return order


def turns(pieces: Sequence[Piece], order: Sequence[int]) -> list[list[int]]:
    """The order, cut before each piece that waits for a transfer that has started since the last cut."""
    cut: list[list[int]] = []
    under_way: set[int] = set()
    for number in order:
        if not cut or pieces[number].needs & under_way:
            cut.append([])
            under_way = set()
        cut[-1].append(number)
        if pieces[number].transfers:
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
