"""The share of a model that a stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class StagePieces:
    """Pieces of the model that one stage has; layers are numbered over the whole model."""

    embed: bool
    layers: range
    mtp: range
    loss: bool


def all_pieces(num_layers: int, mtp_depth: int) -> StagePieces:
    """Return the pieces of the one stage of a model that is not cut."""
    return StagePieces(True, range(num_layers), range(mtp_depth), True)


def any_of(stages: Iterable[StagePieces], holds: Callable[[StagePieces], bool]) -> bool:
    """Return True where ``holds`` is true for one of the stages."""
    return any(map(holds, stages))


def needs_embedding(stage: StagePieces, *, tied: bool) -> bool:
    """Return True where a stage reads the embedding's weight, which is also the weight of a tied head."""
    return stage.embed or len(stage.mtp) > 0 or (tied and stage.loss)


def normalises(stage: StagePieces, mtp_depth: int) -> bool:
    """Return True for the stage that applies the final norm.

    It is the first stage that predicts later tokens; in a model without such layers, the stage of the loss.
    """
    return stage.mtp.start == 0 and len(stage.mtp) > 0 if mtp_depth else stage.loss
