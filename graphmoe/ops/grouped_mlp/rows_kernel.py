"""The grouped GEMM of routed rows: one persistent kernel with several epilogues, and its table of tiles.

Suffixes: R routed rows, E experts, K choices, C contracted width, N columns, F expert width, H = 2F. BLOCK_M,
BLOCK_N and BLOCK_C are the sizes of a tile: rows, columns, contracted elements of a step.

One of P programs computes every P-th tile. `tiles_kernel` builds a table of row tiles from ``ends_E``: the
host only knows an upper bound of their number.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import triton
import triton.language as tl

STEEPNESS = tl.constexpr(1.702)  # of `ops.swiglu`


@triton.jit(do_not_specialize=["max_tiles"])
def tiles_kernel(
    ends_ptr, table_ptr, max_tiles,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BEHIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill a table int32 [1 + 2 * max_tiles]: number of row tiles, expert of each, first row of each.

    BEHIND is 1 if ``ends`` are those of replicas, which follow the ends of own experts in memory; else 0.
    """
    experts = tl.arange(0, BLOCK_E)
    known = experts < E
    ends = tl.load(ends_ptr + experts, mask=known, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=known & (experts + BEHIND > 0), other=0)
    tiles = tl.where(known, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    last_tiles = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(table_ptr, num_tiles)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = known[None, :] & (last_tiles[None, :] <= tile[:, None])
    expert = tl.sum(before.to(tl.int32), 1)
    first_tile = tl.sum(tl.where(before, tiles[None, :], 0), 1)
    live = tile < num_tiles
    start = tl.load(ends_ptr + expert - 1, mask=live & (expert + BEHIND > 0), other=0)
    tl.store(table_ptr + 1 + tile, expert, mask=live)
    tl.store(table_ptr + 1 + max_tiles + tile, start + (tile - first_tile) * BLOCK_M, mask=live)


@triton.jit
def weight_sums_kernel(
    partial_ptr, row_ptr, sum_ptr, num_slots, num_rows, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + slot, mask=slot < num_slots, other=-1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partial_ptr + tl.cast(part, tl.int64) * num_rows + row, mask=row >= 0, other=0)
    tl.store(sum_ptr + slot, total, mask=slot < num_slots)


@triton.jit(do_not_specialize=["max_tiles", "num_rows"])
def rows_kernel(
    x_ptr, w_ptr, out_ptr, h_ptr, a_ptr, partial_ptr, bias_ptr, weight_ptr, slot_ptr, ends_ptr, table_ptr,
    max_tiles, num_rows,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EPILOGUE: tl.constexpr, LIMIT: tl.constexpr,
    CONTRACT_LAST: tl.constexpr, X_DESCRIPTOR: tl.constexpr, W_DESCRIPTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
    SUBTILES: tl.constexpr, AHEAD: tl.constexpr, FLATTEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute ``w[e(r)] @ x[r]`` for every routed row r, e(r) its expert, and store it as EPILOGUE says.

    x is [R, C] for "store", else [T, C] and read at ``slot[r] // K``. w is [E, N, C] with CONTRACT_LAST, else
    [E, C, N].

    - "store": ``out`` [R, N] is the product.
    - "halves": w is [E, 2N, C] and ``h`` [R, 2N] is the product. A tile has BLOCK_N / 2 columns of each half.
    - "swiglu": as "halves", and ``a`` [R, N] is silu(gate) * up * weight, after the ``bias`` [E, 2N] if any,
      and with a LIMIT the clamped form of `ops.swiglu`.
    - "swiglu_grad": the product is the gradient of ``a``; ``out`` [R, 2N] is that of h, ``a`` is recomputed,
      ``partial`` [column tiles, R] are parts of dweight. AHEAD of SUBTILES parts of h are prefetched.
    """
    PAIR: tl.constexpr = EPILOGUE == "swiglu" or EPILOGUE == "halves"
    COLUMNS: tl.constexpr = BLOCK_N // 2 if PAIR else BLOCK_N
    COLUMN_TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    num_tiles = tl.load(table_ptr)
    m_range, c_range = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    for tile in tl.range(tl.program_id(0), num_tiles * COLUMN_TILES, tl.num_programs(0), flatten=FLATTEN):
        row_tile, column_tile = in_turns(tile, num_tiles, COLUMN_TILES, GROUP)
        column = column_tile * COLUMNS
        expert = tl.load(table_ptr + 1 + row_tile)
        row = tl.load(table_ptr + 1 + max_tiles + row_tile)
        live = row + m_range < tl.load(ends_ptr + expert)
        # no mask: a tile reads a live row in place of one beyond its expert's end, and does not store it
        near = row + tl.where(live, m_range, 0)
        if EPILOGUE != "store":
            slot = tl.load(slot_ptr + near)
            near = slot // K
            if EPILOGUE != "halves":
                weight = tl.load(weight_ptr + slot)
        x_from = x_ptr if X_DESCRIPTOR else x_ptr + near.to(tl.int64)[:, None] * C + c_range[None, :]
        w_from = w_ptr
        if not W_DESCRIPTOR:
            w_from = _weight_pointers(w_ptr, expert, column, C, N, PAIR, CONTRACT_LAST, BLOCK_N, BLOCK_C)
        base = row.to(tl.int64) * N
        if EPILOGUE == "swiglu_grad":
            loaded = load_h((), live, column, h_ptr + 2 * base, N, BLOCK_M, BLOCK_N // SUBTILES, 0, AHEAD)
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for c in range(0, C, BLOCK_C):
            x = _load_x(x_from, row, c, C, X_DESCRIPTOR, BLOCK_C)
            w = _load_w(w_from, expert, column, c, C, N, PAIR, CONTRACT_LAST, W_DESCRIPTOR, BLOCK_N, BLOCK_C)
            if UPCAST:  # the interpreter multiplies bf16 wrongly
                x, w = x.to(tl.float32), w.to(tl.float32)
            product = tl.dot(x, w, product, input_precision="ieee")
        if EPILOGUE == "swiglu":
            swiglu(
                product, live, column, weight, h_ptr + 2 * base, a_ptr + base, bias_ptr, expert,
                N, BLOCK_M, COLUMNS, LIMIT,
            )  # fmt: skip
        elif EPILOGUE == "halves":
            store_halves(product, live, column, h_ptr + 2 * base, N, BLOCK_M, COLUMNS)
        elif EPILOGUE == "swiglu_grad":
            dweight = swiglu_grad(
                product, loaded, live, column, weight, h_ptr + 2 * base, out_ptr + 2 * base, a_ptr + base,
                bias_ptr, expert, N, BLOCK_M, BLOCK_N, SUBTILES, AHEAD, LIMIT,
            )  # fmt: skip
            partials = partial_ptr + column_tile.to(tl.int64) * num_rows + row
            tl.store(partials + m_range, dweight, mask=live)
        else:
            store(product, live, column, out_ptr + base, N, BLOCK_M, BLOCK_N, SUBTILES)


@triton.jit
def in_turns(tile, row_tiles, COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    # GROUP row tiles take turns on one column tile, so that its weights stay in L2
    first = tile // (GROUP * COLUMN_TILES) * GROUP
    turns = tl.minimum(row_tiles - first, GROUP)
    within = tile % (GROUP * COLUMN_TILES)
    return first + within % turns, within // turns


@triton.jit
def _weight_pointers(
    w_ptr, expert, column,
    C: tl.constexpr, N: tl.constexpr, PAIR: tl.constexpr, CONTRACT_LAST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK_N // 2
    n_range = tl.arange(0, BLOCK_N)
    c_range = tl.arange(0, BLOCK_C)
    if PAIR:  # columns of the gate half, then those of the up half
        w_ptr += expert.to(tl.int64) * (2 * N * C)
        w_row = tl.minimum(column + n_range % HALF, N - 1) + n_range // HALF * N
        return w_ptr + w_row[None, :] * C + c_range[:, None]
    else:
        w_ptr += expert.to(tl.int64) * (N * C)
        if CONTRACT_LAST:
            return w_ptr + tl.minimum(column + n_range, N - 1)[None, :] * C + c_range[:, None]
        else:
            return w_ptr + c_range[:, None] * N + (column + n_range)[None, :]


@triton.jit
def _load_x(x_from, row, c, C: tl.constexpr, DESCRIPTOR: tl.constexpr, BLOCK_C: tl.constexpr):
    if DESCRIPTOR:
        return x_from.load([row, c])
    elif C % BLOCK_C == 0:
        return tl.load(x_from + c)
    else:
        return tl.load(x_from + c, mask=(c + tl.arange(0, BLOCK_C) < C)[None, :], other=0)


@triton.jit
def _load_w(
    w_from, expert, column, c,
    C: tl.constexpr, N: tl.constexpr, PAIR: tl.constexpr, CONTRACT_LAST: tl.constexpr,
    DESCRIPTOR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    if DESCRIPTOR and PAIR:
        return w_from.load([2 * expert, column, c]).reshape(BLOCK_N, BLOCK_C).T
    elif DESCRIPTOR and CONTRACT_LAST:
        return w_from.load([expert, column, c]).reshape(BLOCK_N, BLOCK_C).T
    elif DESCRIPTOR:
        return w_from.load([expert, c, column]).reshape(BLOCK_C, BLOCK_N)
    elif CONTRACT_LAST and C % BLOCK_C == 0:
        return tl.load(w_from + c)
    elif CONTRACT_LAST:
        return tl.load(w_from + c, mask=(c + tl.arange(0, BLOCK_C) < C)[:, None], other=0)
    elif C % BLOCK_C == 0 and N % BLOCK_N == 0:
        return tl.load(w_from + c * N)
    else:
        mask = (c + tl.arange(0, BLOCK_C) < C)[:, None] & (column + tl.arange(0, BLOCK_N) < N)[None, :]
        return tl.load(w_from + c * N, mask=mask, other=0)


# Epilogues on a finished tile of M rows and N columns (F for SwiGLU). Pointers are those of the tile's first
# row. Rows that are not live and columns from N on are neither read nor written.


@triton.jit
def halves(x, M: tl.constexpr, N: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def _parts(x, M: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr):
    if COUNT == 1:
        return (x,)
    else:
        left, right = halves(x, M, N)
        return _parts(left, M, N // 2, COUNT // 2) + _parts(right, M, N // 2, COUNT // 2)


@triton.jit
def store(
    y, live, column, out_ptr, N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr,
    SUBTILES: tl.constexpr, ADD: tl.constexpr = False,
):  # fmt: skip
    if SUBTILES == 1:
        columns = column + tl.arange(0, COLUMNS)
        mask = live[:, None] & (columns < N)[None, :]
        places = out_ptr + tl.arange(0, M)[:, None] * N + columns[None, :]
        if ADD:
            y += tl.load(places, mask, other=0.0)
        tl.store(places, y.to(out_ptr.dtype.element_ty), mask)
    else:
        left, right = halves(y, M, COLUMNS)
        HALF: tl.constexpr = COLUMNS // 2
        store(left, live, column, out_ptr, N, M, HALF, SUBTILES // 2, ADD)
        store(right, live, column + HALF, out_ptr, N, M, HALF, SUBTILES // 2, ADD)


@triton.jit
def sigmoid_of(x):
    """Return 1 / (1 + exp(-x)) in half the instructions of `tl.sigmoid`, as no GEMM hides an epilogue."""
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def experts_of(row, is_row, ends_ptr, experts, BLOCK_E: tl.constexpr):
    """Return the expert of each row, 0 for dead ones: the number of experts that end at or before it."""
    known = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + known, known < experts, other=2**31 - 1)
    return tl.where(is_row, tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1), 0)


@triton.jit
def add_bias(gate, up, bias_ptr, expert, column, inside, N):
    """Add the bias [E, 2N] of each row's expert, if there is one."""
    if bias_ptr is not None:
        at = expert * (2 * N) + column
        gate += tl.load(bias_ptr + at, inside, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + (at + N), inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def clamped(gate, up, LIMIT: tl.constexpr):
    """Return gate and up as they are multiplied, and the argument of the sigmoid; NaN stays."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1
        return gate, up, gate * STEEPNESS
    else:
        return gate, up, gate


@triton.jit
def gradients(da, gate, up, factor, sigmoid, silu, LIMIT: tl.constexpr):
    """Return the gradients of gate and up; ``factor`` and ``silu`` follow `clamped`, gate and up do not."""
    if LIMIT > 0:
        dgate = tl.where(gate > LIMIT, 0.0, da) * factor * (sigmoid + STEEPNESS * silu * (1 - sigmoid))
        return dgate, tl.where(tl.abs(up) > LIMIT, 0.0, da) * silu
    else:
        return da * factor * (sigmoid + silu * (1 - sigmoid)), da * silu


@triton.jit
def store_halves(product, live, column, h_ptr, N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr):
    gate, up = halves(product, M, 2 * COLUMNS)
    gate, up = gate.to(h_ptr.dtype.element_ty), up.to(h_ptr.dtype.element_ty)
    columns = column + tl.arange(0, COLUMNS)
    mask = live[:, None] & (columns < N)[None, :]
    h_ptrs = h_ptr + tl.arange(0, M)[:, None] * (2 * N) + columns[None, :]
    tl.store(h_ptrs, gate, mask=mask)
    tl.store(h_ptrs + N, up, mask=mask)
    return gate, up


@triton.jit
def swiglu(
    product, live, column, weight, h_ptr, a_ptr, bias_ptr, expert,
    N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store gate and up, and the activation of their rounded values, which the backward can recompute."""
    gate, up = store_halves(product, live, column, h_ptr, N, M, COLUMNS)
    columns = column + tl.arange(0, COLUMNS)
    mask = live[:, None] & (columns < N)[None, :]
    of_tile = columns[None, :] + tl.zeros((M, 1), tl.int32)  # broadcast later it would need more registers
    gate, up = add_bias(gate.to(tl.float32), up.to(tl.float32), bias_ptr, expert, of_tile, mask, N)
    gate, up, steep = clamped(gate, up, LIMIT)
    a = gate * sigmoid_of(steep) * up * weight[:, None]
    a_ptrs = a_ptr + tl.arange(0, M)[:, None] * N + columns[None, :]
    tl.store(a_ptrs, a.to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_h(
    loaded, live, column, h_ptr,
    N: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    for part in tl.static_range(FIRST, FIRST + COUNT):
        columns = column + part * WIDTH + tl.arange(0, WIDTH)
        mask = live[:, None] & (columns < N)[None, :]
        h_ptrs = h_ptr + tl.arange(0, M)[:, None] * (2 * N) + columns[None, :]
        loaded = loaded + (tl.load(h_ptrs, mask=mask, other=0), tl.load(h_ptrs + N, mask=mask, other=0))
    return loaded


@triton.jit
def swiglu_grad(
    da, loaded, live, column, weight, h_ptr, dh_ptr, a_ptr, bias_ptr, expert,
    N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, SUBTILES: tl.constexpr, AHEAD: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Store the gradient of h and the weighted activation; return these columns' part of dweight [M]."""
    WIDTH: tl.constexpr = COLUMNS // SUBTILES
    parts = _parts(da, M, COLUMNS, SUBTILES)
    sums = tl.zeros((M, WIDTH), tl.float32)
    for part in tl.static_range(SUBTILES):
        if part + AHEAD < SUBTILES:
            loaded = load_h(loaded, live, column, h_ptr, N, M, WIDTH, part + AHEAD, 1)
        columns = column + part * WIDTH + tl.arange(0, WIDTH)
        mask = live[:, None] & (columns < N)[None, :]
        da_part = parts[part]
        gate, up = loaded[2 * part].to(tl.float32), loaded[2 * part + 1].to(tl.float32)
        of_tile = columns[None, :] + tl.zeros((M, 1), tl.int32)
        gate, up = add_bias(gate, up, bias_ptr, expert, of_tile, mask, N)
        near, factor, steep = clamped(gate, up, LIMIT)
        sigmoid = sigmoid_of(steep)
        silu = near * sigmoid
        a = silu * factor
        sums += da_part * a
        a_ptrs = a_ptr + tl.arange(0, M)[:, None] * N + columns[None, :]
        tl.store(a_ptrs, (a * weight[:, None]).to(a_ptr.dtype.element_ty), mask=mask)
        da_part = da_part * weight[:, None]
        dgate, dup = gradients(da_part, gate, up, factor, sigmoid, silu, LIMIT)
        dh_ptrs = dh_ptr + tl.arange(0, M)[:, None] * (2 * N) + columns[None, :]
        tl.store(dh_ptrs, dgate.to(dh_ptr.dtype.element_ty), mask=mask)
        tl.store(dh_ptrs + N, dup.to(dh_ptr.dtype.element_ty), mask=mask)
    return tl.sum(sums, 1)
