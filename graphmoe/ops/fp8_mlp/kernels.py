"""Kernels of the grouped MLP in fp8.

Suffixes and tiles as in `grouped_mlp.rows_kernel`; T tokens. Rows of no expert are neither read nor written,
except that `transposed_kernel` pads each expert's rows with zeros to whole tiles. fp8 operands of a matrix
instruction must be contiguous along the contracted axis (CUTLASS, sm90 GMMA), hence the transposed copies.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import triton
import triton.language as tl

from graphmoe.ops.grouped_mlp.rows_kernel import (
    add_bias,
    clamped,
    experts_of,
    gradients,
    halves,
    in_turns,
    sigmoid_of,
    store,
)
from graphmoe.ops.grouped_mlp.weight_grad_kernel import with_rows

WIDEST = tl.constexpr(57344.0)  # largest number of e5m2, for gradients with known scales


@triton.jit
def power_of_two(amax, ABOVE: tl.constexpr, EXPONENT: tl.constexpr):
    power = tl.maximum(((amax.to(tl.int32, bitcast=True) + ABOVE) >> 23) - EXPONENT, 1)
    return if_finite(amax, power << 23), if_finite(amax, (254 - power) << 23)


@triton.jit
def if_finite(amax, bits):
    return tl.where(amax < float("inf"), bits.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def live_rows(ends_ptr, experts, rows):
    return tl.minimum(tl.load(ends_ptr + experts - 1), rows)


@triton.jit
def _saturated(x, scale, MOST: tl.constexpr):
    x *= 1 / scale
    size = tl.abs(x)
    beyond = tl.where(size < float("inf"), tl.where(x > 0, MOST, -MOST), float("nan"))
    return tl.where(size <= MOST, x, beyond)


@triton.jit
def quantise_rows_kernel(
    x_ptr, q_ptr, scale_ptr, largest_ptr, rows,
    N: tl.constexpr, C: tl.constexpr, ABOVE: tl.constexpr, EXPONENT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize x [R, C] by rows -> q, scales [R]; with ``largest``, every N rows (a matrix) share one."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    at = row.to(tl.int64)[:, None] * C
    amax = tl.zeros((ROWS,), tl.float32)
    if largest_ptr is not None:
        amax = tl.load(largest_ptr + row // N, is_row, other=0.0)
    else:
        for start in range(0, C, COLUMNS):
            column = (start + tl.arange(0, COLUMNS))[None, :]
            x = tl.load(x_ptr + at + column, is_row[:, None] & (column < C), other=0.0)
            amax = tl.maximum(amax, tl.max(tl.abs(x.to(tl.float32)), 1))
    scale, inverse = power_of_two(amax, ABOVE, EXPONENT)
    tl.store(scale_ptr + row, scale, is_row)
    for start in range(0, C, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        inside = is_row[:, None] & (column < C)
        x = tl.load(x_ptr + at + column, inside, other=0.0).to(tl.float32)
        tl.store(q_ptr + at + column, (x * inverse[:, None]).to(q_ptr.dtype.element_ty), inside)


@triton.jit
def quantise_columns_kernel(
    w_ptr, q_ptr, scale_ptr, largest_ptr,
    N: tl.constexpr, C: tl.constexpr, ABOVE: tl.constexpr, EXPONENT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize w [E, N, C] by columns -> q [E, C, N], scales [E, C]; with ``largest``, equal in a matrix."""
    expert, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    from_ptr = w_ptr + expert * N * C + column[None, :]
    amax = tl.zeros((COLUMNS,), tl.float32)
    if largest_ptr is not None:
        amax += tl.load(largest_ptr + expert)
    else:
        for start in range(0, N, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = (row < N)[:, None] & (column < C)[None, :]
            w = tl.load(from_ptr + row[:, None] * C, inside, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, tl.max(tl.abs(w), 0))
    scale, inverse = power_of_two(amax, ABOVE, EXPONENT)
    tl.store(scale_ptr + expert * C + column, scale, column < C)
    to_ptr = q_ptr + expert * N * C + column[:, None] * N
    for start in range(0, N, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < N)[:, None] & (column < C)[None, :]
        w = tl.load(from_ptr + row[:, None] * C, inside, other=0.0).to(tl.float32)
        q = (w * inverse[None, :]).to(q_ptr.dtype.element_ty)
        tl.store(to_ptr + row[None, :], q.T, (column < C)[:, None] & (row < N)[None, :])


@triton.jit(do_not_specialize=["max_tiles"])
def rows_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, out_ptr, slot_ptr, ends_ptr, table_ptr, max_tiles,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
    SUBTILES: tl.constexpr, FLATTEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store ``out[r] = w[e(r)] @ x[r]``, e(r) the expert of row r; x is [R, C], or [T, C] with GATHER."""
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_tiles = tl.load(table_ptr)
    m_range, c_range = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    for tile in tl.range(tl.program_id(0), num_tiles * COLUMN_TILES, tl.num_programs(0), flatten=FLATTEN):
        row_tile, column_tile = in_turns(tile, num_tiles, COLUMN_TILES, GROUP)
        column = column_tile * BLOCK_N
        expert = tl.load(table_ptr + 1 + row_tile)
        row = tl.load(table_ptr + 1 + max_tiles + row_tile)
        live = row + m_range < tl.load(ends_ptr + expert)
        near = row + tl.where(live, m_range, 0)
        if GATHER:
            near = tl.load(slot_ptr + near) // K
        x_from = x_ptr + near.to(tl.int64)[:, None] * C + c_range[None, :]
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for c in range(0, C, BLOCK_C):
            if C % BLOCK_C == 0:
                x = tl.load(x_from + c)
            else:
                x = tl.load(x_from + c, mask=(c + c_range < C)[None, :], other=0.0)
            w = w_ptr.load([expert, column, c]).reshape(BLOCK_N, BLOCK_C).T
            if UPCAST:  # the interpreter's fp8 product is wrong
                x, w = x.to(tl.float32), w.to(tl.float32)
            product = tl.dot(x, w, product)
        columns = column + tl.arange(0, BLOCK_N)
        ws = tl.load(ws_ptr + expert * N + columns, columns < N, other=0.0)
        # two factors of xs: the sum times a large xs may overflow; a tile of xs * ws spills on sm_100
        xs = tl.load(xs_ptr + near)
        half = ((xs.to(tl.int32, bitcast=True) >> 23) + 127) >> 1
        product *= (half << 23).to(tl.float32, bitcast=True)[:, None]
        product *= ws[None, :]
        product *= (xs * ((254 - half) << 23).to(tl.float32, bitcast=True))[:, None]
        store(product, live, column, out_ptr + row.to(tl.int64) * N, N, BLOCK_M, BLOCK_N, SUBTILES)


@triton.jit
def _whole_rows(first, live, F: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    is_row, long = row < live, row.to(tl.int64)
    block = tl.arange(0, BLOCKS)[None, :]
    column = block[:, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    inside = is_row[:, None, None] & (column < F)
    IN_ROW: tl.constexpr = (F + BLOCK - 1) // BLOCK
    of_scales, known = long[:, None] * (2 * IN_ROW) + block, is_row[:, None] & (block < IN_ROW)
    at, at_half = long[:, None, None] * (2 * F) + column, long[:, None, None] * F + column
    return row, is_row, column, inside, at, at_half, of_scales, known


@triton.jit
def _largest_and_sum(a, dh, dweight, other_a, other_dh, other_dweight):
    return tl.maximum(a, other_a), tl.maximum(dh, other_dh), dweight + other_dweight


@triton.jit
def swiglu_kernel(
    h_ptr, weight_ptr, slot_ptr, ends_ptr, hq_ptr, hs_ptr, aq_ptr, as_ptr, known_ptr, largest_ptr,
    bias_ptr, experts, rows,
    F: tl.constexpr, LIMIT: tl.constexpr, BLOCK_E: tl.constexpr,
    ABOVE: tl.constexpr, EXPONENT: tl.constexpr, MOST: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize h [R, H] by blocks, and its activation [R, F] (`ops.swiglu`) by rows unless ``aq`` is None.

    If the activation has a delayed scale (``known``), each program stores its maximum in ``largest``.
    """
    live = live_rows(ends_ptr, experts, rows)
    first = tl.program_id(0) * ROWS
    if first < live:
        IN_ROW: tl.constexpr = (F + BLOCK - 1) // BLOCK
        row, is_row, column, inside, at, at_half, of_scales, known = _whole_rows(
            first, live, F, ROWS, BLOCKS, BLOCK
        )
        expert = experts_of(row, is_row, ends_ptr, experts, BLOCK_E)[:, None, None]
        gate = tl.load(h_ptr + at, inside, other=0.0).to(tl.float32)
        up = tl.load(h_ptr + at + F, inside, other=0.0).to(tl.float32)
        of_gate, inverse_gate = power_of_two(tl.max(tl.abs(gate), 2), ABOVE, EXPONENT)
        of_up, inverse_up = power_of_two(tl.max(tl.abs(up), 2), ABOVE, EXPONENT)
        s_at = hs_ptr + of_scales
        tl.store(s_at, of_gate, known)
        tl.store(s_at + IN_ROW, of_up, known)
        kind = hq_ptr.dtype.element_ty
        tl.store(hq_ptr + at, (gate * inverse_gate[:, :, None]).to(kind), inside)
        tl.store(hq_ptr + at + F, (up * inverse_up[:, :, None]).to(kind), inside)
        if aq_ptr is not None:
            weight = tl.load(weight_ptr + tl.load(slot_ptr + row, is_row, other=0), is_row, other=0.0)
            gate, up = add_bias(gate, up, bias_ptr, expert, column, inside, F)
            gate, up, steep = clamped(gate, up, LIMIT)
            a = gate * sigmoid_of(steep) * up * weight[:, None, None]
            amax = tl.max(tl.max(tl.abs(a), 2), 1)
            if known_ptr is not None:
                scale = tl.load(known_ptr) + tl.zeros((ROWS,), tl.float32)
                tl.store(largest_ptr + tl.program_id(0), tl.max(amax, 0))
                a = _saturated(a, scale[:, None, None], MOST)
            else:
                scale, inverse = power_of_two(amax, ABOVE, EXPONENT)
                a = a * inverse[:, None, None]
            tl.store(as_ptr + row, scale, is_row)
            tl.store(aq_ptr + at_half, a.to(kind), inside)


@triton.jit
def swiglu_grad_kernel(
    da_ptr, hq_ptr, hs_ptr, weight_ptr, slot_ptr, ends_ptr, dhq_ptr, dhs_ptr, aq_ptr, as_ptr, dweight_ptr,
    known_a_ptr, known_ptr, largest_ptr, bias_ptr, experts, rows,
    F: tl.constexpr, LIMIT: tl.constexpr, BLOCK_E: tl.constexpr,
    ABOVE: tl.constexpr, EXPONENT: tl.constexpr, MOST: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dh [R, H], the weighted activation [R, F] and dweight [R] from da [R, F] and h.

    If dh has a delayed scale (``known``), each program stores its maximum of dh in ``largest``.
    """
    live = live_rows(ends_ptr, experts, rows)
    first = tl.program_id(0) * ROWS
    if first < live:
        IN_ROW: tl.constexpr = (F + BLOCK - 1) // BLOCK
        row, is_row, column, inside, at, at_half, of_scales, known = _whole_rows(
            first, live, F, ROWS, BLOCKS, BLOCK
        )
        expert = experts_of(row, is_row, ends_ptr, experts, BLOCK_E)[:, None, None]
        da = tl.load(da_ptr + at_half, inside, other=0.0).to(tl.float32)
        s_at = hs_ptr + of_scales
        gate = tl.load(hq_ptr + at, inside, other=0.0).to(tl.float32)
        gate *= tl.load(s_at, known, other=0.0)[:, :, None]
        up = tl.load(hq_ptr + at + F, inside, other=0.0).to(tl.float32)
        up *= tl.load(s_at + IN_ROW, known, other=0.0)[:, :, None]
        weight = tl.load(weight_ptr + tl.load(slot_ptr + row, is_row, other=0), is_row, other=0.0)
        gate, up = add_bias(gate, up, bias_ptr, expert, column, inside, F)
        near, factor, steep = clamped(gate, up, LIMIT)
        sigmoid = sigmoid_of(steep)
        silu = near * sigmoid
        a = silu * factor
        in_blocks = tl.sum(da * a, 2)
        a *= weight[:, None, None]
        da *= weight[:, None, None]
        dgate, dup = gradients(da, gate, up, factor, sigmoid, silu, LIMIT)
        of_blocks = tl.max(tl.abs(a), 2), tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), 2), in_blocks
        of_a, of_dh, dweight = tl.reduce(of_blocks, 1, _largest_and_sum)
        tl.store(dweight_ptr + row, dweight, is_row)
        if known_ptr is not None:
            a_scale = tl.load(known_a_ptr) + tl.zeros((ROWS,), tl.float32)
            dh_scale = tl.load(known_ptr) + tl.zeros((ROWS,), tl.float32)
            tl.store(largest_ptr + tl.program_id(0), tl.max(of_dh, 0))
            a = _saturated(a, a_scale[:, None, None], MOST)
            dgate = _saturated(dgate, dh_scale[:, None, None], WIDEST)
            dup = _saturated(dup, dh_scale[:, None, None], WIDEST)
        else:
            a_scale, a_inverse = power_of_two(of_a, ABOVE, EXPONENT)
            dh_scale, dh_inverse = power_of_two(of_dh, ABOVE, EXPONENT)
            a *= a_inverse[:, None, None]
            dgate *= dh_inverse[:, None, None]
            dup *= dh_inverse[:, None, None]
        tl.store(as_ptr + row, a_scale, is_row)
        tl.store(dhs_ptr + row, dh_scale, is_row)
        tl.store(aq_ptr + at_half, a.to(aq_ptr.dtype.element_ty), inside)
        kind = dhq_ptr.dtype.element_ty
        tl.store(dhq_ptr + at, dgate.to(kind), inside)
        tl.store(dhq_ptr + at + F, dup.to(kind), inside)


@triton.jit
def expert_scales_kernel(
    dhs_ptr, xs_ptr, as_ptr, dys_ptr, slot_ptr, ends_ptr, scale_ptr, tile_ptr,
    K: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store each expert's largest products of rows' scales: dh * x, a * dy [2, E]; and first tile [E + 1]."""
    expert = tl.program_id(0)
    known = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + known, mask=known < E, other=0)
    starts = tl.load(ends_ptr + known - 1, mask=(known < E) & (known > 0), other=0)
    tiles = (ends - starts + BLOCK_R - 1) // BLOCK_R
    tl.store(tile_ptr + expert, tl.sum(tl.where(known < expert, tiles, 0)))
    if expert == 0:
        tl.store(tile_ptr + E, tl.sum(tl.where(known < E, tiles, 0)))
    start, end = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), tl.load(ends_ptr + expert)
    of_up, of_down = tl.full((BLOCK,), 2.0**-126, tl.float32), tl.full((BLOCK,), 2.0**-126, tl.float32)
    for first in range(start, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        token = tl.load(slot_ptr + row, row < end, other=0) // K
        up = tl.load(dhs_ptr + row, row < end, other=0.0) * tl.load(xs_ptr + token, row < end, other=0.0)
        down = tl.load(as_ptr + row, row < end, other=0.0) * tl.load(dys_ptr + token, row < end, other=0.0)
        of_up, of_down = tl.maximum(of_up, up), tl.maximum(of_down, down)
    tl.store(scale_ptr + expert, tl.max(of_up))
    tl.store(scale_ptr + E + expert, tl.max(of_down))


@triton.jit(do_not_specialize=["max_tiles"])
def transposed_kernel(
    q_ptr, own_ptr, other_ptr, slot_ptr, scale_ptr, ends_ptr, table_ptr, to_ptr, max_tiles, padded,
    C: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Transpose each expert's rows -> [C, padded]: rows of [R, C], rescaled, or with GATHER their tokens."""
    tile, part = tl.program_id(0), tl.program_id(1)
    if tile < tl.load(table_ptr):
        expert = tl.load(table_ptr + 1 + tile)
        row = tl.load(table_ptr + 1 + max_tiles + tile) + tl.arange(0, BLOCK_R)
        live = row < tl.load(ends_ptr + expert)
        token = tl.load(slot_ptr + row, live, other=0) // K
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        inside = live[:, None] & (column < C)[None, :]
        near = token if GATHER else row
        q = tl.load(q_ptr + near.to(tl.int64)[:, None] * C + column[None, :], inside, other=0.0)
        if not GATHER:
            both = tl.load(own_ptr + row, live, other=0.0) * tl.load(other_ptr + token, live, other=0.0)
            factor = both / tl.load(scale_ptr + expert)
            q = (q.to(tl.float32) * factor[:, None]).to(to_ptr.dtype.element_ty)
        at = tl.cast(tile, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        to = to_ptr + column.to(tl.int64)[:, None] * padded + at[None, :]
        tl.store(to, q.T, (column < C)[:, None])


@triton.jit
def transpose_kernel(
    q_ptr, factor_ptr, to_ptr, rows, stride,
    C: tl.constexpr, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Transpose rows [R, C], times factors if any -> [C, stride]; columns from R on are zero."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < C)[None, :]
    q = tl.load(q_ptr + row.to(tl.int64)[:, None] * C + column[None, :], inside, other=0.0)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + row, row < rows, other=0.0)
        q = (q.to(tl.float32) * factor[:, None]).to(to_ptr.dtype.element_ty)
    to = to_ptr + column.to(tl.int64)[:, None] * stride + row[None, :]
    tl.store(to, q.T, (column < C)[:, None] & (row < stride)[None, :])


@triton.jit
def weight_grad_kernel(
    left_ptr, right_ptr, scale_ptr, tile_ptr, out_ptr,
    E, M: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr, DESCRIBED: tl.constexpr,
    BEHIND: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, SUBTILES: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Store ``out[e]`` = scale[e] * left @ right.T (wgrad) over the rows of expert e; ADD adds to ``out``.

    Operands are TMA descriptors of [M, rows] and [N, rows]; so is ``out`` [E, M, N] if DESCRIBED. BEHIND:
    experts are replicas of other ranks'; those after the last one with rows are not written.
    """
    TM: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    TN: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    experts = with_rows(tile_ptr + 1, E, BLOCK_E) if BEHIND else E
    for tile in tl.range(tl.program_id(0), experts * TM * TN, tl.num_programs(0)):
        expert, within = tile // (TM * TN), tile % (TM * TN)
        m, n = within % TM * BLOCK_M, within // TM * BLOCK_N
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for rows in range(tl.load(tile_ptr + expert), tl.load(tile_ptr + expert + 1)):
            left, right = left_ptr.load([m, rows * BLOCK_R]), right_ptr.load([n, rows * BLOCK_R])
            if UPCAST:
                left, right = left.to(tl.float32), right.to(tl.float32)
            product = tl.dot(left, right.T, product)
        product *= tl.load(scale_ptr + expert)
        if DESCRIBED:
            _store_tile(product, out_ptr, expert, m, n, BLOCK_M, BLOCK_N, SUBTILES)
        else:
            inside = m + tl.arange(0, BLOCK_M) < M
            to = out_ptr + (tl.cast(expert, tl.int64) * M + m) * N
            PARTS: tl.constexpr = (SUBTILES + 1) // 2 if ADD else SUBTILES
            store(product, inside, n, to, N, BLOCK_M, BLOCK_N, PARTS, ADD)


@triton.jit
def _store_tile(product, out, expert, m, n, M: tl.constexpr, N: tl.constexpr, SUBTILES: tl.constexpr):
    if SUBTILES == 1:
        out.store([expert, m, n], product.reshape(1, M, N))
    else:
        left, right = halves(product, M, N)
        _store_tile(left, out, expert, m, n, M, N // 2, SUBTILES // 2)
        _store_tile(right, out, expert, m, n + N // 2, M, N // 2, SUBTILES // 2)
