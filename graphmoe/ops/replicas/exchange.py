"""Traffic of replicas: counts of all ranks, weights to ranks that have replicas, and their gradients home.

Calls are collectives of the peers in use (`graphmoe.ops.symm.use_peers`), on one stream, which may be another
than that of rows. They have two forms: `shared`, kernels over memory that ranks share, without device sync
and fit for captures, and `collective`, by torch.distributed (CPUs, fp64, the reference).

An expert e is owned by rank e // L. ``expert_RS`` int32 are the experts in the slots of each rank, equal on
all ranks; -1 is none, and what such a slot holds is never read.

Suffixes: R ranks, E experts, L of a rank, S slots of a rank, X shape of an expert's weight.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from graphmoe.ops import register_gradient
from graphmoe.ops.replicas import collective
from graphmoe.ops.symm.peers import COUNT_BYTES, CollectivePeers, MemoryPeers, is_capturing, offsets, peers_of

Shape = tuple[int, ...]


class Prefetch(NamedTuple):
    """Weights of own experts that go along with rows, to the ranks that have replicas of them."""

    weights: tuple[Tensor, ...]
    expert_RS: Tensor

    @classmethod
    def of(
        cls, w_gate_up: Tensor | None, w_down: Tensor | None, expert_RS: Tensor | None
    ) -> "Prefetch | None":
        """None where there are no weights."""
        if w_gate_up is None or w_down is None or expert_RS is None:
            return None
        return cls((w_gate_up.contiguous(), w_down.contiguous()), expert_RS)

    @property
    def num_bytes(self) -> int:
        return offsets(w_LX.nbytes for w_LX in self.weights)[-1]

    def keep(self, pulled: Sequence[Tensor]) -> None:
        """Hold what came for this rank's slots until it is asked for, or two others have come."""
        keys = [(w_LX.data_ptr(), self.expert_RS.data_ptr()) for w_LX in self.weights]
        _prefetched.append(_Prefetched(self, is_capturing(), dict(zip(keys, pulled, strict=True))))


class _Prefetched(NamedTuple):
    """Weights that came along with rows."""

    of: Prefetch
    """Held so that no other tensor has its address."""
    captured: bool
    """A replay writes them where they lie; a graph must not read those that came outside of one."""
    found: dict[tuple[int, int], Tensor]


_prefetched: deque[_Prefetched] = deque(maxlen=2)
"""Weights of a forward, and of a backward beside it."""


@dataclass
class _Deferred:
    """Gradients that are to go home behind the barrier of the next exchange of rows."""

    expert_RS: Tensor
    made: Sequence[Tensor]
    totals: Sequence[Tensor]
    added: list[Callable[[], None]] = field(default_factory=list)
    """Calls for when a stream has waited until they are at home."""


_defers = False
"""True where gradients may wait for an exchange of rows, beside which they then travel."""
_deferred: _Deferred | None = None
_on_the_way: list[tuple[torch.cuda.Event | None, _Deferred]] = []
"""Events at which another stream has brought gradients home; their tensors stay in memory until then."""


@contextmanager
def homes_deferred() -> Iterator[None]:
    """Let `home` of gradients in a `gradient_room` wait inside for the next exchange of rows, or `settle`."""
    global _defers
    before, _defers = _defers, True
    try:
        yield
    finally:
        _defers = before


def add_deferred() -> None:
    """Add what waits, in an exchange of rows: behind its barrier all ranks have made theirs."""
    global _deferred
    if _deferred is None:
        return
    deferred, _deferred = _deferred, None
    form, of_ranks = _form(len(deferred.expert_RS))
    form.add_made(of_ranks, deferred.expert_RS, deferred.made, deferred.totals)
    event = torch.cuda.Event() if deferred.expert_RS.is_cuda else None
    if event:
        event.record()
    _on_the_way.append((event, deferred))


def settle() -> None:
    """Let the current stream have all gradients at home. A collective where any waits."""
    global _deferred
    if _deferred is not None:
        deferred, _deferred = _deferred, None
        form, of_ranks = _form(len(deferred.expert_RS))
        form.home(of_ranks, deferred.expert_RS, deferred.made, deferred.totals)
        _on_the_way.append((None, deferred))
    while _on_the_way:
        event, deferred = _on_the_way.pop(0)
        if event:
            event.wait()
        for call in deferred.added:
            call()


def forget() -> None:
    """Drop what an earlier run has left, which was ended in the midst of a step."""
    global _deferred
    _deferred = None
    _on_the_way.clear()
    _prefetched.clear()


def when_home(totals: Sequence[Tensor], call: Callable[[], None]) -> None:
    """Call when these totals have all that was given to `home`: at once, or when a stream has waited."""
    if _deferred is not None and {*map(Tensor.data_ptr, totals)} & {*map(Tensor.data_ptr, _deferred.totals)}:
        _deferred.added.append(call)
    else:
        call()


