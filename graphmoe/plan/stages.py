"""The share of a model that a stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class StagePieces:
    """What one stage has of the model; layers are numbered over the whole model."""

    embed: bool
    layers: range
    mtp: range
    loss: bool


def all_pieces(num_layers: int, mtp_depth: int) -> StagePieces:
    """The one stage of a model that is not cut."""
    return StagePieces(True, range(num_layers), range(mtp_depth), True)


def any_of(stages: Iterable[StagePieces], holds: Callable[[StagePieces], bool]) -> bool:
    """Whether it holds for one of the stages."""
    return any(map(holds, stages))


def needs_embedding(stage: StagePieces, *, tied: bool) -> bool:
    """Whether a stage reads the embedding's weight; a tied head is it."""
    return stage.embed or len(stage.mtp) > 0 or (tied and stage.loss)


def normalises(stage: StagePieces, mtp_depth: int) -> bool:
    """Whether a stage applies the final norm: the first with a prediction of later tokens, or the loss."""
    return stage.mtp.start == 0 and len(stage.mtp) > 0 if mtp_depth else stage.loss
