"""Compiled units whose forward and backward replay from graphs: segments named in ``graph.scope``.

At each position in the model, each micro-batch slot has a forward graph and two backward graphs. Both run
dgrad, then wgrad: one stores the weight gradients (first micro-batch), the other adds (later ones). Tensors
that dgrad passes to wgrad are internal to the graph, so the next layer reuses their memory. Deferred wgrad
has a graph of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from graphmoe.ops import IN_USE
from graphmoe.ops.gradients import Gradient, PendingWeightGrads, have_begun, report_added
from graphmoe.ops.symm.peers import forget_order
from graphmoe.runtime.capture import Capture
from graphmoe.runtime.capture.graphs import Pool, Replay, Span, static_copy
from graphmoe.runtime.compile.code import Gradients, UnitCode, call_unit
from graphmoe.runtime.compile.weight_forms import NUM_TENSORS


class UnitCapture:
    def __init__(self, names: frozenset[str], capture: Capture) -> None:
        self.names, self.capture = names, capture
        self.slot: Hashable = None  # micro-batch slot of the current forward
        self.micro_batch = 0  # number of micro-batches that were assigned a slot
        # by slot, stream, and number of the forward of the same unit in flight; streams replay side by side
        self._pools: dict[tuple[Hashable, str, int], Pool] = {}
        self._addresses: dict[Hashable, set[int]] = {}  # of results, by slot
        self._scratch: dict[tuple[Any, ...], Tensor] = {}
        self._spans: dict[tuple[str, ...], Span] = {}
        self._planned = capture.planned
        capture.report.not_captured = dict.fromkeys(sorted(names), "the model has no such segment")

    @contextmanager
    def lane(self, name: Hashable) -> Iterator[None]:
        assert name is not None and self.slot is None, "a micro-batch has one slot"
        self.micro_batch += 1
        for (slot, *_), pool in self._pools.items():
            if slot == name:
                assert not pool.num_left, f"slot {name} is reused before its last wgrad has run"
                pool.begin()
        self.slot = name
        try:
            yield
        finally:
            self.slot = None

    def pool(self, stream: str, number: int) -> Pool:
        """Return the slot's memory pool for a stream and the ``number``-th concurrent forward of a unit."""
        key = self.slot, stream, number
        if key not in self._pools:
            addresses = self._addresses.setdefault(self.slot, set())
            self._pools[key] = Pool(self.capture.maker, key, addresses)
        return self._pools[key]

    def has_new_program(self) -> bool:
        """Return True once after new dispatchers freed all graphs; drop the state that the graphs shared."""
        if self._planned == self.capture.planned:
            return False
        self._planned = self.capture.planned
        self._pools.clear()
        self._addresses.clear()
        self._scratch.clear()
        return True

    def unit(
        self, code: UnitCode, segments: tuple[str, ...], name: str, reads: tuple[str, ...], stream: str
    ) -> UnitCode | CapturedUnit:
        if not code.graphs.num_outputs:
            self.capture.report.not_captured |= dict.fromkeys(segments, "it only returns what it reads")
            return code
        segments = tuple(dict.fromkeys(segments))
        span = self._spans.get(segments)
        if span is None:
            span = self._spans[segments] = Span(name, segments)
            self.capture.report.spans.append(span)
            for segment in segments:
                self.capture.report.not_captured.pop(segment, None)
        span.places += 1
        return CapturedUnit(code, self, span, reads, stream)

    def scratch(self, stream: str, index: int, like: Tensor) -> Tensor:
        """Return static input ``index``, shared by graphs that each replay right after filling it."""
        key = (stream, index, like.shape, like.stride(), like.dtype)
        if key not in self._scratch:
            self._scratch[key] = static_copy(like)
        return self._scratch[key]


class CapturedUnit:
    """A compile unit at one position of the model: runs its code in warm-up steps, then replays graphs."""

    def __init__(
        self, code: UnitCode, shared: UnitCapture, span: Span, reads: tuple[str, ...], stream: str
    ) -> None:
        assert code.accumulates, "autograd would keep a gradient that the next replay overwrites"
        self.graphs, self._shared, self._stream = code.graphs, shared, stream
        self._make = functools.partial(_UnitInSlot, code, shared, span, reads, stream)
        self._in_slots: dict[tuple[Hashable, int], _UnitInSlot] = {}

    def __call__(
        self,
        tensors: Sequence[Tensor],
        gradients: Sequence[Gradient],
        pending: PendingWeightGrads | None = None,
    ) -> tuple[Tensor, ...]:
        slot, micro_batch, number = self._shared.slot, self._shared.micro_batch, 0
        assert slot is not None, "units are captured, and the micro-batch has no slot"
        while (unit := self._in_slots.get((slot, number))) and unit.used_by == micro_batch:
            number += 1
        if unit is None:
            unit = self._in_slots[slot, number] = self._make(self._shared.pool(self._stream, number))
        unit.used_by = micro_batch
        return call_unit(unit, tensors, gradients, pending)


