"""Traffic of replicas: counts of all ranks, weights to ranks that have replicas, and their gradients home.

Calls are collectives of the peers in use (`graphmoe.ops.symm.use_peers`), on one stream, which may be another
than that of rows. They have two forms: `shared`, kernels over memory that ranks share, without device sync
and fit for captures, and `collective`, by torch.distributed (CPUs, fp64, the reference).

An expert e is owned by rank e // L. ``expert_RS`` int32 are the experts in the slots of each rank, equal on
all ranks; -1 is none, and what such a slot holds is never read.

Suffixes: R ranks, E experts, L of a rank, S slots of a rank, X shape of an expert's weight.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from graphmoe.ops import register_gradient
from graphmoe.ops.replicas import collective
from graphmoe.ops.symm.peers import CollectivePeers, MemoryPeers, offsets, peers_of

Shape = tuple[int, ...]


def gather_counts(counts_E: Tensor, ranks: int) -> Tensor:
    """Return the counts of all ranks, int32 [R, E]; of int32 counts of this rank's tokens."""
    return torch.ops.graphmoe.replica_counts(counts_E, ranks)


def pull(weights: Sequence[Tensor], expert_RS: Tensor) -> list[Tensor]:
    """Return the weights [S, X] of the experts in this rank's slots, of weights [L, X] of its own experts."""
    form, of_ranks = _form(len(expert_RS))
    return form.pull(of_ranks, weights, expert_RS)


def gradient_room(
    shapes: Sequence[Shape], expert_RS: Tensor, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return tensors [S, X] of these shapes for the gradients of this rank's slots.

    The next call is `home` of them all, which then need not copy them. Kernels have fp32 only.
    """
    form, of_ranks = _form(len(expert_RS))
    return form.gradient_room(of_ranks, shapes, expert_RS, dtype)


def home(expert_RS: Tensor, made: Sequence[Tensor], totals: Sequence[Tensor]) -> None:
    """Add the gradients [S, X] of all ranks' slots to the totals [L, X] of their owners, in place.

    In the order of ranks, then slots, in fp32 (fp64 where a total is), rounded once to the total's dtype.
    """
    form, of_ranks = _form(len(expert_RS))
    form.home(of_ranks, expert_RS, made, totals)


def room_bytes(shapes: Sequence[Shape], element_bytes: int, slots: int, ranks: int) -> int:
    """Bytes that each rank shares for weights [L, X] of these shapes, or gradients of their replicas."""
    weights = offsets(torch.Size(shape).numel() * element_bytes for shape in shapes)
    gradients = offsets(4 * slots * torch.Size(shape[1:]).numel() for shape in shapes)
    return max(weights[-1], gradients[-1], 4 * ranks * max(shape[0] for shape in shapes))


def reserve(num_bytes: int, ranks: int) -> None:
    """Let the peers in use share that memory, outside of captures. A collective of them."""
    form, of_ranks = _form(ranks)
    form.reserve(of_ranks, num_bytes)


def _form(ranks: int) -> tuple[Any, Any]:
    """The module with the form of the peers in use, and its first argument."""
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
