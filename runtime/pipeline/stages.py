"""Stage: a pipeline rank's part of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from graphmoe.ops.gradients import PendingWeightGrads
from graphmoe.runtime.overlap.runner import Backward, Overlap
from graphmoe.runtime.overlap.tape import OrderedUnit, Tape
from graphmoe.runtime.pipeline.channels import Specs

Tensors = tuple[Tensor, ...]
# context whose forwards append wgrad to the list
Deferring = Callable[[PendingWeightGrads], AbstractContextManager[object]]
Run = Callable[[int, Tensors], tuple[Tensors, Tensor | None]]
"""(micro-batch, received) -> (sent, addend of the loss, if any)."""


@dataclass
class _Kept:
    received: Tensors  # leaves of autograd's graph; none if an Overlap ran the forward
    # edges instead of tensors, which are free after the send; None: no gradient
    sent: list[GradientEdge | None]
    loss: Tensor | None
    later: PendingWeightGrads
    tape: Tape | None

    def roots(self, gradients: Tensors) -> tuple[list[Tensor | GradientEdge], list[Tensor | None]]:
        pairs = zip(self.sent, gradients, strict=True)
        roots: list[tuple[Tensor | GradientEdge, Tensor | None]] = [(e, g) for e, g in pairs if e is not None]
        if self.loss is not None:
            roots.append((self.loss, None))
        return [root for root, _ in roots], [gradient for _, gradient in roots]

    def started(self, tape: Tape, gradients: Tensors) -> Backward:
        tape.start(*self.roots(gradients))
        return Backward(tape)


class Stage:
    """A part of the model; its backward is one autograd call, or an `Overlap` interleaves its units.

    No device sync. An overlap needs schedules with whole backwards.
    """

    def __init__(
        self,
        run: Run,
        received: Specs = (),
        sent: Specs = (),
        deferring: Deferring | None = None,
        overlap: Callable[[], Overlap | None] = lambda: None,
    ) -> None:
        """``deferring``: for schedules with separate dgrad and wgrad."""
        self.received, self.sent = received, sent
        # overlap is called at each forward; its answer must not change within a step
        self._run, self._overlap = run, overlap
        self._deferring: Deferring = deferring or nullcontext
        self._kept: dict[int, _Kept] = {}
        self._later: dict[int, PendingWeightGrads] = {}
        self._units: Sequence[OrderedUnit] = ()  # of the last forward that an Overlap ran

    @property
    def kept(self) -> set[int]:
        return {*self._kept, *self._later}

    def forward(self, micro_batch: int, received: Tensors, beside: Backward | None = None) -> Tensors:
        """Return the tensors for the next stage, with all of the backward ``beside`` interleaved."""
        if not torch.is_grad_enabled():
            return self._run(micro_batch, received)[0]
        assert micro_batch not in self.kept, f"micro-batch {micro_batch} is still kept"
        overlap, later, tape = self._overlap(), PendingWeightGrads(), None
        if overlap is None:
            leaves = tuple(tensor.detach().requires_grad_() for tensor in received)
            with self._deferring(later):
                sent, loss = self._run(micro_batch, leaves)
        else:
            leaves, of_step = (), overlap
            (sent, loss), tape = overlap.record(
                lambda: self._run(micro_batch, of_step.receive(received)), beside, self._units
            )
            self._units = tape.units
            if sent or received:  # a transfer may have made what is sent, also by the backward
                overlap.settle()
        edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in sent]
        loss = loss if loss is not None and loss.requires_grad else None
        self._kept[micro_batch] = _Kept(leaves, edges, loss, later, tape)
        return tuple(tensor.detach() for tensor in sent)

    def backward(self, micro_batch: int, gradients: Tensors, *, weights: bool) -> Tensors:
        """Return gradients of received tensors. Without ``weights``, wgrad is deferred."""
        kept = self._kept.pop(micro_batch)
        if kept.tape is not None:
            overlap = self._overlap()
            assert weights and overlap is not None, "a schedule with I and W apart has no overlap"
            overlap.run_backward(kept.started(kept.tape, gradients))
            overlap.settle()
            return kept.tape.gradients_of_received()
        roots, values = kept.roots(gradients)
        if roots:
            torch.autograd.backward(roots, values)  # type: ignore[arg-type]
        self._later[micro_batch] = kept.later
        if weights:
            self.backward_weights(micro_batch)
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.received)

    def together(
        self, micro_batch: int, received: Tensors, other: Stage, other_micro_batch: int, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Run ``forward`` and another micro-batch's ``backward``, interleaved by an overlap."""
        kept = other._kept[other_micro_batch] if self._units else None
        if kept is None or kept.tape is None:
            sent = self.forward(micro_batch, received)
            return sent, other.backward(other_micro_batch, gradients, weights=True)
        del other._kept[other_micro_batch]
        sent = self.forward(micro_batch, received, kept.started(kept.tape, gradients))
        return sent, kept.tape.gradients_of_received()

    def backward_weights(self, micro_batch: int) -> None:
        """Run the wgrad that ``backward`` deferred."""
        later = self._later.pop(micro_batch)
        while later:
            later.pop(0)()  # frees what each wgrad has read
