"""Kernels of permute, unpermute and the routing plan.

Suffixes as in `graphmoe.ops.permute`. A program owns a tile of tokens and columns and loops over their K
rows. The plan takes three launches and no sort, with C = ceil(T * K / BLOCK) chunks of slots and E + 1
buckets, one for unrouted slots.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment,index,var-annotated"
# The arguments and tuples of a Triton function have no Python types.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphmoe.ops import num_warps, tile

THREADS, TILE = 256, 2048  # threads of a program; elements of its tile, 16 bytes of bf16 per thread
MAX_TOKENS = 256
AT_ONCE = tl.constexpr(16)  # slots in one round; registers hold a piece of each slot's row
DOT_TILE = 4096  # elements [tokens, slots, columns] of a tile: 16 fp32 sums per thread
BLOCK, STEP = 256, 32  # slots of a chunk, and slots compared with it at once
SCAN_CHUNKS, SCAN_BUCKETS = 256, 8  # second launch; 8 buckets are one sector of 32 bytes


def spread_rows(x_TD: Tensor, row_TK: Tensor, weight_TK: Tensor | None, num_rows: int) -> Tensor:
    """Return y [R, D] with y[row[t, k]] = weight[t, k] * x[t]; other rows are unwritten. No device sync."""
    y_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    _launch(_spread_kernel, x_TD.contiguous(), y_RD, row_TK, weight_TK)
    return y_RD


def sum_rows(y_RD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """Return the sum over k, in order, of weight[t, k] * y[row[t, k]] -> [T, D], added in fp32. No sync."""
    x_TD = y_RD.new_empty(len(row_TK), y_RD.shape[1])
    _launch(_sum_kernel, y_RD.contiguous(), x_TD, row_TK, weight_TK)
    return x_TD


def dot_rows(dx_TD: Tensor, y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Return the dot products of dx[t] and y[row[t, k]] -> fp32 [T, K], summed in a fixed order. No sync."""
    (tokens, slots), columns = row_TK.shape, y_RD.shape[1]
    dot_TK = torch.empty(tokens, slots, dtype=torch.float32, device=y_RD.device)
    if dot_TK.numel() == 0:
        return dot_TK
    padded = triton.next_power_of_2(slots)
    elements = max(DOT_TILE // padded, 1)
    height, width = tile(columns, elements, min(elements, 512), MAX_TOKENS)
    _dot_kernel[(triton.cdiv(tokens, height),)](
        dx_TD.contiguous(), y_RD.contiguous(), row_TK.contiguous(), dot_TK, tokens, columns,
        K=slots, SLOTS=padded, TOKENS=height, COLUMNS=width, num_warps=num_warps(THREADS),
    )  # fmt: skip
    return dot_TK


def _launch(kernel: Any, source: Tensor, target: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> None:
    (tokens, slots), columns = row_TK.shape, source.shape[1]
    height, width = tile(columns, TILE, TILE, MAX_TOKENS)
    programs = triton.cdiv(tokens, height) * triton.cdiv(columns, width)
    if programs == 0:
        return
    kernel[(programs,)](
        source, target, row_TK.contiguous(), None if weight_TK is None else weight_TK.contiguous(), tokens,
        columns,
        K=slots, TOKENS=height, COLUMNS=width, num_warps=num_warps(THREADS),
    )  # fmt: skip


@triton.jit
def _tile(tokens, columns, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    across = tl.cdiv(columns, COLUMNS)
    token = (tl.program_id(0) // across) * TOKENS + tl.arange(0, TOKENS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    return token, column, token < tokens, column < columns


@triton.jit
def _spread_kernel(
    x_TD, y_RD, row_TK, weight_TK, tokens, columns,
    K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, column, is_token, is_column = _tile(tokens, columns, TOKENS, COLUMNS)
    at = x_TD + token.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(at, is_token[:, None] & is_column[None, :], other=0.0)
    slot = token.to(tl.int64) * K
    for first in range(0, K, AT_ONCE):
        rows, weights = (), ()
        for k in tl.static_range(min(K, AT_ONCE)):  # before the first store, which no load may overtake
            is_slot = is_token & (first + k < K)
            rows = rows + (tl.load(row_TK + slot + first + k, is_slot, other=-1).to(tl.int64),)
            if weight_TK is not None:
                weight = tl.load(weight_TK + slot + first + k, is_slot, other=0.0)
                weights = weights + (weight.to(tl.float32),)
        for k in tl.static_range(len(rows)):
            y = x
            if weight_TK is not None:
                y = (x.to(tl.float32) * weights[k][:, None]).to(x.dtype)
            to = y_RD + rows[k][:, None] * columns + column[None, :]
            tl.store(to, y, (rows[k] >= 0)[:, None] & is_column[None, :])


@triton.jit
def _sum_kernel(
    y_RD, x_TD, row_TK, weight_TK, tokens, columns,
    K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, column, is_token, is_column = _tile(tokens, columns, TOKENS, COLUMNS)
    slot = token.to(tl.int64) * K
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for first in range(0, K, AT_ONCE):
        rows, terms = (), ()
        for k in tl.static_range(min(K, AT_ONCE)):
            is_slot = is_token & (first + k < K)
            rows = rows + (tl.load(row_TK + slot + first + k, is_slot, other=-1).to(tl.int64),)
        for k in tl.static_range(len(rows)):  # all loads are under way before the first addition waits
            at = y_RD + rows[k][:, None] * columns + column[None, :]
            terms = terms + (tl.load(at, (rows[k] >= 0)[:, None] & is_column[None, :], other=0.0),)
        for k in tl.static_range(len(rows)):
            term = terms[k].to(tl.float32)
            if weight_TK is not None:
                is_slot = is_token & (first + k < K)
                term *= tl.load(weight_TK + slot + first + k, is_slot, other=0.0).to(tl.float32)[:, None]
            total += term
    to = x_TD + token.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(to, total.to(x_TD.dtype.element_ty), is_token[:, None] & is_column[None, :])


@triton.jit
def _dot_kernel(
    dx_TD, y_RD, row_TK, dot_TK, tokens, columns,
    K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Each row of the tile loads its token again, from L1: sharing it takes two barriers in each round.
    index = tl.arange(0, TOKENS * SLOTS)
    token, k = (tl.program_id(0) * TOKENS + index // SLOTS).to(tl.int64), index % SLOTS
    is_slot = (token < tokens) & (k < K)
    row = tl.load(row_TK + token * K + k, is_slot, other=-1).to(tl.int64)
    dx_at, y_at = dx_TD + token[:, None] * columns, y_RD + row[:, None] * columns
    total = tl.zeros([TOKENS * SLOTS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        is_value = (row >= 0)[:, None] & (column < columns)
        dx = tl.load(dx_at + column, is_value, other=0.0).to(tl.float32)
        total += dx * tl.load(y_at + column, is_value, other=0.0).to(tl.float32)
    tl.store(dot_TK + token * K + k, tl.sum(total, 1), is_slot)


def routing_plan(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return int32 rows per expert [E], ends [E], row of each slot [T, K], slot of each row [R]. No sync."""
    expert_TK = expert_TK.contiguous()
    counts_E, ends_E = (_empty(expert_TK, num_experts) for _ in range(2))
    row_TK, slot_R = _empty(expert_TK, *expert_TK.shape), _empty(expert_TK, expert_TK.numel())
    slots = expert_TK.numel()
    if slots == 0:
        return counts_E.zero_(), ends_E.zero_(), row_TK, slot_R
    chunks, buckets = triton.cdiv(slots, BLOCK), num_experts + 1
    padded = triton.next_power_of_2(max(buckets, 64))  # the histogram wants a bin for each lane of a warp
    # Count the slots of each chunk by bucket; turn counts into prefix sums over chunks; rank the slots of a
    # chunk by comparing all pairs. Only integers are added, so the result does not depend on the order.
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
    # buckets beyond the last expert are empty: the dead slots' bucket starts at the number of live slots
    first = tl.gather(ends - counts, bucket, 0)
    before = tl.load(counts_CB + chunk * (num_experts + 1) + bucket, inside, other=0)

    # the whole chunk down, a few slots across: the warps share the chunk, and each loads its part once
    step = tl.arange(0, BLOCK // STEP)
    ranks = tl.zeros([BLOCK // STEP, STEP], tl.int32)
    for i in range(BLOCK // STEP):
        later = i * STEP + tl.arange(0, STEP)
        mine = tl.load(expert_N + chunk * BLOCK + later, chunk * BLOCK + later < slots, other=-1).to(tl.int32)
        same = (expert[:, None] == mine[None, :]) & (index[:, None] < later[None, :])
        ranks = tl.where((step == i)[:, None], tl.sum(same.to(tl.int32), 0)[None, :], ranks)
    # ids of dead slots may differ, so they are counted rather than compared
    dead = (bucket == num_experts).to(tl.int32)
    rank = tl.where(dead == 1, tl.cumsum(dead, 0) - 1, tl.reshape(ranks, [BLOCK]))
    row = first + before + rank
    tl.store(row_N + slot, tl.where(dead == 1, -1, row), inside)
    tl.store(slot_N + row, slot, inside)
