"""Stage: the part of a model that a pipeline runs, by autograd or in turns with another, unit by unit."""

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
Deferring = Callable[[PendingWeightGrads], AbstractContextManager[object]]
"""A context: what runs inside it leaves the W of its backward in the list."""
Run = Callable[[int, Tensors], tuple[Tensors, Tensor | None]]
"""Maps a micro-batch and what was received for it to what goes to the next stage, and a scalar to add to the
loss, if there is one."""


@dataclass
class _Kept:
    """A micro-batch between its forward and its backward."""

    received: Tensors
    """Leaves of autograd's graph; none where an `Overlap` has run the forward."""
    sent: list[GradientEdge | None]
    """Places in the graph, not the tensors: these are free when they have been sent. None: no gradient."""
    loss: Tensor | None
    later: PendingWeightGrads
    tape: Tape | None
    """Tape of the forward that an `Overlap` has run."""

    def roots(self, gradients: Tensors) -> tuple[list[Tensor | GradientEdge], list[Tensor | None]]:
        """Pair each root of autograd with its gradient, from the gradients of all sent tensors."""
        pairs = zip(self.sent, gradients, strict=True)
        roots: list[tuple[Tensor | GradientEdge, Tensor | None]] = [(e, g) for e, g in pairs if e is not None]
        if self.loss is not None:
            roots.append((self.loss, None))
        return [root for root, _ in roots], [gradient for _, gradient in roots]

    def started(self, tape: Tape, gradients: Tensors) -> Backward:
        """The backward of the tape, from the gradients of what was sent."""
        tape.start(*self.roots(gradients))
        return Backward(tape)


class Stage:
    """A part of the model, whose backward is one call of autograd, or units that an `Overlap` runs in turns.

    It keeps what the backward of each micro-batch needs, from F to B or W. No device sync. With an overlap
    transfers between ranks have a stream of their own, also in a forward or backward that runs alone; that
    is for schedules with whole backwards.
    """

    def __init__(
        self,
        run: Run,
        received: Specs = (),
        sent: Specs = (),
        deferring: Deferring | None = None,
        overlap: Callable[[], Overlap | None] = lambda: None,
    ) -> None:
        """``received`` and ``sent`` say what each message from the stage before and to the next one has.

        ``deferring`` is for schedules with I and W apart; without it I makes all gradients, W nothing.
        ``overlap`` is asked at each forward; a step gets the same answer throughout.
        """
        self.received, self.sent = received, sent
        self._run, self._overlap = run, overlap
        self._deferring: Deferring = deferring or nullcontext
        self._kept: dict[int, _Kept] = {}
        self._later: dict[int, PendingWeightGrads] = {}
        self._units: Sequence[OrderedUnit] = ()
        """Units of the last forward that an `Overlap` has run."""

    @property
    def kept(self) -> set[int]:
        """Return the micro-batches of which something is kept."""
        return {*self._kept, *self._later}

    def forward(self, micro_batch: int, received: Tensors, beside: Backward | None = None) -> Tensors:
        """Compute the tensors for the next stage. Without gradients (torch.no_grad) nothing is kept.

        An overlap runs the backward ``beside`` in between, all of it.
        """
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
            if sent or received:  # what is sent, here or by the backward, may have been made by a transfer
                overlap.settle()
        edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in sent]
        loss = loss if loss is not None and loss.requires_grad else None
        self._kept[micro_batch] = _Kept(leaves, edges, loss, later, tape)
        return tuple(tensor.detach() for tensor in sent)

    def backward(self, micro_batch: int, gradients: Tensors, *, weights: bool) -> Tensors:
        """Return gradients of received tensors from those of sent ones. Without ``weights`` W is left."""
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
        """Run ``forward`` and the whole ``backward`` of another micro-batch, in turns with an overlap."""
        kept = other._kept[other_micro_batch] if self._units else None
        if kept is None or kept.tape is None:
            sent = self.forward(micro_batch, received)
            return sent, other.backward(other_micro_batch, gradients, weights=True)
        del other._kept[other_micro_batch]
        sent = self.forward(micro_batch, received, kept.started(kept.tape, gradients))
        return sent, kept.tape.gradients_of_received()

    def backward_weights(self, micro_batch: int) -> None:
        """Run W, where the backward left it."""
        later = self._later.pop(micro_batch)
        while later:
            later.pop(0)()  # what W has read is free when it is over
