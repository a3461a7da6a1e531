"""Kernels of the grouped MLP in mxfp8; suffixes and tiles as in `ops.fp8_mlp.kernels`.

BLOCK contracted numbers share a scale. Rows of no expert are neither read nor written, except that
`turned_kernel` stores zeros for them.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import triton
import triton.language as tl

from graphmoe.ops.fp8_blocks.kernels import add_steps, load_mx, store_mx, store_turned
from graphmoe.ops.fp8_mlp.kernels import live_rows
from graphmoe.ops.grouped_mlp.rows_kernel import (
    add_bias,
    clamped,
    experts_of,
    gradients,
    in_turns,
    sigmoid_of,
    store,
)
from graphmoe.ops.grouped_mlp.weight_grad_kernel import with_rows


@triton.jit(do_not_specialize=["max_tiles"])
def rows_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, out_ptr, slot_ptr, ends_ptr, table_ptr, max_tiles, C,
    N: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, SUBTILES: tl.constexpr, FLATTEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store ``out[r] = w[e(r)] @ x[r]``, e(r) the expert of row r; x is [R, C], or [T, C] with GATHER."""
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    # C is not constexpr: a short loop would be unrolled, into more than registers hold
    num_tiles, blocks = tl.load(table_ptr), C // BLOCK
    m_range = tl.arange(0, BLOCK_M)
    for tile in tl.range(tl.program_id(0), num_tiles * COLUMN_TILES, tl.num_programs(0), flatten=FLATTEN):
        row_tile, column_tile = in_turns(tile, num_tiles, COLUMN_TILES, GROUP)
        column = column_tile * BLOCK_N
        expert = tl.load(table_ptr + 1 + row_tile)
        row = tl.load(table_ptr + 1 + max_tiles + row_tile)
        live = row + m_range < tl.load(ends_ptr + expert)
        near = row + tl.where(live, m_range, 0)
        if GATHER:
            near = tl.load(slot_ptr + near) // K
        near = near.to(tl.int64)
        beside = expert.to(tl.int64) * N + tl.minimum(column + tl.arange(0, BLOCK_N), N - 1)
        product = add_steps(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), x_ptr + near * C, xs_ptr + near * blocks,
            w_ptr + beside * C, ws_ptr + beside * blocks, 0, C, C, EVEN,
            BLOCK_M, BLOCK_N, BLOCK_C, BLOCK, UPCAST,
        )  # fmt: skip
        store(product, live, column, out_ptr + row.to(tl.int64) * N, N, BLOCK_M, BLOCK_N, SUBTILES)


