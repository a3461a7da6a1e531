"""Replica traffic by torch.distributed collectives with host-known sizes: the reference of `shared`."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops.collectives import all_gather_into
from graphmoe.ops.symm.peers import CollectivePeers


def gather_counts(peers: CollectivePeers, counts_E: Tensor) -> Tensor:
    counts_RE = counts_E.new_empty(peers.size, len(counts_E))
    if peers.group is None:
        return counts_RE.copy_(counts_E)
    all_gather_into(counts_RE.view(-1), counts_E.contiguous(), group=peers.group)
    return counts_RE


def pull(peers: CollectivePeers, weights: Sequence[Tensor], expert_RS: Tensor) -> list[Tensor]:
    # empty slots are 0
    held, owned = expert_RS.tolist(), len(weights[0])
    sent = [[e - peers.rank * owned for e in row if _owner(e, owned) == peers.rank] for row in held]
    slots = [[s for s, e in enumerate(held[peers.rank]) if _owner(e, owned) == r] for r in range(peers.size)]
    pulled = []
    for w_LX in weights:
        w_SX = w_LX.new_zeros(len(held[0]), *w_LX.shape[1:])
        bytes_LX = w_LX.contiguous().view(torch.uint8)
        w_SX.view(torch.uint8)[_flat(slots)] = _transfer(peers, bytes_LX, sent, slots)
        pulled.append(w_SX)
    return pulled


def gradient_room(
    peers: CollectivePeers, shapes: Sequence[tuple[int, ...]], like: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    return [like.new_empty(shape, dtype=dtype) for shape in shapes]


def add_made(
    peers: CollectivePeers, expert_RS: Tensor, made: Sequence[Tensor], totals: Sequence[Tensor]
) -> None:
    home(peers, expert_RS, made, totals)


def home(peers: CollectivePeers, expert_RS: Tensor, made: Sequence[Tensor], totals: Sequence[Tensor]) -> None:
    held, owned = expert_RS.tolist(), len(totals[0])
    sent = [[s for s, e in enumerate(held[peers.rank]) if _owner(e, owned) == r] for r in range(peers.size)]
    experts = [[e - peers.rank * owned for e in row if _owner(e, owned) == peers.rank] for row in held]
    for made_SX, total_LX in zip(made, totals, strict=True):
        wide = torch.promote_types(total_LX.dtype, torch.float32)
        sums_LX = total_LX.to(wide)
        for e, gradient in zip(_flat(experts), _transfer(peers, made_SX, sent, experts), strict=True):
            sums_LX[e] += gradient
        total_LX.copy_(sums_LX)


def _owner(expert: int, owned: int) -> int:
    return expert // owned  # -1 for an empty slot, too


def _flat(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def _transfer(peers: CollectivePeers, x: Tensor, sent: list[list[int]], arrived: list[list[int]]) -> Tensor:
    rows = x[_flat(sent)]
    if peers.group is None:
        return rows
    received = x.new_empty(len(_flat(arrived)), *x.shape[1:])
    dist.all_to_all_single(received, rows, [*map(len, arrived)], [*map(len, sent)], group=peers.group)
    return received
