"""Training runs whose routing sends far too much to one rank in chosen micro-batches."""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.runtime.ranks import Ranks
from graphmoe.training.trainer import Trainer
from tests.distributed.training import Change, Outcome, Training, on_rank

MICRO_BATCHES = 4
WORDS = (
    "moe.dispatcher=symm", "moe.balance=none", "model.num_experts=8", "model.top_k=2", "model.num_layers=2",
    "model.num_dense_layers=1", "model.aux_loss=global_batch", "model.aux_loss_coef=0.1", "train.steps=6",
    "train.val_batches=0", "checkpoint.enabled=false", "checkpoint.interval=0", "train.log_interval=2",
)  # fmt: skip
TWO_RANKS = ("parallel.ep=2", "train.global_batch_size=16")
PLACES = frozenset[tuple[int, int]]
"""Steps from 1, and their micro-batches from 0."""


@dataclass(frozen=True)
class Skew:
    """Micro-batches in which all tokens choose the first experts, whatever the weights.

    A micro-batch is known by its tokens, so it is skewed again where it runs again.
    """

    places: PLACES = frozenset()
    ranks: tuple[int, ...] | None = None
    """Ranks whose tokens are skewed; None for all."""
    validates: bool = False
    """True to skew validation batches instead."""
    layer: int | None = None
    """Place of the only MoE layer of the model that is skewed; None for all."""
    spoiled: PLACES = frozenset()
    """Places at which the loss of rank 1 is not finite."""

    def __call__(self, trainer: Trainer) -> None:
        seen: dict[bytes, int] = {}
        start, model, whole = trainer.step * MICRO_BATCHES, trainer.model, trainer.model.stage

        def stage(pieces: StagePieces, carried: tuple[Tensor, ...], tokens: Tensor, *rest):
            trains = torch.is_grad_enabled()
            number = start + seen.setdefault(tokens.numpy().tobytes(), len(seen)) if trains else 0
            place = number // MICRO_BATCHES + 1, number % MICRO_BATCHES
            if trains and place in self.spoiled and on_rank(trainer, 1):
                output = skewed(place, pieces, carried, tokens, *rest)
                return output._replace(total=output.total * math.nan)
            return skewed(place if trains else None, pieces, carried, tokens, *rest)

        def skewed(place: tuple[int, int] | None, *arguments):
            chosen = self.validates if place is None else place in self.places
            if not chosen or (self.ranks is not None and trainer.ranks.rank not in self.ranks):
                return whole(*arguments)
            places = [place for pieces in model.stages for place in model.moe_layers(pieces)]
            routers = zip(places, model.routers(), strict=True)
            biases = [router.selection_bias for n, router in routers if self.layer in (None, n)]
            kept = [bias.clone() for bias in biases]
            for bias in biases:
                bias.zero_()[: trainer.plan.model.top_k] = 9.0
            try:
                return whole(*arguments)
            finally:
                for bias, old in zip(biases, kept, strict=True):
                    bias.copy_(old)

        model.stage = stage


def no_memory(trainer: Trainer) -> None:
    trainer.steps._ladder._has_memory = lambda now, then: False


def small_chunks(trainer: Trainer) -> None:
    """Let the rung without limit work on a third of the budget at a time."""
    dispatcher = trainer.steps._ladder._last
    dispatcher.chunk = type(dispatcher.chunk)(*(max(1, int(0.3 * n)) for n in dispatcher.chunk))


def hang_before_climbing(trainer: Trainer) -> None:
    """Let a rank that has found a step void say so by a file, and wait to be killed."""

    def hang(step, loads):
        (trainer.folder / f"climbs_{trainer.ranks.rank}").touch()
        time.sleep(600)

    trainer.steps._ladder.climb = hang


class Found(NamedTuple):
    """A run whose room is planned by a budget, and one with room for everything."""

    ladder: Outcome
    worst: Outcome


@dataclass(frozen=True)
class Both:
    """Case that runs both, one after the other."""

    changes: tuple[Change, ...]
    words: tuple[str, ...] = ()
    budget: float = 1.5
    of_ladder: tuple[Change, ...] = ()
    """Changes of the first run only."""
    layout: tuple[str, ...] = TWO_RANKS
    runs: Training = Training(())

    def __call__(self, ranks: Ranks, folder: Path) -> Found:
        budget = f"moe.receive_budget={self.budget}"
        ladder = self.run(ranks, folder / "ladder", budget, self.of_ladder)
        key = self.changes, self.words, self.layout, self.runs
        if key not in _worst:  # cases that differ in their ladder only share one
            _worst[key] = self.run(ranks, folder / "worst", "moe.receive_budget=worst_case")
        return Found(ladder, _worst[key])

    def run(self, ranks: Ranks, folder: Path, budget: str, more: tuple[Change, ...] = ()) -> Outcome:
        def change(trainer: Trainer) -> None:
            for one in (*self.changes, *more):
                one(trainer)

        words = (*WORDS, *self.layout, *self.words, budget)
        return replace(self.runs, words=words, change=change)(ranks, folder)


_worst: dict[object, Outcome] = {}
