"""Compiled units whose forward and backward replay from graphs: ``graph.scope`` with names of segments.

At each place of the model a unit has a graph for its forward F, one for I, the gradients of its inputs, and
one for W, those of its weights (another where W adds to gradients that are there already); and as many of
these as forwards wait for their backward at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from graphmoe.gradients import Gradient, have_begun
from runtime.capture import Capture, Span
from runtime.graphs import static_copy
from runtime.unit_code import UnitCode, differentiable


class UnitCapture:
    """Which segments are captured, and what their graphs share."""

    def __init__(self, names: frozenset[str], capture: Capture) -> None:
        self.names, self.capture = names, capture
        self.addresses: set[int] = set()
        """Of results of graphs: they stay where they are."""
        self._spans: dict[tuple[str, ...], Span] = {}
        capture.report.not_captured = dict.fromkeys(sorted(names), "the model has no such segment")

    def unit(
        self, code: UnitCode, segments: tuple[str, ...], name: str, reads: tuple[str, ...]
    ) -> UnitCode | CapturedUnit:
        """What runs the unit at one more place."""
        if not code.graphs.num_outputs:
            self.capture.report.not_captured |= dict.fromkeys(segments, "it only hands on what it reads")
            return code
        segments = tuple(dict.fromkeys(segments))
        span = self._spans.get(segments)
        if span is None:
            span = self._spans[segments] = Span(name, segments)
            self.capture.report.spans.append(span)
            for segment in segments:
                self.capture.report.not_captured.pop(segment, None)
        span.places += 1
        return CapturedUnit(code, self, span, reads)


class CapturedUnit:
    """A training unit at one place: its code while the capture warms up, then its graphs."""

    def __init__(self, code: UnitCode, shared: UnitCapture, span: Span, reads: tuple[str, ...]) -> None:
        self._make_slot = functools.partial(_Slot, code, shared, span, reads)
        self._graphs, self._capture = code.graphs, shared.capture
        self._slots: list[_Slot] = []
        self._step = 0

    def __call__(self, tensors: Sequence[Tensor], gradients: Sequence[Gradient]) -> tuple[Tensor, ...]:
        """As ``UnitCode``."""
        if self._step != self._capture.steps:
            self._step = self._capture.steps
            for earlier in self._slots:
                earlier.busy = False  # a forward of the last step that had no backward
        free = [slot for slot in self._slots if not slot.busy]
        slot = free[0] if free else self._make_slot()
        if not free:
            self._slots.append(slot)
        if self._graphs.backward is None:
            results = slot.forward(tensors)[0]
            slot.busy = False
        else:
            results = differentiable(slot, tensors, gradients)
        return self._graphs.views(tensors, results) if self._graphs.views else results


class _Slot:
    """Graphs and static buffers of a unit for one forward in flight."""

    def __init__(self, code: UnitCode, shared: UnitCapture, span: Span, reads: tuple[str, ...]) -> None:
        assert code.delivers, "autograd would keep a gradient that the next replay overwrites"
        self.graphs, self.busy = code.graphs, False
        self._code, self._shared, self._span, self._reads = code, shared, span, reads
        self._held: Sequence[Tensor] = ()
        """What it read last without a gradient. While it is held, its memory is given to nobody else."""
        self._forward: _Replay | None = None
        self._inputs: _Replay | None = None
        self._weights: dict[bool, _Replay] = {}
        """W that stores (False), and W that adds to gradients that are there already."""

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """As ``UnitCode.forward``."""
        self.busy = True
        own, read = tensors[: -len(self._reads)], tensors[-len(self._reads) :]
        if not self._shared.capture.ready:
            self._held = [tensor for tensor in read if not tensor.requires_grad]
            return self._code.forward(tensors)
        if self._forward is None:
            lasting = {tensor.data_ptr() for tensor in self._held}
            self._held = ()

            def run(static: Sequence[Tensor]) -> tuple[Tensor, ...]:
                return tuple(self._code.run_forward([*own, *static]))

            self._forward = self._replay(run, read, self._reads, lasting)
        results = [result.detach() for result in self._forward(read)]
        return self._code.outputs_and_kept([*own, *self._forward.static], results)

    def backward(
        self, kept: Sequence[Tensor], of_outputs: Sequence[Tensor], gradients: Sequence[Gradient]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """As ``UnitCode.backward``."""
        self.busy = False
        if self._forward is None:
            return self._code.backward(kept, of_outputs, gradients)
        results: tuple[Tensor, ...] = ()
        if self._code.computes_inputs:
            results = self._replay_inputs(kept, of_outputs)
        count = len(self.graphs.input_gradients)
        sums = [gradients[i] for i in self.graphs.weight_gradients]
        if sums and results:
            self._replay_weights(lambda _: results[count:], (), sums)
        elif sums:  # W alone: it reads what F kept and the gradients of the outputs
            self._replay_weights(lambda static: self._code.backward_inputs(kept, static)[1], of_outputs, sums)
        return [result.detach() for result in results[:count]], [None] * len(sums)

    def _replay_inputs(self, kept: Sequence[Tensor], of_outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """I: gradients of the inputs, then what W reads."""
        if self._inputs is None:

            def run(static: Sequence[Tensor]) -> tuple[Tensor, ...]:
                of_inputs, handed = self._code.backward_inputs(kept, static)
                return tuple(tensor for tensor in (*of_inputs, *handed) if tensor is not None)

            self._inputs = self._replay(run, of_outputs, _gradient_names(of_outputs), set())
        return self._inputs(of_outputs)

    def _replay_weights(
        self,
        handed: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        given: Sequence[Tensor],
        sums: Sequence[Gradient],
    ) -> None:
        """W, which reads ``handed(given)``."""
        add = have_begun(sums)
        if add not in self._weights:

            def run(static: Sequence[Tensor]) -> tuple[Tensor, ...]:
                self._code.run_weights(handed(static), sums, add=add)
                return ()

            self._weights[add] = self._replay(run, given, _gradient_names(given), set())
        self._weights[add](given)
        for gradient in sums:
            gradient.begun = True

    def _replay(
        self,
        run: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
        given: Sequence[Tensor],
        names: Sequence[str],
        lasting: set[int],
    ) -> _Replay:
        with self._span.measured():
            return _Replay(self._span.unit, self._shared, run, given, names, lasting)


def _gradient_names(of_outputs: Sequence[Tensor]) -> list[str]:
    return [f"the gradient of output {i}" for i in range(len(of_outputs))]


class _Replay:
    """A graph of a function of tensors, and the static tensors that it reads.

    What stays where it is anyway, results of other graphs and tensors that last, is read there; anything
    else is copied.
    """

    def __init__(
        self,
        unit: str,
        shared: UnitCapture,
        run: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
        given: Sequence[Tensor],
        names: Sequence[str],
        lasting: set[int],
    ) -> None:
        self._unit, self._shared, self._names = unit, shared, names
        stays = shared.addresses | lasting
        self._stays = [tensor.data_ptr() in stays for tensor in given]
        self.static = [
            tensor.detach() if there else static_copy(tensor)
            for tensor, there in zip(given, self._stays, strict=True)
        ]
        self._graph = shared.capture.maker.make(lambda: run(self.static))
        self._is_new = True

    def __call__(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for name, there, static, tensor in zip(self._names, self._stays, self.static, given, strict=True):
            if static.data_ptr() == tensor.data_ptr():
                continue
            if there:
                raise RuntimeError(
                    f"{self._unit}: {name} lies at another address than when the unit was captured; "
                    f"leave its segments out of graph.scope"
                )
            static.copy_(tensor.detach())
        results = self._graph.replay()
        if self._is_new:
            self._shared.addresses.update(result.data_ptr() for result in results)
            self._is_new = False
        return results
