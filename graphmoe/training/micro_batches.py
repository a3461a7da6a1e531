"""The micro-batches of a step through a model that is whole on its rank, one after the other or in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from graphmoe.model.transformer import LossOutput, Transformer
from graphmoe.plan.stages import StagePieces
from graphmoe.runtime.overlap.runner import Overlap
from graphmoe.segments import Executor

Add = Callable[[StagePieces, LossOutput], None]
"""Takes what a stage has made of a micro-batch, in the order of micro-batches for each stage."""


class MicroBatches(Protocol):
    """Runs micro-batches, token ids [micro_batch_size, seq_len + 1] each."""

    def train(self, batches: Iterable[Tensor], add: Add) -> None:
        """Forward and backward of each; gradients are of the sum over micro-batches over their number.

        No device sync where no dispatcher waits.
        """
        ...

    def evaluate(self, batches: Sequence[Tensor], add: Add) -> None:
        """The forward of each; the caller has switched gradients off."""
        ...


class OneAfterTheOther:
    """`MicroBatches` of a model that is whole; with overlap the backward of one beside the next's forward."""

    def __init__(
        self, model: Transformer, execute: Executor, num_global: int, overlap: Overlap | None = None
    ) -> None:
        """``num_global`` is how many micro-batches all ranks together have in a step."""
        self.model, self.execute, self.num_global, self.overlap = model, execute, num_global, overlap
        self.device = next(model.parameters()).device
        (self.pieces,) = model.stages

    def train(self, batches: Iterable[Tensor], add: Add) -> None:
        """As `MicroBatches.train`."""
        overlap = overlap_in_use(self.overlap, self.model)
        for tokens in batches:
            tokens = tokens.to(self.device, non_blocking=True)
            add(self.pieces, self._forward_and_backward(tokens, overlap))
        if overlap:
            overlap.finish()

    def evaluate(self, batches: Sequence[Tensor], add: Add) -> None:
        """As `MicroBatches.evaluate`."""
        for tokens in batches:
            tokens = tokens.to(self.device, non_blocking=True)
            add(self.pieces, self.model.loss(tokens[:, :-1], tokens[:, 1:], self.execute))

    def _forward_and_backward(self, tokens: Tensor, overlap: Overlap | None) -> LossOutput:
        """With overlap the backward may still have to run when this returns."""

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
    """None where the host counts what arrives: then units are no graphs, and it would wait in between."""
    dispatcher = model.dispatcher
    return overlap if dispatcher is not None and dispatcher.capacity is not None else None
