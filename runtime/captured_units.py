"""Compiled units whose forward and backward replay from graphs: ``graph.scope`` with names of segments.

At each place of the model a unit has a graph for its forward and one for its backward, I then W (another for
later micro-batches, where W adds to gradients that are there already); and as many of these as forwards wait
for their backward at a time. What I hands to W is inside the graph, so its memory serves the next layer too.

The graphs of one backward are made in the order in which they replay, as their pool demands. So units without
weights have one more for later micro-batches too, and forwards in flight beside each other have pools of
their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphmoe.gradients import Gradient, delivered, have_begun
from runtime.capture import Capture, Span
from runtime.graphs import static_copy
from runtime.unit_code import Later, UnitCode, differentiable


class UnitCapture:
    """Which segments are captured, and what their graphs share."""

    def __init__(self, names: frozenset[str], capture: Capture) -> None:
        self.names, self.capture = names, capture
        self.addresses: set[int] = set()
        """Of results of graphs: they stay where they are."""
        self._scratch: dict[tuple[Any, ...], Tensor] = {}
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

    def scratch(self, index: int, like: Tensor) -> Tensor:
        """A static tensor for the ``index``-th input of a graph that is replayed as soon as it is filled."""
        key = (index, like.shape, like.stride(), like.dtype)
        if key not in self._scratch:
            self._scratch[key] = static_copy(like)
        return self._scratch[key]


class CapturedUnit:
    """A training unit at one place: its code while the capture warms up, then its graphs."""

    def __init__(self, code: UnitCode, shared: UnitCapture, span: Span, reads: tuple[str, ...]) -> None:
        self._make_lane = functools.partial(_Lane, code, shared, span, reads)
        self.graphs, self._capture = code.graphs, shared.capture
        self._lanes: list[_Lane] = []
        self._step = 0
        self._calls = 0
        """In this step."""

    def __call__(
        self, tensors: Sequence[Tensor], gradients: Sequence[Gradient], later: Later | None = None
    ) -> tuple[Tensor, ...]:
        """As ``UnitCode``, but that W comes with I."""
        if self._step != self._capture.steps:
            self._step, self._calls = self._capture.steps, 0
            for earlier in self._lanes:
                earlier.busy = False  # a forward of the last step that had no backward
        free = [lane for lane in self._lanes if not lane.busy]
        lane = free[0] if free else self._make_lane(len(self._lanes))
        if not free:
            self._lanes.append(lane)
        lane.is_later, self._calls = self._calls > 0, self._calls + 1
        if self.graphs.backward is None:
            results = lane.forward(tensors)[0]
            lane.busy = False
        else:
            results = differentiable(lane, tensors, gradients)
        return self.graphs.views(tensors, results) if self.graphs.views else results


class _Lane:
    """Graphs and static buffers of a unit for one forward in flight."""

    def __init__(
        self, code: UnitCode, shared: UnitCapture, span: Span, reads: tuple[str, ...], number: int
    ) -> None:
        assert code.delivers, "autograd would keep a gradient that the next replay overwrites"
        self.graphs, self.busy, self.is_later = code.graphs, False, False
        self._number = number
        self._code, self._shared, self._span, self._reads = code, shared, span, reads
        self._held: Sequence[Tensor] = ()
        """What it read last without a gradient. While it is held, its memory is given to nobody else."""
        self._forward: _Replay | None = None
        self._backward: dict[tuple[bool, bool], _Replay] = {}
        """By whether it is of a later micro-batch, and whether W adds to gradients that are there already."""

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """As ``UnitCode.forward``."""
        self.busy = True
        own, read = tensors[: -len(self._reads)], tensors[-len(self._reads) :]
        if not self._shared.capture.ready:
            self._held = [tensor for tensor in read if not tensor.requires_grad]
            return self._code.forward(tensors)
        if self._forward is None:
            lasting = self._shared.addresses | {tensor.data_ptr() for tensor in self._held}
            stays = [tensor.data_ptr() in lasting for tensor in read]
            pairs = zip(read, stays, strict=True)
            static = [tensor.detach() if there else static_copy(tensor) for tensor, there in pairs]
            self._held = ()

            def run(static: Sequence[Tensor]) -> tuple[Tensor, ...]:
                return tuple(self._code.run_forward([*own, *static]))

            self._forward = self._replay(run, static, stays, self._reads)
        results = [result.detach() for result in self._forward(read)]
        # A replay leaves no trace in version counters; so autograd sees that what a forward kept is gone.
        torch.autograd.graph.increment_version(results)
        return self._code.outputs_and_kept([*own, *self._forward.static], results)

    def backward(
        self, kept: Sequence[Tensor], of_outputs: Sequence[Tensor], gradients: Sequence[Gradient]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """As ``UnitCode.backward``."""
        self.busy = False
        sums = [gradients[i] for i in self.graphs.weight_gradients]
        add = have_begun(sums)
        if self._forward is None or (sums and add not in self._code.weights_run):
            return self._code.backward(kept, of_outputs, gradients)  # a first run may compile and measure
        key = self.is_later, add
        if key not in self._backward:

            def run(static: Sequence[Tensor]) -> tuple[Tensor, ...]:
                of_inputs, handed = self._code.backward_inputs(kept, static)
                self._code.run_weights(handed, sums, add=add)
                assert all(gradient is not None for gradient in of_inputs)
                return tuple(of_inputs)  # type: ignore[arg-type]

            static = [self._shared.scratch(i, gradient) for i, gradient in enumerate(of_outputs)]
            self._backward[key] = self._replay(run, static, [False] * len(static), ())
        results = self._backward[key](of_outputs)
        delivered(sums)
        return [result.detach() for result in results], [None] * len(sums)

    def _replay(
        self,
        run: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
        static: Sequence[Tensor],
        stays: Sequence[bool],
        names: Sequence[str],
    ) -> _Replay:
        return _Replay(self._span, self._shared, run, static, stays, names, self._number)


class _Replay:
    """A graph of a function of static tensors. Those that ``stays`` says must be what it is given."""

    def __init__(
        self,
        span: Span,
        shared: UnitCapture,
        run: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
        static: Sequence[Tensor],
        stays: Sequence[bool],
        names: Sequence[str],
        lane: int,
    ) -> None:
        self._unit, self._shared = span.unit, shared
        self.static, self._stays, self._names = static, stays, names
        self._graph = span.make(shared.capture.maker, lambda: run(self.static), pool=lane)
        self._is_new = True

    def __call__(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for i, (static, tensor) in enumerate(zip(self.static, given, strict=True)):
            if static.data_ptr() == tensor.data_ptr():
                continue
            if self._stays[i]:
                raise RuntimeError(
                    f"{self._unit}: {self._names[i]} lies at another address than when the unit was "
                    f"captured; leave its segments out of graph.scope"
                )
            static.copy_(tensor.detach())
        results = self._graph.replay()
        if self._is_new:
            self._shared.addresses.update(result.data_ptr() for result in results)
            self._is_new = False
        return results
