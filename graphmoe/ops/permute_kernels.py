"""Row movement between tokens and expert order: one read and one write of each byte.

Suffixes: T tokens, K slots, R routed rows, D hidden. A program owns a tile of tokens and columns, and
walks through the K rows of its tokens by ``row_TK``; so it meets live rows only, and a row of -1 (slot not
routed here) is skipped.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment,index,var-annotated"
# The arguments and tuples of a Triton function have no Python types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphmoe.ops.vendors import num_warps

THREADS, TILE = 256, 2048
"""Threads of a program, and elements of its tile: 16 bytes of bf16 for each thread."""
MAX_TOKENS = 256
AT_ONCE = tl.constexpr(16)  # slots in one round; registers hold a piece of each slot's row
DOT_TILE = 4096
"""Elements of the tile [tokens, slots, columns] of dot products: 16 fp32 sums in each thread."""


def spread_rows(x_TD: Tensor, row_TK: Tensor, weight_TK: Tensor | None, num_rows: int) -> Tensor:
    """y[row[t, k]] = weight[t, k] * x[t] -> [R, D]; other rows are left unwritten. No device sync."""
    y_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    _launch(_spread_kernel, x_TD.contiguous(), y_RD, row_TK, weight_TK)
    return y_RD


def sum_rows(y_RD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """Sum over k, in order, of weight[t, k] * y[row[t, k]], in fp32 -> [T, D]. No device sync."""
    x_TD = y_RD.new_empty(len(row_TK), y_RD.shape[1])
    _launch(_sum_kernel, y_RD.contiguous(), x_TD, row_TK, weight_TK)
    return x_TD


def dot_rows(dx_TD: Tensor, y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """<dx[t], y[row[t, k]]> -> [T, K] fp32, in a fixed order of additions. No device sync."""
    (tokens, slots), columns = row_TK.shape, y_RD.shape[1]
    dot_TK = torch.empty(tokens, slots, dtype=torch.float32, device=y_RD.device)
    if dot_TK.numel() == 0:
        return dot_TK
    padded = triton.next_power_of_2(slots)
    width = min(triton.next_power_of_2(max(columns, 1)), max(DOT_TILE // padded, 1), 512)
    height = max(min(DOT_TILE // (padded * width), MAX_TOKENS), 1)
    _dot_kernel[(triton.cdiv(tokens, height),)](
        dx_TD.contiguous(), y_RD.contiguous(), row_TK.contiguous(), dot_TK, tokens, columns,
        K=slots, SLOTS=padded, TOKENS=height, COLUMNS=width, num_warps=num_warps(THREADS),
    )  # fmt: skip
    return dot_TK


def _launch(kernel: Any, source: Tensor, target: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> None:
    (tokens, slots), columns = row_TK.shape, source.shape[1]
    width = min(triton.next_power_of_2(max(columns, 1)), TILE)
    height = min(TILE // width, MAX_TOKENS)
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
    """Tokens and columns of this program, and whether each exists; neighbours share tokens."""
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
