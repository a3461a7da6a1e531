"""The routing plan in three launches, with no sort: counts, offsets, then the row of each slot.

Suffixes: N = T * K slots, C = ceil(N / BLOCK) chunks of slots, E experts, B = E + 1 buckets: one for each
expert, and the last for slots that are not routed here. Only integers are added: there is one result.

1. Each program counts the slots of one chunk by bucket.
2. Each program turns a few columns of these counts into what stands before each chunk, and sums them up.
3. Each program ranks the slots of one chunk among the earlier ones of their bucket, by comparing all pairs;
   row = start of the bucket + slots of the bucket before the chunk + rank.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphmoe.ops.vendors import num_warps

BLOCK, STEP = 256, 32
"""Slots of a chunk, and how many of them are compared with the chunk at once."""
SCAN_CHUNKS, SCAN_BUCKETS = 256, 8
"""Tile of the second launch. 8 buckets are one sector of 32 bytes."""
THREADS = 256


def routing_plan(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> counts_E, ends_E, row_TK, slot_R as the op ``graphmoe::routing_plan``. No device sync."""
    expert_TK = expert_TK.contiguous()
    counts_E, ends_E = (_empty(expert_TK, num_experts) for _ in range(2))
    row_TK, slot_R = _empty(expert_TK, *expert_TK.shape), _empty(expert_TK, expert_TK.numel())
    slots = expert_TK.numel()
    if slots == 0:
        return counts_E.zero_(), ends_E.zero_(), row_TK, slot_R
    chunks, buckets = triton.cdiv(slots, BLOCK), num_experts + 1
    padded = triton.next_power_of_2(max(buckets, 64))  # the histogram wants a bin for each lane of a warp
    counts_CB = _empty(expert_TK, chunks, buckets)
    warps = num_warps(THREADS)
    _count_kernel[(chunks,)](
        expert_TK, counts_CB, slots, num_experts, BLOCK=BLOCK, BUCKETS=padded, num_warps=warps
    )
    _offset_kernel[(triton.cdiv(buckets, SCAN_BUCKETS),)](
        counts_CB, counts_E, chunks, num_experts, ROWS=SCAN_CHUNKS, COLUMNS=SCAN_BUCKETS, num_warps=warps
    )
    _rank_kernel[(chunks,)](
        expert_TK, counts_CB, counts_E, ends_E, row_TK, slot_R, slots, num_experts,
        BLOCK=BLOCK, STEP=STEP, BUCKETS=padded, num_warps=warps,
    )  # fmt: skip
    return counts_E, ends_E, row_TK, slot_R


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


@triton.jit
def _bucket_of(expert, num_experts):
    return tl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(tl.int32)


@triton.jit
def _count_kernel(expert_N, counts_CB, slots, num_experts, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    chunk = tl.program_id(0)
    slot = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = slot < slots
    bucket = _bucket_of(tl.load(expert_N + slot, inside, other=-1), num_experts)
    counts = tl.histogram(bucket, BUCKETS, mask=inside)
    column = tl.arange(0, BUCKETS)
    tl.store(counts_CB + chunk * (num_experts + 1) + column, counts, column <= num_experts)


@triton.jit
def _offset_kernel(counts_CB, counts_E, chunks, num_experts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, chunks, ROWS):
        row = start + tl.arange(0, ROWS)
        at = counts_CB + row[:, None] * (num_experts + 1) + column[None, :]
        inside = (row[:, None] < chunks) & (column[None, :] <= num_experts)
        counts = tl.load(at, inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, inside)
        total += tl.sum(counts, 0)
    tl.store(counts_E + column, total, column < num_experts)


@triton.jit
def _rank_kernel(
    expert_N, counts_CB, counts_E, ends_E, row_N, slot_N, slots, num_experts,
    BLOCK: tl.constexpr, STEP: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    column = tl.arange(0, BUCKETS)
    counts = tl.load(counts_E + column, column < num_experts, other=0)
    ends = tl.cumsum(counts, 0)
    if chunk == 0:
        tl.store(ends_E + column, ends, column < num_experts)

    index = tl.arange(0, BLOCK)
    slot = chunk * BLOCK + index
    inside = slot < slots
    expert = tl.load(expert_N + slot, inside, other=-1).to(tl.int32)
    bucket = _bucket_of(expert, num_experts)
    # Buckets beyond the last expert are empty: the start of that of dead slots is the number of live ones.
    first = tl.gather(ends - counts, bucket, 0)
    before = tl.load(counts_CB + chunk * (num_experts + 1) + bucket, inside, other=0)

    # The whole chunk down and a few slots across: so the warps share the chunk, and each loads its part once.
    step = tl.arange(0, BLOCK // STEP)
    ranks = tl.zeros([BLOCK // STEP, STEP], tl.int32)
    for i in range(BLOCK // STEP):
        later = i * STEP + tl.arange(0, STEP)
        mine = tl.load(expert_N + chunk * BLOCK + later, chunk * BLOCK + later < slots, other=-1).to(tl.int32)
        same = (expert[:, None] == mine[None, :]) & (index[:, None] < later[None, :])
        ranks = tl.where((step == i)[:, None], tl.sum(same.to(tl.int32), 0)[None, :], ranks)
    # Ids of dead slots may differ among themselves, so they are counted rather than compared.
    dead = (bucket == num_experts).to(tl.int32)
    rank = tl.where(dead == 1, tl.cumsum(dead, 0) - 1, tl.reshape(ranks, [BLOCK]))
    row = first + before + rank
    tl.store(row_N + slot, tl.where(dead == 1, -1, row), inside)
    tl.store(slot_N + row, slot, inside)