class _UnitInSlot:
    def __init__(
        self, code: UnitCode, shared: UnitCapture, span: Span, reads: tuple[str, ...], stream: str, pool: Pool
    ) -> None:
        self.graphs = code.graphs
        self.used_by: int | None = None  # micro-batch that may still read the results
        self._code, self._shared, self._span, self._reads, self._pool = code, shared, span, reads, pool
        self._scratch = functools.partial(shared.scratch, stream)
        self._exchanges = stream == "comm"  # beside another micro-batch
        # Inputs of the last warm-up call without gradient. While held, their addresses are not reused, so an
        # input found there again at capture is static.
        self._held: Sequence[Tensor] = ()
        self._forward: Replay | None = None
        # dgrad and wgrad, by whether wgrad adds to existing gradients
        self._backward: dict[bool, list[Replay]] = {False: [], True: []}
        self._inputs: list[_Inputs] = []  # dgrad alone, if wgrad is deferred

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        last = len(tensors) - NUM_TENSORS * len(self.graphs.forms)  # quantized weights keep their addresses
        first = last - len(self._reads)
        own, read, forms = tensors[:first], tensors[first:last], tensors[last:]
        if not self._shared.capture.ready:
            self._held = [tensor for tensor in read if not tensor.requires_grad]
            return self._code.forward(tensors)
        if self._exchanges:
            forget_order()
        if self._forward is None:
            self._forward = self._captured_forward(own, read, forms)
        moved = self._forward.moved(read)
        if moved is not None:
            raise RuntimeError(
                f"{self._span.unit}: {self._reads[moved]} moved after the unit was captured; leave its "
                f"segments out of graph.scope"
            )
        assert not self._pool.is_behind(self._forward), f"{self._span.unit}: two micro-batches in one slot"
        results = [result.detach() for result in self._forward(read)]
        # a replay changes no version counter, by which autograd detects overwritten saved tensors
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
            return self._code.backward(kept, of_outputs, gradients)  # a first run may compile and autotune
        if replay is None:
            scratch = [self._scratch(i, gradient) for i, gradient in enumerate(of_outputs)]

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
        if self._exchanges:
            forget_order()
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
                scratch.append(self._scratch(i, gradient))
                static.append(scratch[-1])
            else:  # another unit refills the scratch before wgrad reads it
                static.append(gradient.detach() if stays[-1] else static_copy(gradient))

        def run(static: Sequence[Tensor]) -> tuple[Tensor, ...]:
            of_inputs, handed = self._code.backward_inputs(kept, static)
            return _apart_from(scratch, [*of_inputs, *handed[: split.num_handed]])

        run_inputs = run if self._code.inputs else None
        read = [*kept, *static]
        by_weights = [read[i] for i in split.weights_read]
        dgrad = self._span, self._pool, run_inputs, static, stays
        return _Inputs(*dgrad, part="I", read_by_weights=by_weights)

    def _run_weights(self, inputs: _Inputs, handed: Sequence[Tensor], sums: Sequence[Gradient]) -> None:
        add = have_begun(sums)

        def run(static: Sequence[Tensor]) -> tuple[Tensor, ...]:
            # a replay cannot leave a reduction to a later exchange
            with IN_USE.exchange.deferring(False) if IN_USE.exchange else nullcontext():
                self._code.run_weights(handed, sums, add=add)
            return ()

        if add not in self._code.weights_run:
            run(())  # a first run may compile and autotune
        else:
            replay = self._pool.find(inputs.weights[add])
            if replay is None:
                replay = Replay(self._span, self._pool, run, part="W")
                inputs.weights[add].append(replay)
            replay()
        self._pool.num_left -= 1
        report_added(sums)


class _Inputs(Replay):
    """Graph of dgrad, and the wgrad graphs that read its results in place."""

    def __init__(self, *arguments: Any, read_by_weights: Sequence[Tensor], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.read_by_weights = read_by_weights  # beside results of dgrad
        self.weights: dict[bool, list[Replay]] = {False: [], True: []}  # by whether wgrad adds


def _apart_from(scratch: Sequence[Tensor], results: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    taken = {tensor.untyped_storage().data_ptr() for tensor in scratch}
    apart = []
    for result in results:
        assert result is not None
        # the next unit overwrites the shared scratch, so a result must not alias it
        apart.append(result.clone() if result.untyped_storage().data_ptr() in taken else result)
    return tuple(apart)
