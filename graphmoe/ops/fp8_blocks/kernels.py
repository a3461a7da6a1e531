"""Kernels of block-scaled operands, and of mxfp8 GEMMs.

Suffixes as in the package. BLOCK neighbouring elements share a scale; with MX the format is mxfp8.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import triton
import triton.language as tl

from graphmoe.ops.fp8_mlp.kernels import if_finite, power_of_two
from graphmoe.ops.grouped_mlp.rows_kernel import in_turns, store


@triton.jit
def scales_of(amax, MX: tl.constexpr):
    if MX:
        power = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 8, 0)
        stored = tl.where(amax < float("inf"), power, 255).to(tl.uint8)
        inverse = if_finite(amax, (254 - power) << 23)
    else:
        stored, inverse = power_of_two(amax, 0x1FFFFF, 8)
    return stored, inverse


@triton.jit
def powers_of(scale):
    power = scale.to(tl.int32)
    return tl.where(power > 0, power << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(x, kind: tl.constexpr, MX: tl.constexpr):
    if MX:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(kind)


@triton.jit
def squares_kernel(
    w_ptr, q_ptr, scale_ptr,
    N: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize a weight [N, K], or if TURNED its transpose, by square blocks; scales have PADDED columns."""
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    n = (column if TURNED else row) + tl.arange(0, BLOCK)
    k = (row if TURNED else column) + tl.arange(0, BLOCK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :], inside, other=0.0).to(tl.float32)
    scale, inverse = scales_of(tl.max(tl.max(tl.abs(w), 1), 0), False)
    tl.store(scale_ptr + tl.program_id(0) * PADDED + tl.program_id(1), scale)
    q = numbers_of(w * inverse, q_ptr.dtype.element_ty, False)
    if TURNED:
        tl.store(q_ptr + k.to(tl.int64)[:, None] * N + n[None, :], q.T, (k < K)[:, None] & (n < N)[None, :])
    else:
        tl.store(q_ptr + n.to(tl.int64)[:, None] * K + k[None, :], q, inside)


