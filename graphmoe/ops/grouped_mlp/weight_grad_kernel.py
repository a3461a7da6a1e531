"""wgrad of a grouped GEMM: one persistent kernel, expert by expert.

Suffixes: R routed rows, T tokens, E experts, K choices, M and N the axes of a weight. BLOCK_M and BLOCK_N are
the sizes of a tile of the result, BLOCK_R the rows of one loop iteration.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import triton
import triton.language as tl
from torch import Tensor

from graphmoe.ops import num_warps
from graphmoe.ops.grouped_mlp.rows_kernel import in_turns, store

# elements that a program stores at once; programs if most experts may have no rows
INTO_BLOCK, INTO_PROGRAMS = 4096, 1024


def into(total: Tensor, gradient: Tensor, *, add: bool, ends_E: Tensor | None = None) -> None:
    """Copy a gradient to a total of another dtype, or add it, in half the time of torch's copy."""
    assert total.is_contiguous() and total.shape == gradient.shape
    size, E = total.numel(), 0 if ends_E is None else len(ends_E)
    if size:
        programs = triton.cdiv(size, INTO_BLOCK)
        into_kernel[(min(programs, INTO_PROGRAMS) if E else programs,)](
            gradient.contiguous(), total, ends_E, size // max(E, 1),
            E=E, BLOCK_E=triton.next_power_of_2(max(E, 1)), ADD=add, BLOCK=INTO_BLOCK,
            num_warps=num_warps(256),
        )  # fmt: skip


