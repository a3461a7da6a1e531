"""Compiled units whose forward and backward replay from graphs: ``graph.scope`` with names of segments.

At each place of the model a unit has a graph for its forward and one for its backward, I then W (another for
later micro-batches, where W adds to gradients that are there already). What I hands to W is inside the graph,
so its memory serves the next layer too. Where W is left for later, I and W are graphs of their own: what I
hands over stays until W reads it where it lies.

All of this once for each lane. A lane has the graphs and buffers of one micro-batch in flight, in all units:
whoever runs micro-batches says which is on which lane. A unit that runs twice in a micro-batch has graphs for
each of these forwards.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphmoe.ops.gradients import Gradient, PendingWeightGrads, have_begun, report_added
from graphmoe.runtime.capture.capture import Capture, Span
from graphmoe.runtime.capture.graphs import static_copy
from graphmoe.runtime.capture.replays import Pool, Replay
from graphmoe.runtime.compile.code import Gradients, UnitCode, UnitFunction
from graphmoe.runtime.compile.weight_forms import NUM_TENSORS


class UnitCapture:
    """Names of the captured segments, and state that their graphs share."""

    def __init__(self, names: frozenset[str], capture: Capture) -> None:
        self.names, self.capture = names, capture
        self.lane_name: Hashable = None
        """The lane that units run on now."""
        self.micro_batch = 0
        """Number of the micro-batch, of all that have been given a lane."""
        self._pools: dict[Hashable, list[Pool]] = {}
        """By lane: one for each time that a unit is in flight there."""
        self._scratch: dict[tuple[Any, ...], Tensor] = {}
        self._spans: dict[tuple[str, ...], Span] = {}
        self._planned = capture.planned
        capture.report.not_captured = dict.fromkeys(sorted(names), "the model has no such segment")

    @contextmanager
    def lane(self, name: Hashable) -> Iterator[None]:
        """As ``CompiledSegments.lane``."""
        assert name is not None and self.lane_name is None, "a micro-batch has one lane"
        self.micro_batch += 1
        for pool in self._pools.get(name, ()):
            assert not pool.num_left, f"lane {name} is taken before its last weight gradients are made"
            pool.begin()
        self.lane_name = name
        try:
            yield
        finally:
            self.lane_name = None

    def pool(self, number: int) -> Pool:
        """The memory of units that run for the ``number``-th time at once on the lane."""
        pools = self._pools.setdefault(self.lane_name, [])
        while len(pools) <= number:
            addresses = pools[0].addresses if pools else set[int]()
            pools.append(Pool(self.capture.maker, (self.lane_name, len(pools)), addresses))
        return pools[number]

    def has_new_program(self) -> bool:
        """Return True once after the graphs so far have ended for good; forgets all that these shared."""
        if self._planned == self.capture.planned:
            return False
        self._planned = self.capture.planned
        self._pools.clear()
        self._scratch.clear()
        return True

    def unit(
        self, code: UnitCode, segments: tuple[str, ...], name: str, reads: tuple[str, ...]
    ) -> UnitCode | CapturedUnit:
        """Return the code that runs the unit at one more place."""
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
        assert code.accumulates, "autograd would keep a gradient that the next replay overwrites"
        self.graphs, self._shared = code.graphs, shared
        self._make = functools.partial(_UnitOnLane, code, shared, span, reads)
        self._lanes: dict[tuple[Hashable, int], _UnitOnLane] = {}

    def __call__(
        self,
        tensors: Sequence[Tensor],
        gradients: Sequence[Gradient],
        pending: PendingWeightGrads | None = None,
    ) -> tuple[Tensor, ...]:
        """As ``UnitCode``."""
        assert self._shared.lane_name is not None, "units are captured, and the micro-batch has no lane"
        lane = self._free()
        lane.taken_by = self._shared.micro_batch
        if self.graphs.backward is None:
            results = lane.forward(tensors)[0]
        else:
            run = lane.forward, lane.backward
            results = UnitFunction.apply(self.graphs, *run, gradients, pending, *tensors)
        return self.graphs.views(tensors, results) if self.graphs.views else results

    def _free(self) -> _UnitOnLane:
        name, number = self._shared.lane_name, 0
        while (lane := self._lanes.get((name, number))) and lane.taken_by == self._shared.micro_batch:
            number += 1
        if lane is None:
            lane = self._lanes[name, number] = self._make(self._shared.pool(number))
        return lane


class _UnitOnLane:
    """Graphs and static buffers of a unit for one forward in flight."""

    def __init__(
        self,
        code: UnitCode,
        shared: UnitCapture,
        span: Span,
        reads: tuple[str, ...],
        pool: Pool,
    ) -> None:
        self.graphs = code.graphs
        self.taken_by: int | None = None
        """The micro-batch that may still read the results."""
        self._code, self._shared, self._span, self._reads, self._pool = code, shared, span, reads, pool
        self._held: Sequence[Tensor] = ()
        """Tensors that it read last without a gradient. While they are held, their memory is given to nobody
        else."""
        self._forward: Replay | None = None
        self._backward: dict[bool, list[Replay]] = {False: [], True: []}
        """I then W, by whether W adds to gradients that are there already."""
        self._inputs: list[_Inputs] = []
        """I where W is left for later."""

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """As ``UnitCode.forward``."""
        last = len(tensors) - NUM_TENSORS * len(self.graphs.forms)  # which stay where they are
        first = last - len(self._reads)
        own, read, forms = tensors[:first], tensors[first:last], tensors[last:]
        if not self._shared.capture.ready:
            self._held = [tensor for tensor in read if not tensor.requires_grad]
            return self._code.forward(tensors)
        if self._forward is None:
            self._forward = self._captured_forward(own, read, forms)
        moved = self._forward.moved(read)
        if moved is not None:
            raise RuntimeError(
                f"{self._span.unit}: {self._reads[moved]} lies at another address than when the unit was "
                f"captured; leave its segments out of graph.scope"
            )
        assert not self._pool.is_behind(self._forward), (
            f"{self._span.unit}: two micro-batches are on one lane"
        )
        results = [result.detach() for result in self._forward(read)]
        # A replay leaves no trace in version counters; so autograd sees that what a forward kept is gone.
        torch.autograd.graph.increment_version(results)
        return self._code.outputs_and_kept([*own, *self._forward.static, *forms], results)

    def _captured_forward(
        self, own: Sequence[Tensor], read: Sequence[Tensor], forms: Sequence[Tensor]
    ) -> Replay:
        lasting = self._pool.addresses | {tensor.data_ptr() for tensor in self._held}
        stays = [tensor.data_ptr() in lasting for tensor in read]
        pairs = zip(read, stays, strict=True)
        static = [tensor.detach() if there else static_copy(tensor) for tensor, there in pairs]
        self._held = ()

        def run(static: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(self._code.run_forward([*own, *static, *forms]))

        return Replay(self._span, self._pool, run, static, stays, part="F")

    def backward(
        self,
        kept: Sequence[Tensor],
        of_outputs: Sequence[Tensor],
        gradients: Sequence[Gradient],
        pending: PendingWeightGrads | None = None,
    ) -> Gradients:
        """As ``UnitCode.backward``."""
        if self._forward is None:
            return self._code.backward(kept, of_outputs, gradients, pending)
        if pending is None:
            return self._whole_backward(kept, of_outputs, gradients)
        return self._inputs_alone(kept, of_outputs, gradients, pending)

    def _whole_backward(
        self, kept: Sequence[Tensor], of_outputs: Sequence[Tensor], gradients: Sequence[Gradient]
    ) -> Gradients:
        sums = [gradients[i] for i in self.graphs.weight_gradients]
        add = have_begun(sums)
        replay = self._pool.find(self._backward[add], of_outputs)
        is_first = bool(sums) and add not in self._code.weights_run
        if is_first or (replay is None and self._pool.has_gap):
            self._pool.has_gap = True
            return self._code.backward(kept, of_outputs, gradients)  # a first run may compile and measure
        if replay is None:
            scratch = [self._shared.scratch(i, gradient) for i, gradient in enumerate(of_outputs)]

            def run(static: Sequence[Tensor]) -> tuple[Tensor, ...]:
                of_inputs, handed = self._code.backward_inputs(kept, static)
                self._code.run_weights(handed, sums, add=add)
                return _apart_from(scratch, of_inputs)

            replay = Replay(self._span, self._pool, run, scratch, [False] * len(scratch), part="B")
            self._backward[add].append(replay)
        results = replay(of_outputs)
        report_added(sums)
        return [result.detach() for result in results], [None] * len(sums)

    def _inputs_alone(
        self,
        kept: Sequence[Tensor],
        of_outputs: Sequence[Tensor],
        gradients: Sequence[Gradient],
        pending: PendingWeightGrads,
    ) -> Gradients:
        inputs = self._pool.find(self._inputs, of_outputs)
        if inputs is None:
            inputs = self._captured_inputs(kept, of_outputs)
            self._inputs.append(inputs)
        results, count = inputs(of_outputs), len(self.graphs.input_gradients)
        wanted = self.graphs.weight_gradients
        if wanted:
            self._pool.num_left += 1
            handed = [*results[count:], *inputs.read_by_weights]
            sums = [gradients[i] for i in wanted]
            pending.append(functools.partial(self._run_weights, inputs, handed, sums))
        return [result.detach() for result in results[:count]], [None] * len(wanted)

    def _captured_inputs(self, kept: Sequence[Tensor], of_outputs: Sequence[Tensor]) -> _Inputs:
        split = self.graphs.backward
        assert split is not None
        static, stays, scratch = [], [], []
        for i, gradient in enumerate(of_outputs):
            is_read_later = len(kept) + i in split.weights_read
            stays.append(is_read_later and gradient.data_ptr() in self._pool.addresses)
            if not is_read_later:
                scratch.append(self._shared.scratch(i, gradient))
                static.append(scratch[-1])
            else:  # another unit fills the scratch before W reads it
                static.append(gradient.detach() if stays[-1] else static_copy(gradient))

        def run(static: Sequence[Tensor]) -> tuple[Tensor, ...]:
            of_inputs, handed = self._code.backward_inputs(kept, static)
            return _apart_from(scratch, [*of_inputs, *handed[: split.num_handed]])

        run_inputs = run if self._code.has_inputs else None
        inputs = _Inputs(self._span, self._pool, run_inputs, static, stays, part="I")
        read = [*kept, *static]
        inputs.read_by_weights = [read[i] for i in split.weights_read]
        return inputs

    def _run_weights(self, inputs: _Inputs, handed: Sequence[Tensor], sums: Sequence[Gradient]) -> None:
        add = have_begun(sums)

        def run(static: Sequence[Tensor]) -> tuple[Tensor, ...]:
            self._code.run_weights(handed, sums, add=add)
            return ()

        if add not in self._code.weights_run:
            run(())  # a first run may compile and measure
        else:
            replay = self._pool.find(inputs.weights[add])
            if replay is None:
                replay = Replay(self._span, self._pool, run, part="W")
                inputs.weights[add].append(replay)
            replay()
        self._pool.num_left -= 1
        report_added(sums)


class _Inputs(Replay):
    """I, and the graphs of W that read what it hands over where it lies."""

    read_by_weights: Sequence[Tensor] = ()
    """Tensors that W reads beside results of I."""

    @functools.cached_property
    def weights(self) -> dict[bool, list[Replay]]:
        """W, by whether it adds to gradients that are there already."""
        return {False: [], True: []}


def _apart_from(scratch: Sequence[Tensor], results: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    taken = {tensor.untyped_storage().data_ptr() for tensor in scratch}
    apart = []
    for result in results:
        assert result is not None
        apart.append(result.clone() if result.untyped_storage().data_ptr() in taken else result)
    return tuple(apart)
