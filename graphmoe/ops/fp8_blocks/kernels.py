"""Kernels of operands with a scale for each block, and of products of mxfp8.

Suffixes as in the package. BLOCK is the number of rows or columns with one scale, MX says which scales these
are. A program has ROWS x COLUMNS numbers of what it reads, whole blocks.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import triton
import triton.language as tl

from graphmoe.ops.fp8_mlp.kernels import power_of_two
from graphmoe.ops.grouped_mlp.rows_kernel import in_turns, store


@triton.jit
def _scales(amax, MX: tl.constexpr):
    """The scale of a block as it is stored, and the inverse of that scale."""
    if MX:
        power = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 8, 0)
        stored = power.to(tl.uint8)
        inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    else:
        stored, inverse = power_of_two(amax, 0x1FFFFF, 8)
    return stored, inverse


@triton.jit
def _powers(scale):
    """`mx_powers`."""
    power = scale.to(tl.int32)
    return tl.where(power > 0, power << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(x, kind: tl.constexpr, MX: tl.constexpr):
    if MX:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(kind)


@triton.jit
def squares_kernel(
    w_ptr, q_ptr, scale_ptr,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """q and the scales of a weight [N, K], or of the transposed one. A program has a block of the result.

    Scales have PADDED columns; the blocks of those behind the last are empty.
    """
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    n = (column if TURNED else row) + tl.arange(0, BLOCK)
    k = (row if TURNED else column) + tl.arange(0, BLOCK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :], inside, other=0.0).to(tl.float32)
    scale, inverse = _scales(tl.max(tl.max(tl.abs(w), 1), 0), False)
    tl.store(scale_ptr + tl.program_id(0) * PADDED + tl.program_id(1), scale)
    q = _numbers(w * inverse, q_ptr.dtype.element_ty, False)
    if TURNED:
        tl.store(q_ptr + k.to(tl.int64)[:, None] * N + n[None, :], q.T, (k < K)[:, None] & (n < N)[None, :])
    else:
        tl.store(q_ptr + n.to(tl.int64)[:, None] * K + k[None, :], q, inside)


@triton.jit
def mx_rows_kernel(
    x_ptr, q_ptr, scale_ptr, R, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`quantise_mx` of [R, C]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, inside = row[:, None] * C + column[None, :], (row < R)[:, None] & (column < C)[None, :]
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    blocks = x.reshape(ROWS, COLUMNS // BLOCK, BLOCK)
    scale, inverse = _scales(tl.max(tl.abs(blocks), 2), True)
    q = _numbers(blocks * inverse[:, :, None], q_ptr.dtype.element_ty, True)
    tl.store(q_ptr + at, q.reshape(ROWS, COLUMNS), inside)
    block = tl.program_id(1) * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
    known = (row < R)[:, None] & (block < C // BLOCK)[None, :]
    tl.store(scale_ptr + row[:, None] * (C // BLOCK) + block[None, :], scale, known)


@triton.jit
def turned_kernel(
    x_ptr, of_x_ptr, q_ptr, scale_ptr, R, PADDED,
    C: tl.constexpr, MX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """q [C, PADDED] with scales along the rows of x [R, C], whose numbers have scales where there are any."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column, long = row < R, column < C, row.to(tl.int64)
    inside = is_row[:, None] & is_column[None, :]
    x = tl.load(x_ptr + long[:, None] * C + column[None, :], inside, other=0.0).to(tl.float32)
    if of_x_ptr is not None:
        if MX:
            at = long[:, None] * (C // BLOCK) + (column // BLOCK)[None, :]
            x *= _powers(tl.load(of_x_ptr + at, inside, other=0))
        else:
            at = (column // BLOCK).to(tl.int64)[None, :] * R + row[:, None]
            x *= tl.load(of_x_ptr + at, inside, other=0.0)
    blocks = x.reshape(ROWS // BLOCK, BLOCK, COLUMNS)
    scale, inverse = _scales(tl.max(tl.abs(blocks), 1), MX)
    q = _numbers(blocks * inverse[:, None, :], q_ptr.dtype.element_ty, MX).reshape(ROWS, COLUMNS)
    to_ptr = q_ptr + column.to(tl.int64)[:, None] * PADDED + row[None, :]
    tl.store(to_ptr, q.T, is_column[:, None] & (row < PADDED)[None, :])
    block = tl.program_id(0) * (ROWS // BLOCK) + tl.arange(0, ROWS // BLOCK)
    count = PADDED // BLOCK
    known = (block < count)[:, None] & is_column[None, :]
    if MX:
        at = column.to(tl.int64)[None, :] * count + block[:, None]
    else:
        at = block.to(tl.int64)[:, None] * C + column[None, :]
    tl.store(scale_ptr + at, scale, known)


@triton.jit
def mx_product_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, out_ptr, R, C,
    N: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SUBTILES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``out`` [R, N] = x [R, C] times w [N, C], both with scales along C, which EVEN says is whole tiles."""
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    row_tile, column_tile = in_turns(tl.program_id(0), tl.cdiv(R, BLOCK_M), COLUMN_TILES, GROUP)
    row, column = row_tile * BLOCK_M + tl.arange(0, BLOCK_M), column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    live = row < R
    near, beside = tl.where(live, row, 0).to(tl.int64), tl.where(column < N, column, 0).to(tl.int64)
    c_range, b_range = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_C // BLOCK)
    x_from, w_from = (
        x_ptr + near[:, None] * C + c_range[None, :],
        w_ptr + beside[None, :] * C + c_range[:, None],
    )
    xs_from = xs_ptr + near[:, None] * (C // BLOCK) + b_range[None, :]
    ws_from = ws_ptr + beside[:, None] * (C // BLOCK) + b_range[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(0, C, BLOCK_C):
        b = c // BLOCK
        if EVEN:
            x, w = tl.load(x_from + c), tl.load(w_from + c)
            xs, ws = tl.load(xs_from + b), tl.load(ws_from + b)
        else:
            is_c, is_b = c + c_range < C, (b + b_range < C // BLOCK)[None, :]
            x = tl.load(x_from + c, mask=is_c[None, :], other=0.0)
            w = tl.load(w_from + c, mask=is_c[:, None], other=0.0)
            xs, ws = tl.load(xs_from + b, mask=is_b, other=0), tl.load(ws_from + b, mask=is_b, other=0)
        if UPCAST:  # the interpreter has no such product
            x = x.to(tl.float32).reshape(BLOCK_M, BLOCK_C // BLOCK, BLOCK) * _powers(xs)[:, :, None]
            w = w.to(tl.float32).T.reshape(BLOCK_N, BLOCK_C // BLOCK, BLOCK) * _powers(ws)[:, :, None]
            total = tl.dot(x.reshape(BLOCK_M, BLOCK_C), w.reshape(BLOCK_N, BLOCK_C).T, total)
        else:
            total = tl.dot_scaled(x, xs, "e4m3", w, ws, "e4m3", total)
    to_ptr = out_ptr + row_tile.to(tl.int64) * BLOCK_M * N
    store(total, live, column_tile * BLOCK_N, to_ptr, N, BLOCK_M, BLOCK_N, SUBTILES)