@triton.jit
def weight_grad_kernel(
    left_ptr, right_ptr, out_ptr, slot_ptr, ends_ptr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BEHIND: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATHER_LEFT: tl.constexpr,
    DESCRIPTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr, SUBTILES: tl.constexpr, ADD: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store in ``out[e]`` [E, M, N] the sum of outer(left[r], right[r]) over the rows of e, or ADD it.

    With GATHER_LEFT left is [T, M], read at ``slot[r] // K``, and right is [R, N]; else left is [R, M] and
    right is [T, N]. BEHIND is 1 if ``ends`` are those of replicas, after those of own experts, else 0;
    replicas after the last one with rows are not written.
    """
    M_TILES: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = M_TILES * N_TILES
    experts = with_rows(ends_ptr, E, BLOCK_E) if BEHIND else E
    steps = 0
    for tile in range(tl.program_id(0), experts * TILES, tl.num_programs(0)):
        expert = tile // TILES
        start = tl.load(ends_ptr + expert - 1, mask=expert + BEHIND > 0, other=0)
        rows = tl.load(ends_ptr + expert) - start
        steps += tl.maximum((rows + BLOCK_R - 1) // BLOCK_R, 1)
    left_from, right_from = left_ptr, right_ptr
    if DESCRIPTOR:
        known = tl.maximum(tl.load(ends_ptr + E - 1), 1)
        if GATHER_LEFT:
            right_from = tl.make_tensor_descriptor(right_ptr, [known, N], [N, 1], [BLOCK_R, BLOCK_N])
        else:
            left_from = tl.make_tensor_descriptor(left_ptr, [known, M], [M, 1], [BLOCK_R, BLOCK_M])
    r_range = tl.arange(0, BLOCK_R)
    tile = tl.program_id(0) - tl.num_programs(0)
    expert, row, end, m, n = 0, 0, 0, 0, 0
    next_slot = tl.zeros((BLOCK_R,), tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # One loop over all steps, so that the first loads of a tile overlap the store of the last one. Rows
    # beyond an expert's end are masked on both sides, since dead rows may hold NaN. A descriptor cannot
    # mask: then one side is masked, and the other ends at the last live row.
    for _ in range(steps):
        # The pipeliner runs ahead with all that the loads depend on: nothing here may wait for the product.
        row += BLOCK_R
        if row >= end:
            tile += tl.num_programs(0)
            expert = tile // TILES
            m_tile, n_tile = in_turns(tile % TILES, M_TILES, N_TILES, GROUP)
            m, n = m_tile * BLOCK_M, n_tile * BLOCK_N
            row = tl.load(ends_ptr + expert - 1, mask=expert + BEHIND > 0, other=0)
            end = tl.load(ends_ptr + expert)
            next_slot = tl.load(slot_ptr + row + r_range, mask=row + r_range < end, other=0)
        rows = row + r_range
        live = rows < end
        token = next_slot // K
        # One step early; left to the pipeliner, the rows would wait for their slots.
        next_slot = tl.load(slot_ptr + rows + BLOCK_R, mask=rows + BLOCK_R < end, other=0)
        left_row = token if GATHER_LEFT else rows
        right_row = rows if GATHER_LEFT else token
        left = _load_left(left_from, left_row, live, row, end, m, M, DESCRIPTOR and not GATHER_LEFT, BLOCK_M)
        right = _load_right(right_from, right_row, live, row, end, n, N, DESCRIPTOR and GATHER_LEFT, BLOCK_N)
        if UPCAST:  # the interpreter multiplies bf16 wrongly
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
        if row + BLOCK_R >= end:
            inside, out = m + tl.arange(0, BLOCK_M) < M, out_ptr + (expert.to(tl.int64) * M + m) * N
            store(total, inside, n, out, N, BLOCK_M, BLOCK_N, SUBTILES, ADD)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def with_rows(ends_ptr, E, BLOCK_E: tl.constexpr):
    """Return the number of replicas up to the last one with rows; ends of own experts precede ``ends``."""
    experts = tl.arange(0, BLOCK_E)
    last = tl.load(ends_ptr + E - 1)
    ends = tl.load(ends_ptr + experts, mask=experts < E, other=2**31 - 1)
    return tl.sum((ends < last).to(tl.int32), 0) + (tl.load(ends_ptr - 1) < last).to(tl.int32)


@triton.jit
def into_kernel(
    gradient_ptr, total_ptr, ends_ptr, numbers,
    E: tl.constexpr, BLOCK_E: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store or ADD ``numbers`` elements; if E > 0, as many for each replica up to the last one with rows."""
    end = tl.cast(numbers, tl.int64)
    if E > 0:
        end *= with_rows(ends_ptr, E, BLOCK_E)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, end, step):
        index = start + tl.arange(0, BLOCK)
        mask = index < end
        value = tl.load(gradient_ptr + index, mask=mask).to(tl.float32)
        if ADD:
            value += tl.load(total_ptr + index, mask=mask).to(tl.float32)
        tl.store(total_ptr + index, value.to(total_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_left(
    source, rows, live, row, end, m, M: tl.constexpr, DESCRIPTOR: tl.constexpr, BLOCK_M: tl.constexpr
):
    columns = m + tl.arange(0, BLOCK_M)
    if DESCRIPTOR:  # an expert without rows loads zeros, from beyond the last row
        return source.load([tl.where(row < end, row, 1 << 30), m]).T
    else:
        ptrs = source + rows.to(tl.int64)[None, :] * M + columns[:, None]
        mask = live[None, :] if M % BLOCK_M == 0 else live[None, :] & (columns < M)[:, None]
        return tl.load(ptrs, mask=mask, other=0)


@triton.jit
def _load_right(
    source, rows, live, row, end, n, N: tl.constexpr, DESCRIPTOR: tl.constexpr, BLOCK_N: tl.constexpr
):
    columns = n + tl.arange(0, BLOCK_N)
    if DESCRIPTOR:
        return source.load([tl.where(row < end, row, 1 << 30), n])
    else:
        ptrs = source + rows.to(tl.int64)[:, None] * N + columns[None, :]
        mask = live[:, None] if N % BLOCK_N == 0 else live[:, None] & (columns < N)[None, :]
        return tl.load(ptrs, mask=mask, other=0)