def pull(weights: Sequence[Tensor], expert_RS: Tensor, *, again: bool = False) -> list[Tensor]:
    """Return the weights [S, X] of the experts in this rank's slots, of weights [L, X] of its own experts.

    Those that came along with rows are at hand. They stay so where ``again`` says that they are read once
    more.
    """
    keys, captured = [(w_LX.data_ptr(), expert_RS.data_ptr()) for w_LX in weights], is_capturing()
    for i, (_, came_in, found) in reversed([*enumerate(_prefetched)]):
        if came_in == captured and found.keys() >= {*keys}:
            came = [found[key] if again else found.pop(key) for key in keys]
            if not found:
                del _prefetched[i]
            return came
    settle()  # weights of their own lie where gradients do
    form, of_ranks = _form(len(expert_RS))
    return form.pull(of_ranks, weights, expert_RS)


def gradient_room(
    shapes: Sequence[Shape], expert_RS: Tensor, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return tensors [S, X] of these shapes for the gradients of this rank's slots.

    The next call is `home` of them all, which then need not copy them. Kernels have fp32, bf16 and fp16.
    """
    settle()
    form, of_ranks = _form(len(expert_RS))
    return form.gradient_room(of_ranks, shapes, expert_RS, dtype)


def home(
    expert_RS: Tensor, made: Sequence[Tensor], totals: Sequence[Tensor], *, may_defer: bool = False
) -> None:
    """Add the gradients [S, X] of all ranks' slots to the totals [L, X] of their owners, in place.

    In the order of ranks, then slots, in fp32 (fp64 where a total is), rounded once to the total's dtype.
    With ``may_defer`` later, where `homes_deferred`: nobody may read the totals before `when_home` says so.
    """
    global _deferred
    if may_defer and _defers:
        assert _deferred is None
        _deferred = _Deferred(expert_RS, made, totals)
        return
    form, of_ranks = _form(len(expert_RS))
    form.home(of_ranks, expert_RS, made, totals)


def room_bytes(
    shapes: Sequence[Shape], element_bytes: int, slots: int, *, along: bool, apart: bool
) -> tuple[int, int]:
    """Bytes that each rank shares with rows, for weights [L, X] that come ``along`` with them; and apart.

    Apart are counts, then gradients of slots, fp32 at most, or weights where any are pulled ``apart``.
    """
    weights = offsets(torch.Size(shape).numel() * element_bytes for shape in shapes)[-1]
    gradients = offsets(4 * slots * torch.Size(shape[1:]).numel() for shape in shapes)[-1]
    return weights * along, COUNT_BYTES + max(gradients, weights * apart)


def reserve(num_bytes: int, ranks: int) -> None:
    """Let the peers in use share that memory, outside of captures. A collective of them."""
    form, of_ranks = _form(ranks)
    form.reserve(of_ranks, num_bytes)


def _form(ranks: int) -> tuple[Any, Any]:
    peers = peers_of(ranks)
    if isinstance(peers, CollectivePeers):
        return collective, peers
    from graphmoe.ops.replicas import shared

    return shared, cast(MemoryPeers, peers).replicas


@torch.library.custom_op("graphmoe::replica_counts", mutates_args=())
def _counts(counts_E: Tensor, ranks: int) -> Tensor:
    """Counts of all ranks, int32 [R, E]."""
    form, of_ranks = _form(ranks)
    return form.gather_counts(of_ranks, counts_E)


@torch.library.custom_op("graphmoe::replica_weights", mutates_args=())
def _weights(w_LX: Tensor, expert_RS: Tensor) -> Tensor:
    """`pull` of one weight; its gradient is the sum of what `home` brings."""
    return pull([w_LX], expert_RS)[0]


@torch.library.custom_op("graphmoe::replica_weights_grad", mutates_args=())
def _weights_grad(d_SX: Tensor, expert_RS: Tensor, experts: int) -> Tensor:
    total_LX = d_SX.new_zeros(experts, *d_SX.shape[1:])
    home(expert_RS, [d_SX], [total_LX])
    return total_LX


_counts.register_fake(lambda counts_E, ranks: counts_E.new_empty(ranks, *counts_E.shape))
_weights.register_fake(lambda w_LX, expert_RS: w_LX.new_empty(expert_RS.shape[1], *w_LX.shape[1:]))
_weights_grad.register_fake(lambda d_SX, _, experts: d_SX.new_empty(experts, *d_SX.shape[1:]))
register_gradient(_weights, _weights_grad, lambda inputs, _: (inputs[1], inputs[0].shape[0]))