@triton.jit
def swiglu_kernel(
    h_ptr, weight_ptr, slot_ptr, ends_ptr, hq_ptr, hs_ptr, aq_ptr, as_ptr, bias_ptr, experts, rows,
    F: tl.constexpr, LIMIT: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize h [R, H], and its activation [R, F] (`ops.swiglu`) unless ``aq`` is None."""
    live, first = live_rows(ends_ptr, experts, rows), tl.program_id(1) * COLUMNS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    H: tl.constexpr = 2 * F
    if tl.program_id(0) * ROWS < live:
        is_row, column = row < live, first + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (column < F)[None, :]
        at = row.to(tl.int64)[:, None] * H + column[None, :]
        gate = tl.load(h_ptr + at, inside, other=0.0).to(tl.float32)
        up = tl.load(h_ptr + at + F, inside, other=0.0).to(tl.float32)
        store_mx(gate, hq_ptr, hs_ptr, row, first, is_row, F, H, ROWS, COLUMNS, BLOCK)
        store_mx(up, hq_ptr + F, hs_ptr + F // BLOCK, row, first, is_row, F, H, ROWS, COLUMNS, BLOCK)
        if aq_ptr is not None:
            weight = tl.load(weight_ptr + tl.load(slot_ptr + row, is_row, other=0), is_row, other=0.0)
            expert = experts_of(row, is_row, ends_ptr, experts, BLOCK_E)[:, None]
            gate, up = add_bias(gate, up, bias_ptr, expert, column[None, :], inside, F)
            gate, up, steep = clamped(gate, up, LIMIT)
            a = gate * sigmoid_of(steep) * up * weight[:, None]
            store_mx(a, aq_ptr, as_ptr, row, first, is_row, F, F, ROWS, COLUMNS, BLOCK)


@triton.jit
def swiglu_grad_kernel(
    da_ptr, hq_ptr, hs_ptr, weight_ptr, slot_ptr, ends_ptr, dhq_ptr, dhs_ptr, aq_ptr, as_ptr, partial_ptr,
    bias_ptr, experts, rows,
    F: tl.constexpr, LIMIT: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dh [R, H], the weighted activation [R, F], ``partial`` dweight [column tiles, R] from da, h."""
    live, first = live_rows(ends_ptr, experts, rows), tl.program_id(1) * COLUMNS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    H: tl.constexpr = 2 * F
    UP: tl.constexpr = F // BLOCK
    if tl.program_id(0) * ROWS < live:
        is_row, column = row < live, first + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (column < F)[None, :]
        da = tl.load(da_ptr + row.to(tl.int64)[:, None] * F + column[None, :], inside, other=0.0)
        da = da.to(tl.float32)
        gate = load_mx(hq_ptr, hs_ptr, row, first, is_row, F, H, ROWS, COLUMNS, BLOCK)
        up = load_mx(hq_ptr + F, hs_ptr + UP, row, first, is_row, F, H, ROWS, COLUMNS, BLOCK)
        weight = tl.load(weight_ptr + tl.load(slot_ptr + row, is_row, other=0), is_row, other=0.0)
        expert = experts_of(row, is_row, ends_ptr, experts, BLOCK_E)[:, None]
        gate, up = add_bias(gate, up, bias_ptr, expert, column[None, :], inside, F)
        near, factor, steep = clamped(gate, up, LIMIT)
        sigmoid = sigmoid_of(steep)
        silu = near * sigmoid
        a = silu * factor
        to = partial_ptr + tl.program_id(1).to(tl.int64) * rows + row
        tl.store(to, tl.sum(da * a, 1), is_row)
        da *= weight[:, None]
        dgate, dup = gradients(da, gate, up, factor, sigmoid, silu, LIMIT)
        store_mx(a * weight[:, None], aq_ptr, as_ptr, row, first, is_row, F, F, ROWS, COLUMNS, BLOCK)
        store_mx(dgate, dhq_ptr, dhs_ptr, row, first, is_row, F, H, ROWS, COLUMNS, BLOCK)
        store_mx(dup, dhq_ptr + F, dhs_ptr + UP, row, first, is_row, F, H, ROWS, COLUMNS, BLOCK)


@triton.jit(do_not_specialize=["max_tiles"])
def turned_kernel(
    q_ptr, scale_ptr, slot_ptr, ends_ptr, table_ptr, to_q_ptr, to_scale_ptr, max_tiles, padded,
    C: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Transpose each expert's rows, of [R, C] or with GATHER [T, C], and requantize them -> q [C, padded]."""
    tile, first = tl.program_id(0), tl.program_id(1) * COLUMNS
    if tile < tl.load(table_ptr):
        expert = tl.load(table_ptr + 1 + tile)
        row = tl.load(table_ptr + 1 + max_tiles + tile) + tl.arange(0, BLOCK_R)
        live = row < tl.load(ends_ptr + expert)
        if GATHER:
            row = tl.load(slot_ptr + row, live, other=0) // K
        x = load_mx(q_ptr, scale_ptr, row, first, live, C, C, BLOCK_R, COLUMNS, BLOCK)
        at = tile * BLOCK_R
        store_turned(x, to_q_ptr, to_scale_ptr, at, first, padded, C, True, BLOCK_R, COLUMNS, BLOCK)


@triton.jit
def weight_grad_kernel(
    left_ptr, ls_ptr, right_ptr, rs_ptr, ends_ptr, out_ptr, E, in_front, padded,
    M: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr, BLOCK_E: tl.constexpr, BEHIND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
    SUBTILES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store wgrad ``out[e]`` = left @ right.T over the rows of expert e; ADD adds to ``out`` [E, M, N].

    Operands are [M, padded] and [N, padded]; an expert starts at a multiple of BLOCK_R. BEHIND:
    experts are replicas, after ``in_front`` own ones; those after the last with rows are not written.
    """
    TM: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    TN: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    blocks, known = padded // BLOCK, tl.arange(0, BLOCK_E)
    experts = with_rows(ends_ptr + in_front, E, BLOCK_E) if BEHIND else E
    ends = tl.load(ends_ptr + known, known < in_front + E, other=0)
    starts = tl.load(ends_ptr + known - 1, (known < in_front + E) & (known > 0), other=0)
    tiles = (ends - starts + BLOCK_R - 1) // BLOCK_R
    for tile in tl.range(tl.program_id(0), experts * TM * TN, tl.num_programs(0)):
        expert, within = tile // (TM * TN), tile % (TM * TN)
        m, n = within % TM * BLOCK_M, within // TM * BLOCK_N
        first = tl.sum(tl.where(known < in_front + expert, tiles, 0)) * BLOCK_R
        last = first + tl.sum(tl.where(known == in_front + expert, tiles, 0)) * BLOCK_R
        m_near = tl.minimum(m + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
        n_near = tl.minimum(n + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
        product = add_steps(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), left_ptr + m_near * padded, ls_ptr + m_near * blocks,
            right_ptr + n_near * padded, rs_ptr + n_near * blocks, first, last, padded, True,
            BLOCK_M, BLOCK_N, BLOCK_R, BLOCK, UPCAST,
        )  # fmt: skip
        inside = m + tl.arange(0, BLOCK_M) < M
        to = out_ptr + (tl.cast(expert, tl.int64) * M + m) * N
        store(product, inside, n, to, N, BLOCK_M, BLOCK_N, SUBTILES, ADD)