@triton.jit
def _mx_places(
    row, first, is_row,
    LIMIT: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    long, column = row.to(tl.int64)[:, None], first + tl.arange(0, COLUMNS)[None, :]
    block = first // BLOCK + tl.arange(0, COLUMNS // BLOCK)[None, :]
    at, of_scales = long * STRIDE + column, long * (STRIDE // BLOCK) + block
    return at, is_row[:, None] & (column < LIMIT), of_scales, is_row[:, None] & (block < LIMIT // BLOCK)


@triton.jit
def load_mx(
    q_ptr, scale_ptr, row, first, is_row,
    LIMIT: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load mxfp8 and return a dequantized tile [ROWS, COLUMNS]; 0 from column LIMIT on and in masked rows."""
    at, inside, of_scales, known = _mx_places(row, first, is_row, LIMIT, STRIDE, COLUMNS, BLOCK)
    q = tl.load(q_ptr + at, inside, other=0.0).to(tl.float32).reshape(ROWS, COLUMNS // BLOCK, BLOCK)
    scale = powers_of(tl.load(scale_ptr + of_scales, known, other=0))
    return (q * scale[:, :, None]).reshape(ROWS, COLUMNS)


@triton.jit
def store_mx(
    x, q_ptr, scale_ptr, row, first, is_row,
    LIMIT: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize a tile x [ROWS, COLUMNS] to mxfp8 and store values and scales as `load_mx` reads them."""
    at, inside, of_scales, known = _mx_places(row, first, is_row, LIMIT, STRIDE, COLUMNS, BLOCK)
    blocks = x.reshape(ROWS, COLUMNS // BLOCK, BLOCK)
    scale, inverse = scales_of(tl.max(tl.abs(blocks), 2), True)
    q = numbers_of(blocks * inverse[:, :, None], q_ptr.dtype.element_ty, True)
    tl.store(q_ptr + at, q.reshape(ROWS, COLUMNS), inside)
    tl.store(scale_ptr + of_scales, scale, known)


@triton.jit
def store_turned(
    x, q_ptr, scale_ptr, at, first, PADDED,
    C: tl.constexpr, MX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Transpose x, the tile at row ``at`` and column ``first``, and store it quantized in q [C, PADDED]."""
    row, column = at + tl.arange(0, ROWS), (first + tl.arange(0, COLUMNS)).to(tl.int64)
    is_column = column < C
    blocks = x.reshape(ROWS // BLOCK, BLOCK, COLUMNS)
    scale, inverse = scales_of(tl.max(tl.abs(blocks), 1), MX)
    q = numbers_of(blocks * inverse[:, None, :], q_ptr.dtype.element_ty, MX).reshape(ROWS, COLUMNS)
    tl.store(
        q_ptr + column[:, None] * PADDED + row[None, :], q.T, is_column[:, None] & (row < PADDED)[None, :]
    )
    block, count = at // BLOCK + tl.arange(0, ROWS // BLOCK), PADDED // BLOCK
    known = (block < count)[:, None] & is_column[None, :]
    if MX:
        tl.store(scale_ptr + column[None, :] * count + block[:, None], scale, known)
    else:
        tl.store(scale_ptr + block.to(tl.int64)[:, None] * C + column[None, :], scale, known)


@triton.jit
def mx_rows_kernel(
    x_ptr, q_ptr, scale_ptr, R, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    inside = (row < R)[:, None] & (column < C)[None, :]
    x = tl.load(x_ptr + row[:, None] * C + column[None, :], inside, other=0.0).to(tl.float32)
    store_mx(x, q_ptr, scale_ptr, row, first, row < R, C, C, ROWS, COLUMNS, BLOCK)


@triton.jit
def turned_kernel(
    x_ptr, of_x_ptr, q_ptr, scale_ptr, R, PADDED,
    C: tl.constexpr, MX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Transpose x [R, C], dequantized if it has scales, and quantize it in blocks along R -> q [C, PADDED].

    Without scales x may be several matrices, one for each index of the grid's third axis.
    """
    of_matrix = tl.program_id(2).to(tl.int64) * C
    x_ptr += of_matrix * R
    q_ptr += of_matrix * PADDED
    scale_ptr += of_matrix * (PADDED // BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column, long = row < R, column < C, row.to(tl.int64)
    inside = is_row[:, None] & is_column[None, :]
    x = tl.load(x_ptr + long[:, None] * C + column[None, :], inside, other=0.0).to(tl.float32)
    if of_x_ptr is not None:
        if MX:
            at = long[:, None] * (C // BLOCK) + (column // BLOCK)[None, :]
            x *= powers_of(tl.load(of_x_ptr + at, inside, other=0))
        else:
            at = (column // BLOCK).to(tl.int64)[None, :] * R + row[:, None]
            x *= tl.load(of_x_ptr + at, inside, other=0.0)
    at, first = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    store_turned(x, q_ptr, scale_ptr, at, first, PADDED, C, MX, ROWS, COLUMNS, BLOCK)


@triton.jit
def _add_product(
    total, x, xs, w, ws,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return ``total`` [M, N] + x [M, C] @ w [C, N]; scales are [M, C / BLOCK] and [N, C / BLOCK]."""
    if UPCAST:  # the interpreter has no fp8 product
        x = x.to(tl.float32).reshape(M, C // BLOCK, BLOCK) * powers_of(xs)[:, :, None]
        w = w.to(tl.float32).T.reshape(N, C // BLOCK, BLOCK) * powers_of(ws)[:, :, None]
        return tl.dot(x.reshape(M, C), w.reshape(N, C).T, total)
    else:
        return tl.dot_scaled(x, xs, "e4m3", w, ws, "e4m3", total)


@triton.jit
def add_steps(
    total, x_from, xs_from, w_from, ws_from, first, last, C, EVEN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return ``total`` + x @ w over [first, last) of C contracted elements; EVEN: BLOCK_C divides the range.

    Operands are pointers to element 0 of the first of M rows of x and N columns of w, and to their scales.
    """
    c_range, b_range = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_C // BLOCK)
    x_from, w_from = x_from[:, None] + c_range[None, :], w_from[None, :] + c_range[:, None]
    xs_from, ws_from = xs_from[:, None] + b_range[None, :], ws_from[:, None] + b_range[None, :]
    for c in range(first, last, BLOCK_C):
        b = c // BLOCK
        if EVEN:
            x, w = tl.load(x_from + c), tl.load(w_from + c)
            xs, ws = tl.load(xs_from + b), tl.load(ws_from + b)
        else:
            is_c, is_b = c + c_range < C, (b + b_range < C // BLOCK)[None, :]
            x = tl.load(x_from + c, mask=is_c[None, :], other=0.0)
            w = tl.load(w_from + c, mask=is_c[:, None], other=0.0)
            xs, ws = tl.load(xs_from + b, mask=is_b, other=0), tl.load(ws_from + b, mask=is_b, other=0)
        total = _add_product(total, x, xs, w, ws, M, N, BLOCK_C, BLOCK, UPCAST)
    return total


@triton.jit
def mx_product_kernel(
    x_ptr, xs_ptr, w_ptr, ws_ptr, out_ptr, R, C,
    N: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SUBTILES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store x [R, C] @ w [N, C].T in ``out`` [R, N]; both have scales along C. EVEN: BLOCK_C divides C."""
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    row_tile, column_tile = in_turns(tl.program_id(0), tl.cdiv(R, BLOCK_M), COLUMN_TILES, GROUP)
    row, column = row_tile * BLOCK_M + tl.arange(0, BLOCK_M), column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    live = row < R
    near, beside = tl.where(live, row, 0).to(tl.int64), tl.where(column < N, column, 0).to(tl.int64)
    total = add_steps(
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32), x_ptr + near * C, xs_ptr + near * (C // BLOCK),
        w_ptr + beside * C, ws_ptr + beside * (C // BLOCK), 0, C, C, EVEN,
        BLOCK_M, BLOCK_N, BLOCK_C, BLOCK, UPCAST,
    )  # fmt: skip
    to_ptr = out_ptr + row_tile.to(tl.int64) * BLOCK_M * N
    store(total, live, column_tile * BLOCK_N, to_ptr, N, BLOCK_M, BLOCK_N, SUBTILES)
