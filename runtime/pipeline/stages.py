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
class Roots:
    """Roots from which the backward of what a `Run` has returned begins."""

    sent: list[GradientEdge | None]
    """Places in the graph, not the tensors: these are free when they have been sent. None: no gradient."""
    loss: Tensor | None

    @classmethod
    def of(cls, sent: Tensors, loss: Tensor | None) -> Roots:
        edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in sent]
        return cls(edges, loss if loss is not None and loss.requires_grad else None)

    def paired(self, gradients: Tensors) -> tuple[list[Tensor | GradientEdge], list[Tensor | None]]:
        """Pair each root of autograd with its gradient, from the gradients of all sent tensors."""
        pairs = zip(self.sent, gradients, strict=True)
        roots: list[tuple[Tensor | GradientEdge, Tensor | None]] = [(e, g) for e, g in pairs if e is not None]
        if self.loss is not None:
            roots.append((self.loss, None))
        return [root for root, _ in roots], [gradient for _, gradient in roots]


@dataclass
class _Kept:
    received: Tensors
    """Leaves of autograd's graph."""
    roots: Roots
    later: PendingWeightGrads


class Stage:
    """A part of the model, whose backward is one call of autograd. No device sync.

    It keeps what the backward of each micro-batch needs, from F to B or W.
    """

    def __init__(
        self, run: Run, received: Specs = (), sent: Specs = (), deferring: Deferring | None = None
    ) -> None:
        """``received`` and ``sent`` say what each message from the stage before and to the next one has.

        ``deferring`` is for schedules with I and W apart; without it I makes all gradients, W nothing.
        """
        self.received, self.sent = received, sent
        self._run = run
        self._deferring: Deferring = deferring or nullcontext
        self._kept: dict[int, _Kept] = {}
        self._later: dict[int, PendingWeightGrads] = {}

    @property
    def kept(self) -> set[int]:
        """Return the micro-batches of which something is kept."""
        return {*self._kept, *self._later}

    def forward(self, micro_batch: int, received: Tensors) -> Tensors:
        """Compute the tensors for the next stage. Without gradients (torch.no_grad) nothing is kept."""
        if not torch.is_grad_enabled():
            return self._run(micro_batch, received)[0]
        assert micro_batch not in self.kept, f"micro-batch {micro_batch} is still kept"
        leaves = tuple(tensor.detach().requires_grad_() for tensor in received)
        later: PendingWeightGrads = []
        with self._deferring(later):
            sent, loss = self._run(micro_batch, leaves)
        self._kept[micro_batch] = _Kept(leaves, Roots.of(sent, loss), later)
        return tuple(tensor.detach() for tensor in sent)

    def backward(self, micro_batch: int, gradients: Tensors, *, weights: bool) -> Tensors:
        """Return gradients of received tensors from those of sent ones. Without ``weights`` W is left."""
        kept = self._kept.pop(micro_batch)
        roots, values = kept.roots.paired(gradients)
        if roots:
            torch.autograd.backward(roots, values)  # type: ignore[arg-type]
        self._later[micro_batch] = kept.later
        if weights:
            self.backward_weights(micro_batch)
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.received)

    def together(
        self, micro_batch: int, received: Tensors, other: Stage, other_micro_batch: int, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Run ``forward``, then the whole ``backward`` of another micro-batch; returns both results."""
        sent = self.forward(micro_batch, received)
        return sent, other.backward(other_micro_batch, gradients, weights=True)

    def backward_weights(self, micro_batch: int) -> None:
        """Run W, where the backward left it."""
        later = self._later.pop(micro_batch)
        while later:
            later.pop(0)()  # what W has read is free when it is over


@dataclass
class _Taped:
    """A forward that an `Overlap` has run."""

    tape: Tape
    roots: Roots

    def started(self, gradients: Tensors) -> Backward:
        """Its backward, from the gradients of what was sent."""
        self.tape.start(*self.roots.paired(gradients))
        return Backward(self.tape)


class OverlappedStage(Stage):
    """A `Stage` that runs by an `Overlap`, where there is one for the step.

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
        self, micro_batch: int, received: Tensors, other: Stage, other_micro_batch: int, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Run both in turns. The other stage is an `OverlappedStage` too."""
        overlap = self._overlap()
        assert isinstance(other, OverlappedStage)
        if overlap is None or not self._units:
            return super().together(micro_batch, received, other, other_micro_batch, gradients)
        taped = other._taped.pop(other_micro_batch)
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
