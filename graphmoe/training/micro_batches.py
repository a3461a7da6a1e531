"""Micro-batches of a step through a model that is whole on its rank, one after the other or in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from graphmoe.model.transformer import LossOutput, Transformer
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.runtime.overlap.runner import Overlap
from graphmoe.segments import Executor

Add = Callable[[StagePieces, LossOutput], None]
"""Takes what a stage has made of a micro-batch, in the order of micro-batches for each stage."""


class MicroBatches(Protocol):
    """Runner of micro-batches, token ids [micro_batch_size, seq_len + 1] each."""

    def train(self, batches: Iterable[Tensor], add: Add) -> None:
        """Run forward and backward of each; gradients are those of the mean over micro-batches.

        No device sync where no dispatcher waits.
        """
        ...

    def evaluate(self, batches: Sequence[Tensor], add: Add) -> None:
        """Run the forward of each; the caller has switched gradients off."""
        ...


class OneAfterTheOther:
    """`MicroBatches` of a model that is whole; with overlap the backward of one beside the next's forward."""

    def __init__(
        self, model: Transformer, execute: Executor, num_global: int, overlap: Overlap | None = None
    ) -> None:
        """``num_global`` is the number of micro-batches of all ranks in a step."""
        self.model, self.execute, self.num_global, self.overlap = model, execute, num_global, overlap
        self.device = next(model.parameters()).device
        (self.pieces,) = model.stages

    def train(self, batches: Iterable[Tensor], add: Add) -> None:
        overlap = overlap_in_use(self.overlap, self.model)
        for tokens in batches:
            tokens = tokens.to(self.device, non_blocking=True)
            add(self.pieces, self._forward_and_backward(tokens, overlap))
        if overlap:
            overlap.finish()

    def evaluate(self, batches: Sequence[Tensor], add: Add) -> None:
        for tokens in batches:
            tokens = tokens.to(self.device, non_blocking=True)
            add(self.pieces, self.model.loss(tokens[:, :-1], tokens[:, 1:], self.execute))

    def _forward_and_backward(self, tokens: Tensor, overlap: Overlap | None) -> LossOutput:
        """Run both; with overlap the backward may still have to run at the end."""

        def forward() -> LossOutput:
            return self.model.loss(tokens[:, :-1], tokens[:, 1:], self.execute)

        output = overlap.forward(forward) if overlap else forward()
        total = output.total / self.num_global
        if overlap:
            overlap.backward(total)
        else:
            total.backward()
        return output


def overlap_in_use(overlap: Overlap | None, model: Transformer) -> Overlap | None:
    """Return the overlap, or None where the host counts arriving rows and would wait between units."""
    dispatcher = model.dispatcher
    return overlap if dispatcher is not None and dispatcher.capacity is not None else None
