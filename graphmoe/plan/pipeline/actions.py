"""Actions of a pipeline's ranks and their order: the words that schedules are made of.

The model is cut into stages, numbered from the embedding to the loss. A rank has one stage or several
(virtual stages); `Placement` says which. Tables name work by stage and micro-batch, and know no tensors.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; gradients of the stage's inputs; gradients of its weights. B is I, then W."""


class Action(NamedTuple):
    """One piece of work of one stage for one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Return words such as ``3F0``: stage 3, forward, micro-batch 0."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Together(NamedTuple):
    """A forward and the backward of another micro-batch, whose segments take turns."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


Step = Action | Together


def parts(step: Step) -> tuple[Action, ...]:
    """Return the one action of a step, or the two of a `Together`."""
    return step if isinstance(step, Together) else (step,)


@dataclass(frozen=True)
class Placement:
    """Places of the stages on ranks."""

    rank_of: tuple[int, ...]
    """Rank of each stage."""
    num_ranks: int

    @classmethod
    def loop(cls, num_ranks: int, virtual_stages: int = 1) -> Placement:
        """Place stages in rounds: stage s is on rank s % num_ranks."""
        return cls(tuple(s % num_ranks for s in range(num_ranks * virtual_stages)), num_ranks)

    @classmethod
    def folded(cls, num_ranks: int) -> Placement:
        """Place stages on a V, to the last rank and back: rank 0 has the first and the last stage."""
        ranks = range(num_ranks)
        return cls((*ranks, *reversed(ranks)), num_ranks)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in the order of the model."""
        return tuple(stage for stage, on in enumerate(self.rank_of) if on == rank)


@dataclass(frozen=True)
class Table:
    """A schedule: the steps of each rank, in order."""

    schedule: str
    placement: Placement
    num_micro_batches: int
    ranks: tuple[tuple[Step, ...], ...]

    def actions(self, rank: int) -> list[Action]:
        """Return the actions of a rank; a `Together` gives its forward, then its backward."""
        return [*itertools.chain.from_iterable(map(parts, self.ranks[rank]))]
