"""OverlappedStage: a stage whose forwards and backwards of two micro-batches take turns, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphmoe.runtime.overlap.order import OrderedUnit
from graphmoe.runtime.overlap.runner import Backward, Overlap
from graphmoe.runtime.overlap.tape import Tape
from graphmoe.runtime.pipeline.channels import Specs
from graphmoe.runtime.pipeline.stages import AutogradStage, BackwardOf, Deferring, Roots, Run, Tensors


@dataclass
class _Taped:
    """A forward that an `Overlap` has run."""

    tape: Tape
    roots: Roots

    def started(self, gradients: Tensors) -> Backward:
        """Its backward, from the gradients of what was sent."""
        self.tape.start(*self.roots.paired(gradients))
        return Backward(self.tape)


class OverlappedStage(AutogradStage):
    """An `AutogradStage` that runs by an `Overlap`, where there is one for the step.

    Transfers between ranks have a stream of their own, also in a forward or backward that runs alone. For
    schedules with whole backwards.
    """

    def __init__(
        self,
        run: Run,
        received: Specs,
        sent: Specs,
        deferring: Deferring | None,
        overlap: Callable[[], Overlap | None],
    ) -> None:
        """``overlap`` is asked at each forward; a step gets the same answer throughout."""
        super().__init__(run, received, sent, deferring)
        self._overlap = overlap
        self._taped: dict[int, _Taped] = {}
        self._units: Sequence[OrderedUnit] = ()
        """Units of the last forward."""

    @property
    def kept(self) -> set[int]:
        return {*super().kept, *self._taped}

    def forward(self, micro_batch: int, received: Tensors) -> Tensors:
        overlap = self._overlap() if torch.is_grad_enabled() else None
        if overlap is None:
            return super().forward(micro_batch, received)
        return self._record(overlap, micro_batch, received)

    def backward(self, micro_batch: int, gradients: Tensors, *, weights: bool) -> Tensors:
        taped = self._taped.pop(micro_batch, None)
        if taped is None:
            return super().backward(micro_batch, gradients, weights=weights)
        assert weights, "a schedule with I and W apart has no forward beside its backwards"
        overlap = self._overlap()
        assert overlap is not None
        overlap.run_backward(taped.started(gradients))
        overlap.settle()
        return taped.tape.gradients_of_received()

    def together(
        self, micro_batch: int, received: Tensors, backward: BackwardOf, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Run both in turns. The other stage is an `OverlappedStage` too."""
        overlap, other = self._overlap(), backward.stage
        assert isinstance(other, OverlappedStage)
        if overlap is None or not self._units:
            return super().together(micro_batch, received, backward, gradients)
        taped = other._taped.pop(backward.micro_batch)
        sent = self._record(overlap, micro_batch, received, taped.started(gradients))
        return sent, taped.tape.gradients_of_received()

    def _record(
        self, overlap: Overlap, micro_batch: int, received: Tensors, beside: Backward | None = None
    ) -> Tensors:
        assert micro_batch not in self.kept, f"micro-batch {micro_batch} is still kept"

        def run() -> tuple[Tensors, Tensor | None]:
            return self._run(micro_batch, overlap.receive(received))

        (sent, loss), tape = overlap.record(run, beside, self._units)
        overlap.settle()  # what is sent may have been made by a transfer
        self._units = tape.units
        self._taped[micro_batch] = _Taped(tape, Roots.of(sent, loss))
        return tuple(tensor.detach() for tensor in sent)
