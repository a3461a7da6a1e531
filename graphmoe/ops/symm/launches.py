"""Launches of the exchange kernels, without device sync. Suffixes as in `kernels`."""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from graphmoe.ops import num_warps, tile
from graphmoe.ops.symm import kernels
from graphmoe.ops.symm.peers import MemoryPeers, Region, SharedMemory

Plan = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Launch:
    tile_bytes: int
    width_bytes: int  # of a row in a tile, at most
    threads: int
    # they loop over all tiles
    programs: int

    def tile(self, columns: int, element_bytes: int) -> tuple[int, int]:
        return tile(columns, self.tile_bytes // element_bytes, self.width_bytes // element_bytes, MAX_ROWS)


MAX_ROWS = 256
# A link of 400 GB/s and 3 us needs 1.2 MB in flight. Here 4 MB are, 64 bytes per thread, since a program
# loads nothing while it stores its tile. (A plain copy, without addresses to load, needs 32 programs.)
PULL = Launch(tile_bytes=32 << 10, width_bytes=4096, threads=512, programs=128)
# memory of 4.8 TB/s and 1 us needs 5 MB in flight: 64 bytes per thread, as many programs as SMs hold
PUT = Launch(tile_bytes=16 << 10, width_bytes=4096, threads=256, programs=1024)
# one 16-byte vector per thread, held in registers while it is stored up to W times; one tile per program
PACK = Launch(tile_bytes=4096, width_bytes=4096, threads=256, programs=0)
# one 16-byte vector per thread and position, so a token with six positions has 24 KiB in flight
SUM = Launch(tile_bytes=4096, width_bytes=4096, threads=256, programs=2048)
SUM_PARTS = 4096  # two 16-byte vectors of bf16 per thread and rank
# the smallest tile of records that fills the 128-byte lines of a link
RECORD_TILE, RECORD_THREADS = 1024, 128
PLACES, PLACE_THREADS = 256, 128
WIDEST = 16  # bytes of the widest load
AT_ONCE = 16  # positions per round; registers hold a piece of each row


def put_records(
    peers: MemoryPeers, region: Region, plan: Plan, weight_TK: Tensor | None, expert_TK: Tensor | None,
    experts: int, etp: int,
) -> None:  # fmt: skip
    counts_P, ends_P, row_TW, slot_R = plan
    slots = 0 if weight_TK is None else weight_TK.shape[1]
    num_rows, lanes = len(slot_R), triton.next_power_of_2(1 + 2 * slots)
    height = max(RECORD_TILE // lanes, 1)
    own = [
        peers.view(peers.rank, offset, (length,), torch.int32)
        for offset, length in ((region.records, num_rows * (1 + 2 * slots)), (region.counts, peers.size))
    ]
    kernels.records_kernel[(max(triton.cdiv(num_rows, height), 1),)](
        slot_R, counts_P, ends_P, weight_TK, expert_TK, *own, experts, num_rows,
        W=row_TW.shape[1], K=slots, ETP=etp, LANES=lanes, ROWS=height, num_warps=num_warps(RECORD_THREADS),
        **_ranks(peers),
    )  # fmt: skip


def pack(
    peers: MemoryPeers, region: Region, x_TD: Tensor, plan: Plan, received_ND: Tensor, block: int
) -> None:
    """Copy the first ``block`` rows for each rank to its block; store other tokens for peers to fetch."""
    counts_P, ends_P, row_TW, _ = plan
    (tokens, columns), ranks = x_TD.shape, peers.size
    height, width = PACK.tile(columns, x_TD.element_size())
    programs = triton.cdiv(tokens, height) * triton.cdiv(columns, width)
    if programs == 0:
        return
    kernels.pack_kernel[(programs,)](
        x_TD, row_TW, counts_P, ends_P,
        peers.view(peers.rank, region.tokens, (tokens, columns), x_TD.dtype),
        peers.view(peers.rank, region.blocks, (ranks, block, columns), x_TD.dtype), received_ND, tokens,
        columns, peers.rank, block,
        W=row_TW.shape[1], AT_ONCE=AT_ONCE, TOKENS=height, COLUMNS=width, num_warps=num_warps(PACK.threads),
        **_ranks(peers),
    )  # fmt: skip


def receive(
    peers: MemoryPeers, region: Region, rows: int, slots: int, row_bytes: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return peer addresses of received rows int64 [N], weights and local experts [N, K], and arrivals_PP."""
    like, lanes = peers.addresses, triton.next_power_of_2(1 + 2 * slots)
    height = max(RECORD_TILE // lanes, 1)
    arrivals_PP = like.new_empty(peers.size, peers.size, dtype=torch.int32)
    from_N = like.new_empty(rows)
    weight_NK = like.new_empty(rows, slots, dtype=torch.float32)
    number_NK = like.new_empty(rows, slots, dtype=torch.int32)
    kernels.receive_kernel[(max(triton.cdiv(rows, height), 1),)](
        like, arrivals_PP, from_N, weight_NK, number_NK, region.counts, region.records, region.tokens,
        row_bytes, peers.rank, rows, block,
        K=slots, LANES=lanes, ROWS=height, num_warps=num_warps(RECORD_THREADS), **_ranks(peers),
    )  # fmt: skip
    return from_N, weight_NK, number_NK, arrivals_PP


def pull(peers: MemoryPeers, from_N: Tensor, received_ND: Tensor, arrivals_PP: Tensor, block: int) -> None:
    rows, columns = received_ND.shape
    height, width = PULL.tile(columns, received_ND.element_size())
    kernels.pull_kernel[(PULL.programs,)](
        from_N, received_ND, arrivals_PP, columns, peers.rank, rows, block,
        ALIGNMENT=_alignment(received_ND), ROWS=height, COLUMNS=width, num_warps=num_warps(PULL.threads),
        **_ranks(peers),
    )  # fmt: skip


def put_live(peers: MemoryPeers, offset: int, y_ND: Tensor, arrivals_PP: Tensor, block: int) -> None:
    """Copy rows of y for other ranks' tokens to own peer memory at ``offset``, for those ranks to read."""
    rows, columns = y_ND.shape
    height, width = PUT.tile(columns, y_ND.element_size())
    kernels.put_kernel[(PUT.programs,)](
        y_ND, peers.view(peers.rank, offset, (rows, columns), y_ND.dtype), arrivals_PP, columns, peers.rank,
        rows, block,
        ROWS=height, COLUMNS=width, num_warps=num_warps(PUT.threads), **_ranks(peers),
    )  # fmt: skip


def way_back(
    peers: MemoryPeers, region: Region, way: tuple[Tensor, Tensor, Tensor, int], staged_PBD: Tensor | None,
    y_ND: Tensor, dweight_NK: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the address of each sent row's output, and of its weight gradient: int64 [T, W]; 0 for none."""
    ends_P, row_TW, arrivals_PP, block = way
    slots = 0 if dweight_NK is None else dweight_NK.shape[1]
    from_TW = torch.empty_like(row_TW, dtype=torch.int64)
    dweight_from_TW = torch.empty_like(from_TW if slots else from_TW[:0])
    kernels.way_back_kernel[(max(triton.cdiv(row_TW.numel(), PLACES), 1),)](
        peers.addresses, row_TW, ends_P, arrivals_PP, staged_PBD, y_ND, dweight_NK, from_TW,
        dweight_from_TW, region.sums, region.dweights, y_ND.shape[1] * y_ND.element_size(), peers.rank,
        len(y_ND), block, row_TW.numel(),
        K=slots, PLACES=PLACES, num_warps=num_warps(PLACE_THREADS), **_ranks(peers),
    )  # fmt: skip
    return from_TW, dweight_from_TW


def sum_places(from_TW: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    tokens, places = from_TW.shape
    x_TD = torch.empty(tokens, columns, dtype=dtype, device=from_TW.device)
    height, width = SUM.tile(columns, x_TD.element_size())
    programs = triton.cdiv(tokens, height) * triton.cdiv(columns, width)
    if programs == 0:
        return x_TD
    kernels.sum_kernel[(min(programs, SUM.programs),)](
        from_TW, x_TD, tokens, columns,
        W=places, AT_ONCE=AT_ONCE, ALIGNMENT=_alignment(x_TD), TOKENS=height, COLUMNS=width,
        num_warps=num_warps(SUM.threads),
    )  # fmt: skip
    return x_TD


def sum_parts(memory: SharedMemory, offset: int, part: Tensor, outer: int) -> None:
    """Fill a contiguous part with the ranks' sum of its place in ``outer`` equal groups of their memory."""
    length = part.numel() // max(outer, 1)
    if length == 0:
        return
    kernels.sum_parts_kernel[(triton.cdiv(length, SUM_PARTS) * outer,)](
        memory.addresses, part, offset, memory.rank, length,
        P=memory.size, ELEMENTS=SUM_PARTS, num_warps=num_warps(SUM.threads),
    )  # fmt: skip


def _ranks(peers: MemoryPeers) -> dict[str, int]:
    return {"P": peers.size, "RANKS": triton.next_power_of_2(peers.size)}


def _alignment(x: Tensor) -> int:
    return math.gcd(WIDEST, x.shape[1] * x.element_size())
