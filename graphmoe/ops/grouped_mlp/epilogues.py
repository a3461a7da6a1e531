"""Epilogues of `rows_kernel` on a finished tile: a plain store, SwiGLU, or the gradient of SwiGLU.

Suffixes: M rows of the tile, N columns of a row of the result (F, the expert width, for SwiGLU). Pointers are
those of the tile's first row. Rows that are not ``live`` and columns from N on are neither read nor written.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _halves(x, M: tl.constexpr, N: tl.constexpr):
    """The left and the right half of the columns of [M, N]; moves nothing between threads."""
    return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def _parts(x, M: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr):
    """The columns of [M, N] in COUNT equal parts, from left to right."""
    if COUNT == 1:
        return (x,)
    else:
        left, right = _halves(x, M, N)
        return _parts(left, M, N // 2, COUNT // 2) + _parts(right, M, N // 2, COUNT // 2)


@triton.jit
def store(
    y, live, column, out_ptr, N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, SUBTILES: tl.constexpr
):
    """Store [M, COLUMNS] in SUBTILES parts, each of which takes its share of shared memory on the way."""
    if SUBTILES == 1:
        columns = column + tl.arange(0, COLUMNS)
        mask = live[:, None] & (columns < N)[None, :]
        offsets = tl.arange(0, M)[:, None] * N + columns[None, :]
        tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        left, right = _halves(y, M, COLUMNS)
        store(left, live, column, out_ptr, N, M, COLUMNS // 2, SUBTILES // 2)
        store(right, live, column + COLUMNS // 2, out_ptr, N, M, COLUMNS // 2, SUBTILES // 2)


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) in half the instructions of `tl.sigmoid`: no product runs beside an epilogue."""
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def store_halves(product, live, column, h_ptr, N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr):
    """Store gate and up, and return them as they are rounded."""
    gate, up = _halves(product, M, 2 * COLUMNS)
    gate, up = gate.to(h_ptr.dtype.element_ty), up.to(h_ptr.dtype.element_ty)
    columns = column + tl.arange(0, COLUMNS)
    mask = live[:, None] & (columns < N)[None, :]
    h_ptrs = h_ptr + tl.arange(0, M)[:, None] * (2 * N) + columns[None, :]
    tl.store(h_ptrs, gate, mask=mask)
    tl.store(h_ptrs + N, up, mask=mask)
    return gate, up


@triton.jit
def swiglu(
    product, live, column, weight, h_ptr, a_ptr, N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store gate, up and the weighted activation of the rounded two, as the backward computes it again."""
    gate, up = store_halves(product, live, column, h_ptr, N, M, COLUMNS)
    columns = column + tl.arange(0, COLUMNS)
    mask = live[:, None] & (columns < N)[None, :]
    gate = gate.to(tl.float32)
    a = gate * _sigmoid(gate) * up.to(tl.float32) * weight[:, None]
    a_ptrs = a_ptr + tl.arange(0, M)[:, None] * N + columns[None, :]
    tl.store(a_ptrs, a.to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_h(
    loaded, live, column, h_ptr,
    N: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """``loaded``, then gate and up of COUNT more parts of a tile's columns from the part FIRST on."""
    for part in tl.static_range(FIRST, FIRST + COUNT):
        columns = column + part * WIDTH + tl.arange(0, WIDTH)
        mask = live[:, None] & (columns < N)[None, :]
        h_ptrs = h_ptr + tl.arange(0, M)[:, None] * (2 * N) + columns[None, :]
        loaded = loaded + (tl.load(h_ptrs, mask=mask, other=0), tl.load(h_ptrs + N, mask=mask, other=0))
    return loaded


@triton.jit
def swiglu_grad(
    da, loaded, live, column, weight, h_ptr, dh_ptr, a_ptr,
    N: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, SUBTILES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Store the gradient of h and the weighted activation; return these columns' part of dweight [M].

    Goes through SUBTILES parts of the columns, whose h is loaded AHEAD parts early: the first AHEAD of them
    are ``loaded``.
    """
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
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        a = silu * up
        sums += da_part * a
        a_ptrs = a_ptr + tl.arange(0, M)[:, None] * N + columns[None, :]
        tl.store(a_ptrs, (a * weight[:, None]).to(a_ptr.dtype.element_ty), mask=mask)
        da_part = da_part * weight[:, None]
        dgate = da_part * up * (sigmoid + silu * (1 - sigmoid))
        dh_ptrs = dh_ptr + tl.arange(0, M)[:, None] * (2 * N) + columns[None, :]
        tl.store(dh_ptrs, dgate.to(dh_ptr.dtype.element_ty), mask=mask)
        tl.store(dh_ptrs + N, (da_part * silu).to(dh_ptr.dtype.element_ty), mask=mask)
    return tl.sum(sums, 1)
