"""Kernels of `graphmoe.ops.swiglu`, one launch each; unused rows are skipped."""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphmoe.ops import num_warps, tile

THREADS, TILE, WIDTH = 256, 2048, 512  # 512 columns leave few lanes idle at any width
MAX_ROWS = 64


def forward(h_RH: Tensor, weight_R: Tensor | None, ends_E: Tensor) -> Tensor:
    rows, width = h_RH.shape[0], h_RH.shape[1] // 2
    a_RF = h_RH.new_empty(rows, width)
    tile_rows, tile_columns = tile(width, TILE, WIDTH, MAX_ROWS)
    programs = triton.cdiv(rows, tile_rows) * triton.cdiv(width, tile_columns)
    if programs:
        # a grid for all rows: programs of dead rows read the live count and exit
        _forward_kernel[(programs,)](
            h_RH.contiguous(), None if weight_R is None else weight_R.contiguous(), ends_E, a_RF,
            len(ends_E), rows, width,
            ROWS=tile_rows, COLUMNS=tile_columns, num_warps=num_warps(THREADS),
        )  # fmt: skip
    return a_RF


def backward(da_RF: Tensor, h_RH: Tensor, weight_R: Tensor | None, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = da_RF.shape
    dh_RH = h_RH.new_empty(h_RH.shape)
    if weight_R is None:
        dweight_R = torch.empty(0, dtype=torch.float32, device=h_RH.device)
    else:
        weight_R = weight_R.contiguous()
        dweight_R = weight_R.new_empty(weight_R.shape)
    tile_rows, tile_columns = tile(width, TILE, WIDTH, MAX_ROWS)
    if rows:
        # one program owns a row, so the sum in dweight has one order
        _backward_kernel[(triton.cdiv(rows, tile_rows),)](
            da_RF.contiguous(), h_RH.contiguous(), weight_R, ends_E, dh_RH, dweight_R, len(ends_E), rows,
            width,
            ROWS=tile_rows, COLUMNS=tile_columns, num_warps=num_warps(THREADS),
        )  # fmt: skip
    return dh_RH, dweight_R


@triton.jit
def _forward_kernel(
    h_RH, weight_R, ends_E, a_RF, experts, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    live = tl.minimum(tl.load(ends_E + experts - 1), rows)
    across = tl.cdiv(width, COLUMNS)
    first = (tl.program_id(0) // across) * ROWS
    if first < live:
        row = first + tl.arange(0, ROWS)
        column = ((tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (row < live)[:, None] & (column < width)
        at = h_RH + row.to(tl.int64)[:, None] * (2 * width) + column
        gate = tl.load(at, inside, other=0.0).to(tl.float32)
        up = tl.load(at + width, inside, other=0.0).to(tl.float32)
        a = gate * tl.sigmoid(gate) * up
        if weight_R is not None:
            a *= tl.load(weight_R + row, row < live, other=0.0).to(tl.float32)[:, None]
        to = a_RF + row.to(tl.int64)[:, None] * width + column
        tl.store(to, a.to(a_RF.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    da_RF, h_RH, weight_R, ends_E, dh_RH, dweight_R, experts, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    live = tl.minimum(tl.load(ends_E + experts - 1), rows)
    first = tl.program_id(0) * ROWS
    if first < live:
        row = first + tl.arange(0, ROWS)
        is_row = row < live
        narrow_at, wide_at = row.to(tl.int64)[:, None] * width, row.to(tl.int64)[:, None] * (2 * width)
        if weight_R is not None:
            weight = tl.load(weight_R + row, is_row, other=0.0).to(tl.float32)[:, None]
        dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, width, COLUMNS):
            column = (start + tl.arange(0, COLUMNS))[None, :]
            inside = is_row[:, None] & (column < width)
            da = tl.load(da_RF + narrow_at + column, inside, other=0.0).to(tl.float32)
            gate = tl.load(h_RH + wide_at + column, inside, other=0.0).to(tl.float32)
            up = tl.load(h_RH + wide_at + width + column, inside, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            if weight_R is not None:
                dweight += da * silu * up
                da *= weight
            dgate = da * up * (sigmoid + silu * (1 - sigmoid))
            dtype = dh_RH.dtype.element_ty
            tl.store(dh_RH + wide_at + column, dgate.to(dtype), inside)
            tl.store(dh_RH + wide_at + width + column, (da * silu).to(dtype), inside)
        if weight_R is not None:
            tl.store(dweight_R + row, tl.sum(dweight, 1).to(dweight_R.dtype.element_ty), is_row)
