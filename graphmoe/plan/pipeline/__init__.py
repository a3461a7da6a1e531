"""Actions of pipeline ranks and their order: the vocabulary of schedules.

Stages are numbered from the embedding to the loss. A rank has one or several (virtual stages), by
`Placement`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]  # forward; whole backward; dgrad; wgrad. B is I, then W.


class Action(NamedTuple):
    """Forward, dgrad, wgrad or whole backward of one stage for one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Return a short form such as ``3F0``: stage 3, forward, micro-batch 0."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Together(NamedTuple):
    """A forward and another micro-batch's backward, run together with alternating segments."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


Step = Action | Together


def parts(step: Step) -> tuple[Action, ...]:
    return step if isinstance(step, Together) else (step,)


@dataclass(frozen=True)
class Placement:
    rank_of: tuple[int, ...]
    num_ranks: int

    @classmethod
    def loop(cls, num_ranks: int, virtual_stages: int = 1) -> Placement:
        """Place stages round-robin: stage s on rank s % num_ranks."""
        return cls(tuple(s % num_ranks for s in range(num_ranks * virtual_stages)), num_ranks)

    @classmethod
    def folded(cls, num_ranks: int) -> Placement:
        """Place two stages per rank in a V: rank 0 has the first and the last."""
        ranks = range(num_ranks)
        return cls((*ranks, *reversed(ranks)), num_ranks)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, on in enumerate(self.rank_of) if on == rank)


@dataclass(frozen=True)
class Table:
    """A schedule: the steps of each rank, in order."""

    schedule: str
    placement: Placement
    num_micro_batches: int
    ranks: tuple[tuple[Step, ...], ...]

    def actions(self, rank: int) -> list[Action]:
        """Return the actions of a rank; a `Together` is listed as its forward, then its backward."""
        return [*itertools.chain.from_iterable(map(parts, self.ranks[rank]))]
