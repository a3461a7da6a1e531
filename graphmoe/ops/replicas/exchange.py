"""Replica traffic: gather counts, fetch weights, reduce gradients to the owners.

Calls are collectives on one stream: kernels over peer memory (`shared`), or torch.distributed (`reference`:
CPUs, fp64, reference). ``expert_RS`` int32: the expert in each replica slot of each rank, equal on all ranks;
-1 is an empty slot, never read.

Suffixes: R ranks, E experts, L experts of a rank, S replica slots of a rank, X shape of an expert's weight.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from graphmoe.ops import IN_USE, register_gradient
from graphmoe.ops.replicas import reference
from graphmoe.ops.symm.peers import (
    COUNT_BYTES,
    CollectivePeers,
    MemoryPeers,
    Peers,
    exchange_of,
    is_capturing,
    offsets,
)

Shape = tuple[int, ...]


class Prefetch(NamedTuple):
    """Weights of own experts, sent with dispatched tokens to ranks with replicas of them."""

    weights: tuple[Tensor, ...]
    expert_RS: Tensor

    @classmethod
    def of(
        cls, w_gate_up: Tensor | None, w_down: Tensor | None, expert_RS: Tensor | None
    ) -> "Prefetch | None":
        if w_gate_up is None or w_down is None or expert_RS is None:
            return None
        return cls((w_gate_up.contiguous(), w_down.contiguous()), expert_RS)

    @property
    def num_bytes(self) -> int:
        return offsets(w_LX.nbytes for w_LX in self.weights)[-1]


@dataclass(eq=False)
class _Prefetched:
    of: Prefetch
    captured: bool  # a replay rewrites them in place; a graph must not read ones fetched outside it
    left: dict[int, Tensor]  # by weight index, until read

    def numbers(self, weights: Sequence[Tensor], expert_RS: Tensor) -> list[int]:
        if self.captured != is_capturing() or not self.of.expert_RS.is_set_to(expert_RS):
            return []
        return [i for w_LX in weights for i in self.left if self.of.weights[i].is_set_to(w_LX)]


@dataclass
class _Deferred:
    expert_RS: Tensor
    made: Sequence[Tensor]
    totals: Sequence[Tensor]
    added: list[Callable[[], None]] = field(default_factory=list)  # run once a stream has waited


class Exchange:
    """Replica traffic of this process, with its prefetched weights and deferred gradients."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._form: Any = reference
        self._of_ranks: Any = peers
        if not isinstance(peers, CollectivePeers):
            from graphmoe.ops.replicas import shared

            self._form, self._of_ranks = shared, cast(MemoryPeers, peers).replicas
        # one forward and one overlapped backward; the limit bounds memory
        self._prefetched: deque[_Prefetched] = deque(maxlen=2)
        self._defers = False
        # the next exchange of rows reduces these, after its barrier
        self.deferred: _Deferred | None = None
        # reduced on another stream, with its event; keeps their tensors alive until a stream has waited
        self._under_way: list[tuple[torch.cuda.Event | None, _Deferred]] = []

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        """Return the int32 counts [E] of all ranks -> [R, E]."""
        counts_RE: Tensor = self._form.gather_counts(self._of_ranks, counts_E)
        return counts_RE

    def keep(self, along: Prefetch, pulled: Sequence[Tensor]) -> None:
        """Hold replica weights fetched by a dispatch until `pull` returns them."""
        self._prefetched.append(_Prefetched(along, is_capturing(), dict(enumerate(pulled))))

    def drop_prefetched(self) -> None:
        self._prefetched.clear()

    def pull(self, weights: Sequence[Tensor], expert_RS: Tensor, *, again: bool = False) -> list[Tensor]:
        """Return this rank's replica weights [S, X], prefetched or fetched from the owners' weights [L, X].

        With ``again``, prefetched weights are kept for another call.
        """
        for each in reversed(self._prefetched):
            numbers = each.numbers(weights, expert_RS)
            if len(numbers) == len(weights):
                pulled = [each.left[i] if again else each.left.pop(i) for i in numbers]
                if not each.left:
                    self._prefetched.remove(each)
                return pulled
        self.settle()  # deferred gradients occupy the memory that the weights need
        fetched: list[Tensor] = self._form.pull(self._of_ranks, weights, expert_RS)
        return fetched

    @contextmanager
    def slot_gradients(
        self, totals: Sequence[Tensor], expert_RS: Tensor, dtype: torch.dtype, *, may_defer: bool = False
    ) -> Iterator[Sequence[Tensor]]:
        """Yield buffers [S, X] for this rank's replica gradients; at exit add them to owners' totals [L, X].

        Sums have a fixed order, in fp32 (fp64 if a total is), rounded once. Kernels support fp32, bf16, fp16.
        With ``may_defer`` inside `deferring`, they are added later; `when_at_owners` tells when.
        """
        self.settle()
        shapes = [(expert_RS.shape[1], *total_LX.shape[1:]) for total_LX in totals]
        made = self._form.gradient_room(self._of_ranks, shapes, expert_RS, dtype)
        yield made
        if may_defer and self._defers:
            # a copy: the graph of a later micro-batch's plan may write there before the next exchange
            self.deferred = _Deferred(expert_RS.clone(), made, totals)
        else:
            self._form.home(self._of_ranks, expert_RS, made, totals)

    @contextmanager
    def deferring(self, defers: bool = True) -> Iterator[None]:
        """Context that leaves reductions of replica gradients to the next exchange; if False, none are."""
        before, self._defers = self._defers, defers
        try:
            yield
        finally:
            self._defers = before

    def add_deferred(self) -> None:
        """Reduce deferred gradients; dispatch and combine call this once all ranks have written theirs."""
        deferred, self.deferred = self.deferred, None
        if deferred is None:
            return
        self._form.add_made(self._of_ranks, deferred.expert_RS, deferred.made, deferred.totals)
        event = torch.cuda.Event() if deferred.expert_RS.is_cuda else None
        if event:
            event.record()
        self._under_way.append((event, deferred))

    def settle(self) -> None:
        """Make the current stream wait until all gradients are reduced. A collective if any is deferred."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            self._form.home(self._of_ranks, deferred.expert_RS, deferred.made, deferred.totals)
            self._under_way.append((None, deferred))
        while self._under_way:
            event, deferred = self._under_way.pop(0)
            if event:
                event.wait()
            for call in deferred.added:
                call()


def use_peers(peers: Peers | None) -> None:
    """Set the peers of this process, with a new `Exchange`; None clears them."""
    IN_USE.exchange = None if peers is None else Exchange(peers)


@contextmanager
def when_at_owners(call: Callable[[], None]) -> Iterator[None]:
    """Context that runs ``call`` once gradients made inside are at their owners: at exit unless deferred."""
    exchange: Exchange | None = IN_USE.exchange
    before = exchange.deferred if exchange else None
    yield
    deferred = exchange.deferred if exchange else None
    if deferred is None or deferred is before:
        call()
    else:
        deferred.added.append(call)


def room_bytes(
    shapes: Sequence[Shape], element_bytes: int, slots: int, *, along: bool, apart: bool
) -> tuple[int, int]:
    """Return bytes of peer memory for weights [L, X] sent ``along`` with tokens, and for other traffic.

    ``apart``: some weights are fetched separately.
    """
    weights = offsets(torch.Size(shape).numel() * element_bytes for shape in shapes)[-1]
    gradients = offsets(4 * slots * torch.Size(shape[1:]).numel() for shape in shapes)[-1]
    return weights * along, COUNT_BYTES + max(gradients, weights * apart)


@torch.library.custom_op("graphmoe::replica_counts", mutates_args=())
def _counts(counts_E: Tensor, ranks: int) -> Tensor:
    return exchange_of(ranks).gather_counts(counts_E)


@torch.library.custom_op("graphmoe::replica_weights", mutates_args=())
def _weights(w_LX: Tensor, expert_RS: Tensor) -> Tensor:
    return exchange_of(len(expert_RS)).pull([w_LX], expert_RS)[0]


@torch.library.custom_op("graphmoe::replica_weights_grad", mutates_args=())
def _weights_grad(d_SX: Tensor, expert_RS: Tensor, experts: int) -> Tensor:
    total_LX = d_SX.new_zeros(experts, *d_SX.shape[1:])
    with exchange_of(len(expert_RS)).slot_gradients([total_LX], expert_RS, d_SX.dtype) as (made_SX,):
        made_SX.copy_(d_SX)
    return total_LX


_counts.register_fake(lambda counts_E, ranks: counts_E.new_empty(ranks, *counts_E.shape))
_weights.register_fake(lambda w_LX, expert_RS: w_LX.new_empty(expert_RS.shape[1], *w_LX.shape[1:]))
_weights_grad.register_fake(lambda d_SX, _, experts: d_SX.new_empty(experts, *d_SX.shape[1:]))
register_gradient(_weights, _weights_grad, lambda inputs, _: (inputs[1], inputs[0].shape[0]))
