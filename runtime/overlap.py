"""Overlap of a micro-batch's backward with the next forward: they take turns, which end before a wait."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from graphmoe.ops import IN_USE
from graphmoe.ops.gradients import PendingWeightGrads
from graphmoe.ops.symm.peers import beside_products_on
from graphmoe.runtime.compile.units import Unit

RECEIVED = -1  # unit number of a tensor that no unit computed
Result = TypeVar("Result")
Direction = Literal["forward", "backward"]
Call = Callable[[Sequence[Tensor], PendingWeightGrads], Sequence[Tensor]]


class Overlap:
    """Interleaves the units of two micro-batches; transfers run on their own stream. No device sync.

    Call ``settle`` before results are read. Weight gradients are summed in micro-batch order.
    """

    def __init__(self, device: torch.device, *, defers: bool = True) -> None:
        """``defers``: exchanges of rows reduce gradients of replicas too, which replayed ones cannot."""
        self._defers = defers
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._transfers = TransferStream(device)
        self._tape: Tape | None = None
        self._beside: Backward | None = None  # interleaved with the running forward, or alone
        self._queue: deque[tuple[Direction, int]] = deque()  # units still to run

    @property
    def runs(self) -> bool:
        return self._tape is not None

    def record(
        self, run: Callable[[], Result], beside: Backward | None = None, like: Sequence[OrderedUnit] = ()
    ) -> tuple[Result, Tape]:
        """Run a forward interleaved with the backward ``beside``; ``like``: units of an earlier forward."""
        self._tape = tape = Tape(self._anchor)
        self._beside = beside
        if beside is not None:
            self._queue.extend(interleaved(turns(like, range(len(like))), beside.turns))
        result = run()
        self._run_backward()
        assert not self._queue, f"the forward has ended before its {self._queue[0]}"
        self._tape = self._beside = None
        return result, tape

    def receive(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        assert self._tape is not None
        return self._tape.receive(tensors)

    def run_backward(self, backward: Backward) -> None:
        self._beside = backward
        self._queue.extend(interleaved((), backward.turns))
        self._run_backward()
        self._beside = None

    def settle(self) -> None:
        """Make the current stream wait for transfers and for replicas' gradients."""
        self._transfers.wait_for_all()
        if IN_USE.exchange:
            IN_USE.exchange.settle()

    def run_unit(self, unit: Unit, read: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
        tape = self._tape
        assert tape is not None, "a unit that trains is run outside a micro-batch"
        number = len(tape.units)
        self._run_backward()
        if self._queue:
            turn = self._queue.popleft()
            assert turn == ("forward", number), turn
        self._transfers.wait((tape, "forward", source) for source in tape.sources(read))

        def run() -> tuple[Tensor, ...]:
            return tape.run(unit.name, transfers, read, call)

        transfers = unit.segments[0].stream == "comm"
        return self._transfers.run((tape, "forward", number), run, read) if transfers else run()

    def _run_backward(self) -> None:
        left: list[PendingWeightGrads] = []
        while self._queue and self._queue[0][0] == "backward":
            _, number = self._queue.popleft()
            assert self._beside is not None
            left.append(self._back(self._beside, number))
            if number not in self._beside.ends:
                continue
            later = self._beside.later
            with IN_USE.exchange.deferring(self._defers) if IN_USE.exchange else nullcontext():
                for weights in left:  # wgrad overlaps the transfers in flight
                    # pop: a unit that holds its wgrad's inputs is a cycle that leaks
                    while weights:
                        run = weights.pop(0)
                        run() if later is None else later.append(run)
            left.clear()

    def _back(self, backward: Backward, number: int) -> PendingWeightGrads:
        tape, unit = backward.tape, backward.units[number]
        key: Hashable = (tape, "backward", number)
        self._transfers.wait((tape, "backward", source) for source in unit.needs)
        place = len(backward.units) - 1 - number
        if not unit.transfers:
            return tape.back(place)
        reads = tape.what_back_reads(place)
        return self._transfers.run(key, lambda: tape.back(place, keep=True), reads)


class Backward:
    """Backward of a recorded forward, cut into turns."""

    def __init__(self, tape: Tape, later: PendingWeightGrads | None = None) -> None:
        """``later`` receives wgrad; if None, it runs beside the transfers of its turn."""
        self.tape, self.later, self.units = tape, later, backward_of(tape.units)
        self.turns = turns(self.units, transfers_first(self.units))
        # last unit of each turn: its transfers have started, so wgrad overlaps them
        self.ends = {turn[-1] for turn in self.turns}


class TransferStream:
    """Runs transfers in order on a stream of their own; on a CPU, at once."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        # The allocator ties memory to one stream and would reuse a transfer's inputs: they are held until the
        # current stream has waited for it.
        self._under_way: dict[Hashable, tuple[torch.cuda.Event, Any]] = {}

    def run(self, key: Hashable, call: Callable[[], Result], reads: Any) -> Result:
        """Start ``call``, which reads ``reads``; return its result, readable after ``wait``."""
        if self._stream is None:
            return call()
        products = torch.cuda.current_stream()
        self._stream.wait_stream(products)
        with torch.cuda.stream(self._stream), beside_products_on(products):
            result = call()
            done = torch.cuda.Event()
            done.record()
        self._under_way[key] = done, reads
        return result

    def wait(self, keys: Iterable[Hashable]) -> None:
        """Make the current stream wait for pending transfers of these tensors. No device sync."""
        for key in keys:
            if key in self._under_way:
                done, _ = self._under_way.pop(key)
                done.wait()

    def wait_for_all(self) -> None:
        self.wait([*self._under_way])


def backward_of(forward: Sequence[OrderedUnit]) -> list[OrderedUnit]:
    """Return the units' backwards, in reverse; each needs the backwards of units that read its results."""
    last = len(forward) - 1
    readers: list[set[int]] = [set() for _ in forward]
    for number, unit in enumerate(forward):
        for source in unit.needs:
            readers[last - source].add(last - number)
    return [
        OrderedUnit(unit.name, frozenset(needs), unit.transfers)
        for unit, needs in zip(reversed(forward), readers, strict=True)
    ]


def transfers_first(units: Sequence[OrderedUnit]) -> list[int]:
    """Return a topological order with early transfers."""
    order: list[int] = []
    left = dict.fromkeys(range(len(units)))
    while left:
        ready = [number for number in left if units[number].needs <= set(order)]
        assert ready, "units need each other"
        chosen = next((number for number in ready if units[number].transfers), ready[0])
        order.append(chosen)
        del left[chosen]
    return order


def turns(units: Sequence[OrderedUnit], order: Sequence[int]) -> list[list[int]]:
    """Group units, in this order, into turns: one ends before a unit that waits for a pending transfer."""
    cut: list[list[int]] = []
    under_way: set[int] = set()
    for number in order:
        if not cut or units[number].needs & under_way:
            cut.append([])
            under_way = set()
        cut[-1].append(number)
        if units[number].transfers:
            under_way.add(number)
    return cut


def interleaved(
    forward: Sequence[Sequence[int]], backward: Sequence[Sequence[int]]
) -> list[tuple[Direction, int]]:
    """Return the units in alternating turns of forward and backward, the forward first."""
    order: list[tuple[Direction, int]] = []
    for i in range(max(len(forward), len(backward))):
        for direction, of in (("forward", forward), ("backward", backward)):
            order += [(direction, number) for number in (of[i] if i < len(of) else ())]  # type: ignore[misc]
    return order


@dataclass(frozen=True)
class OrderedUnit:
    """A unit at one position of the model, or its backward."""

    name: str
    needs: frozenset[int] = frozenset()  # indices of units whose results it reads
    transfers: bool = False  # a transfer between ranks, which others may overlap


@dataclass
class _Done:  # holds edges of autograd's graph, which ends at each unit, and no tensors
    unit: OrderedUnit
    reads: list[tuple[int, int]] = field(default_factory=list)  # (unit, result) of inputs with gradients
    inputs: list[GradientEdge] = field(default_factory=list)
    outputs: dict[int, GradientEdge] = field(default_factory=dict)
    weights: PendingWeightGrads = field(default_factory=list)


class Tape:
    """Record of a forward's units, each with a backward that can run alone."""

    def __init__(self, anchor: Tensor) -> None:
        """``anchor``: any tensor that requires a gradient."""
        self._anchor = anchor
        self._done: list[_Done] = []
        self._source: dict[int, tuple[int, int]] = {}  # (unit, result), by autograd node
        self._edges: dict[tuple[int, int], GradientEdge] = {}
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}  # added once all are readable
        self._received: list[tuple[torch.Size, torch.dtype, torch.device]] = []

    @property
    def units(self) -> list[OrderedUnit]:
        return [done.unit for done in self._done]

    def receive(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return detached copies of received tensors, for compile units to read; call before any unit."""
        assert not self._done
        given = tuple(self._source_of(tensor.detach()) for tensor in tensors)
        for i, tensor in enumerate(given):
            self._received.append((tensor.shape, tensor.dtype, tensor.device))
            self._source[id(tensor.grad_fn)] = RECEIVED, i
            self._edges[RECEIVED, i] = get_gradient_edge(tensor)
        return given

    def gradients_of_received(self) -> tuple[Tensor, ...]:
        """Return gradients of received tensors after all backwards; zeros if unused."""
        gradients = []
        for i, (shape, dtype, device) in enumerate(self._received):
            given = self._gradients.pop((RECEIVED, i), None) or [
                torch.zeros(shape, dtype=dtype, device=device)
            ]
            gradients.append(functools.reduce(torch.add, given))
        return tuple(gradients)

    def run(self, name: str, transfers: bool, read: Sequence[Tensor], call: Call) -> tuple[Tensor, ...]:
        """Run ``call`` on detached ``read``; return its results, detached."""
        reads = [self._key(tensor) for tensor in read if tensor.requires_grad]
        own = [self._source_of(tensor.detach()) if tensor.requires_grad else tensor for tensor in read]
        # autograd lets a stream wait for the streams of all its nodes, so these must be of this unit alone
        inputs = [get_gradient_edge(tensor) for tensor in own if tensor.requires_grad]
        number, weights = len(self._done), PendingWeightGrads()
        results = [result.contiguous() for result in call(own, weights)]  # as the next unit would have it
        outputs = {i: get_gradient_edge(r) for i, r in enumerate(results) if r.requires_grad}
        given = tuple(
            self._source_of(r.detach()) if i in outputs else r.detach() for i, r in enumerate(results)
        )
        for i in outputs:
            self._source[id(given[i].grad_fn)] = number, i
            self._edges[number, i] = get_gradient_edge(given[i])
        unit = OrderedUnit(name, frozenset(source for source, _ in reads if source != RECEIVED), transfers)
        self._done.append(_Done(unit, reads, inputs, outputs, weights))
        return given

    def start(
        self, roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None] | None = None
    ) -> None:
        """Backpropagate from ``roots`` to the results of units."""
        keys = [*self._edges]
        edges = [self._edges[key] for key in keys]
        found = torch.autograd.grad(roots, edges, gradients, allow_unused=True)  # type: ignore[arg-type]
        self._add(keys, found)

    def sources(self, read: Sequence[Tensor]) -> set[int]:
        return {self._key(tensor)[0] for tensor in read if tensor.requires_grad} - {RECEIVED}

    def what_back_reads(self, number: int) -> Any:
        """Return the tensors that must not change during a unit's backward."""
        done = self._done[number]
        return done, [self._gradients.get((number, i), []) for i in done.outputs]

    def back(self, number: int, *, keep: bool = False) -> PendingWeightGrads:
        """Run a unit's backward after those of its results' readers; return its wgrad, not yet run."""
        done, self._done[number] = self._done[number], _Done(self._done[number].unit)
        wanted = {i: self._gradients.pop((number, i), []) for i in done.outputs}
        gradients = {i: functools.reduce(torch.add, given) for i, given in wanted.items() if given}
        for i in done.outputs:
            self._edges.pop((number, i))
        if not gradients:
            return []
        edges, values = [done.outputs[i] for i in gradients], [*gradients.values()]
        if done.inputs:
            found = torch.autograd.grad(edges, done.inputs, values, retain_graph=keep, allow_unused=True)
            self._add(done.reads, found)
        else:
            torch.autograd.backward(edges, values)
        return done.weights

    def _source_of(self, tensor: Tensor) -> Tensor:
        return _Source.apply(self._anchor, tensor)

    def _key(self, tensor: Tensor) -> tuple[int, int]:
        key = self._source.get(id(tensor.grad_fn))
        assert key is not None, "a unit reads what no unit of its micro-batch has made"
        return key

    def _add(self, keys: Sequence[tuple[int, int]], gradients: Sequence[Tensor | None]) -> None:
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient is not None:
                self._gradients.setdefault(key, []).append(gradient)


class _Source(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, result: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None
