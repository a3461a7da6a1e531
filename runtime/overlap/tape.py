"""Tape: a micro-batch's units, each with a backward that can run alone."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from graphmoe.ops.gradients import PendingWeightGrads

RECEIVED = -1  # stands for the unit of a tensor from elsewhere


@dataclass(frozen=True)
class OrderedUnit:
    """A unit at one position of the model, or its backward."""

    name: str
    needs: frozenset[int] = frozenset()
    """Indices of units whose results it reads."""
    transfers: bool = False  # a transfer between ranks, which others may overlap


# Holds edges of autograd's graph, which ends at each unit, and no tensors.
@dataclass
class _Done:
    unit: OrderedUnit
    # (unit, result) of each input that wants a gradient
    reads: list[tuple[int, int]] = field(default_factory=list)
    inputs: list[GradientEdge] = field(default_factory=list)
    outputs: dict[int, GradientEdge] = field(default_factory=dict)
    weights: PendingWeightGrads = field(default_factory=list)


class Tape:
    """Record of a forward, unit by unit, for its backward."""

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
        """Return stand-ins; call before any unit."""
        assert not self._done
        given = tuple(self._source_of(tensor.detach()) for tensor in tensors)
        for i, tensor in enumerate(given):
            self._received.append((tensor.shape, tensor.dtype, tensor.device))
            self._source[id(tensor.grad_fn)] = RECEIVED, i
            self._edges[RECEIVED, i] = get_gradient_edge(tensor)
        return given

    def gradients_of_received(self) -> tuple[Tensor, ...]:
        """Return them after all backwards, zeros if unused."""
        gradients = []
        for i, (shape, dtype, device) in enumerate(self._received):
            given = self._gradients.pop((RECEIVED, i), None) or [
                torch.zeros(shape, dtype=dtype, device=device)
            ]
            gradients.append(functools.reduce(torch.add, given))
        return tuple(gradients)

    def run(
        self,
        name: str,
        transfers: bool,
        read: Sequence[Tensor],
        call: Callable[[Sequence[Tensor], PendingWeightGrads], Sequence[Tensor]],
    ) -> tuple[Tensor, ...]:
        """Return the results of ``call``, detached; it gets stand-ins for ``read``."""
        reads = [self._key(tensor) for tensor in read if tensor.requires_grad]
        own = [self._source_of(tensor.detach()) if tensor.requires_grad else tensor for tensor in read]
        # Autograd lets a stream wait for the streams of all its nodes, so the nodes here are all of this
        # unit, on the current stream.
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
        """Take the gradients of what was computed from results."""
        keys = [*self._edges]
        edges = [self._edges[key] for key in keys]
        found = torch.autograd.grad(roots, edges, gradients, allow_unused=True)  # type: ignore[arg-type]
        self._add(keys, found)

    def sources(self, read: Sequence[Tensor]) -> set[int]:
        return {self._key(tensor)[0] for tensor in read if tensor.requires_grad} - {RECEIVED}

    def what_back_reads(self, number: int) -> Any:
        """Return what must stay unchanged during a unit's backward."""
        done = self._done[number]
        return done, [self._gradients.get((number, i), []) for i in done.outputs]

    def back(self, number: int, *, keep: bool = False) -> PendingWeightGrads:
        """Run a unit's backward after that of its readers; returns its pending wgrad.

        ``keep``: saved tensors stay with `what_back_reads`.
        """
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
    """Stand-in for a result; its gradient ends here."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, result: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None
