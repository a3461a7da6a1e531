"""Operations of `graphmoe.ops.symm` by kernels on peer memory: no device sync, capturable.

Dispatch and combine write this rank's peer memory, pass a barrier, and read from peers: the first ``block``
rows of each rank by copies on ``peers.streams``, the rest by kernels.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from graphmoe.ops.dispatch import SendPlan
from graphmoe.ops.replicas import shared
from graphmoe.ops.replicas.exchange import Prefetch
from graphmoe.ops.symm import launches
from graphmoe.ops.symm.peers import MemoryPeers, Side, Sizes, before_products, exchange_of, is_capturing

# int32: words of quantized rows, never summed
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)


def bring(
    peers: MemoryPeers, x_TD: Tensor, plan: SendPlan, of_slots: tuple[Tensor, Tensor] | None,
    _: Tensor | None, rows: int, block: int, experts: int = 1, etp: int = 1, into_ND: Tensor | None = None,
    along: Prefetch | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return received_ND, weight_NK, number_NK (K = 0 without ``of_slots``), arrivals_PP read from peers."""
    x_TD = _checked(x_TD)
    weight_TK, expert_TK = (None, None) if of_slots is None else (x.contiguous() for x in of_slots)
    assert weight_TK is None or weight_TK.dtype == torch.float32, weight_TK.dtype
    (tokens, columns), places = x_TD.shape, plan.send_row_TW.shape[1]
    slots = 0 if weight_TK is None else weight_TK.shape[1]
    row_bytes = columns * x_TD.element_size()
    weight_bytes = along.num_bytes if along else 0
    region = peers.reserve(Sizes(tokens, row_bytes, slots, places, rows, block, weight_bytes))
    received_ND = x_TD.new_empty(rows, columns) if into_ND is None else into_ND
    # copies need an early start; pulling kernels gain nothing from it
    with before_products() if block else nullcontext():
        _take(peers, "out")
        if block:
            launches.pack(peers, region, x_TD, plan, received_ND, block)
        else:
            peers.view(peers.rank, region.tokens, (tokens, columns), x_TD.dtype).copy_(x_TD)
        launches.put_records(peers, region, plan, weight_TK, expert_TK, experts, etp)
        if along:
            shared.put(peers, region.weights, along.weights, along.expert_RS)
        peers.barrier()
    of_ranks = received_ND[: peers.size * block].view(peers.size, block, columns)
    with _beside(peers, _blocks(peers, of_ranks, region.blocks)):
        from_N, *received, arrivals_PP = launches.receive(peers, region, rows, slots, row_bytes, block)
        launches.pull(peers, from_N, received_ND, arrivals_PP, block)
        if along:
            pulled = shared.pulled(peers, region.weights, along.weights, along.expert_RS)
            exchange_of(peers.size).keep(along, pulled)
        exchange_of(peers.size).add_deferred()
    return received_ND, *received, arrivals_PP


def sums(
    peers: MemoryPeers, y_ND: Tensor, dweight_NK: Tensor | None, *way: Any
) -> tuple[Tensor, Tensor | None]:
    """Return each token's sums of y [T, D], dweight [T, K]; ``way``: ends_P, row_TW, arrivals_PP, block."""
    _, row_TW, arrivals_PP, block = way
    y_ND = _checked(y_ND)
    (rows, columns), (tokens, places) = y_ND.shape, row_TW.shape
    slots = 0
    if dweight_NK is not None:
        assert dweight_NK.dtype == torch.float32, dweight_NK.dtype
        dweight_NK, slots = _aligned(dweight_NK), dweight_NK.shape[1]
    row_bytes = columns * y_ND.element_size()
    region = peers.reserve(Sizes(tokens, row_bytes, slots, places, rows, block))
    with before_products() if block else nullcontext():
        _take(peers, "back")
        launches.put_live(peers, region.sums, y_ND, arrivals_PP, block)
        if dweight_NK is not None:
            launches.put_live(peers, region.dweights, dweight_NK, arrivals_PP, block)
        peers.barrier()
    staged_PBD = y_ND.new_empty(peers.size, block, columns) if block else None
    copies = [] if staged_PBD is None else _blocks(peers, staged_PBD, region.sums)
    dweight_TK = None
    with _beside(peers, copies):
        from_TW, dweight_from_TW = launches.way_back(peers, region, way, staged_PBD, y_ND, dweight_NK)
        if dweight_NK is not None:
            dweight_TK = launches.sum_places(dweight_from_TW, slots, dweight_NK.dtype)
    summed_TD = launches.sum_places(from_TW, columns, y_ND.dtype)
    exchange_of(peers.size).add_deferred()
    return summed_TD, dweight_TK


def _checked(x: Tensor) -> Tensor:
    if x.dtype not in DTYPES:
        raise TypeError(f"symm sends rows of {DTYPES}, not {x.dtype}; use moe.dispatcher=alltoall")
    return _aligned(x)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % launches.WIDEST else x


def _take(peers: MemoryPeers, side: Side) -> None:
    # no peer may still be reading this side
    capturing = is_capturing()
    other: Side = "back" if side == "out" else "out"
    # Sides alternate, so one barrier per exchange is enough: after it all ranks have written this side and
    # read the other.
    if peers.last != (other, capturing):
        peers.barrier()
    peers.last = side, capturing


def _blocks(peers: MemoryPeers, to_PBD: Tensor, offset: int) -> list[tuple[Tensor, Tensor]]:
    block, columns = to_PBD.shape[1:]
    own = offset + peers.rank * block * columns * to_PBD.element_size()
    # each rank starts with its successor, to spread reads over ranks
    others = [(peers.rank + i) % peers.size for i in range(1, peers.size)] if block else []
    return [(to_PBD[rank], peers.view(rank, own, (block, columns), to_PBD.dtype)) for rank in others]


@contextmanager
def _beside(peers: MemoryPeers, copies: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    # copies need no SM: they overlap the kernels launched inside
    if not peers.streams:
        for to, source in copies:
            to.copy_(source)
        yield
        return
    here, begun = torch.cuda.current_stream(), []
    try:
        for stream, (to, source) in zip(peers.streams[: len(copies)], copies, strict=True):
            stream.wait_stream(here)
            begun.append(stream)
            with torch.cuda.stream(stream):
                to.copy_(source)
        yield
    finally:  # unjoined streams fail a capture with an error that hides the cause
        for stream in begun:
            here.wait_stream(stream)
