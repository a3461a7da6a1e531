"""Kernels of `graphmoe.ops.swiglu`, one launch each; unused rows are skipped."""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphmoe.ops import num_warps, tile
from graphmoe.ops.grouped_mlp.rows_kernel import add_bias, clamped, experts_of, gradients

THREADS, TILE, WIDTH = 256, 2048, 512  # 512 columns leave few lanes idle at any width
MAX_ROWS = 64
SUM_ROWS, SUM_COLUMNS = 128, 64  # of a step of `expert_sums`


def forward(
    h_RH: Tensor, weight_R: Tensor | None, ends_E: Tensor, bias_EH: Tensor | None = None, limit: float = 0.0
) -> Tensor:
    rows, width = h_RH.shape[0], h_RH.shape[1] // 2
    a_RF = h_RH.new_empty(rows, width)
    tile_rows, tile_columns = tile(width, TILE, WIDTH, MAX_ROWS)
    programs = triton.cdiv(rows, tile_rows) * triton.cdiv(width, tile_columns)
    if programs:
        # a grid for all rows: programs of dead rows read the live count and exit
        _forward_kernel[(programs,)](
            h_RH.contiguous(), _contiguous(weight_R), _contiguous(bias_EH), ends_E, a_RF,
            len(ends_E), rows, width,
            LIMIT=limit, BLOCK_E=block_of_ends(ends_E, bias_EH), ROWS=tile_rows, COLUMNS=tile_columns,
            num_warps=num_warps(THREADS),
        )  # fmt: skip
    return a_RF


def backward(
    da_RF: Tensor, h_RH: Tensor, weight_R: Tensor | None, ends_E: Tensor, bias_EH: Tensor | None = None,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, width = da_RF.shape
    dh_RH = h_RH.new_empty(h_RH.shape)
    if weight_R is None:
        dweight_R = torch.empty(0, dtype=torch.float32, device=h_RH.device)
    else:
        dweight_R = weight_R.new_empty(weight_R.shape)
    tile_rows, tile_columns = tile(width, TILE, WIDTH, MAX_ROWS)
    if rows:
        # one program owns a row, so the sum in dweight has one order
        _backward_kernel[(triton.cdiv(rows, tile_rows),)](
            da_RF.contiguous(), h_RH.contiguous(), _contiguous(weight_R), _contiguous(bias_EH), ends_E, dh_RH,
            dweight_R, len(ends_E), rows, width,
            LIMIT=limit, BLOCK_E=block_of_ends(ends_E, bias_EH), ROWS=tile_rows, COLUMNS=tile_columns,
            num_warps=num_warps(THREADS),
        )  # fmt: skip
    return dh_RH, dweight_R


def expert_sums(x_RC: Tensor, ends_E: Tensor, scale: Tensor | None = None) -> Tensor:
    E, C = len(ends_E), x_RC.shape[1]
    sums_EC = torch.empty(E, C, dtype=torch.float32, device=x_RC.device)
    if sums_EC.numel():
        _sums_kernel[(triton.cdiv(C, SUM_COLUMNS), E)](
            x_RC.contiguous(), _contiguous(scale), ends_E, sums_EC, C,
            BLOCKS=1 if scale is None else scale.shape[1],
            MX=scale is not None and scale.dtype == torch.uint8,
            ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=num_warps(THREADS),
        )  # fmt: skip
    return sums_EC


def block_of_ends(ends_E: Tensor, bias_EH: Tensor | None) -> int:
    """Return BLOCK_E of `experts_of`; any without a bias."""
    return 1 if bias_EH is None else triton.next_power_of_2(len(ends_E))


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


@triton.jit
def _forward_kernel(
    h_RH, weight_R, bias_EH, ends_E, a_RF, experts, rows, width,
    LIMIT: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
        expert = experts_of(row, row < live, ends_E, experts, BLOCK_E)[:, None]
        gate, up = add_bias(gate, up, bias_EH, expert, column, inside, width)
        gate, up, steep = clamped(gate, up, LIMIT)
        a = gate * tl.sigmoid(steep) * up
        if weight_R is not None:
            a *= tl.load(weight_R + row, row < live, other=0.0).to(tl.float32)[:, None]
        to = a_RF + row.to(tl.int64)[:, None] * width + column
        tl.store(to, a.to(a_RF.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    da_RF, h_RH, weight_R, bias_EH, ends_E, dh_RH, dweight_R, experts, rows, width,
    LIMIT: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    live = tl.minimum(tl.load(ends_E + experts - 1), rows)
    first = tl.program_id(0) * ROWS
    if first < live:
        row = first + tl.arange(0, ROWS)
        is_row = row < live
        narrow_at, wide_at = row.to(tl.int64)[:, None] * width, row.to(tl.int64)[:, None] * (2 * width)
        if weight_R is not None:
            weight = tl.load(weight_R + row, is_row, other=0.0).to(tl.float32)[:, None]
        expert = experts_of(row, is_row, ends_E, experts, BLOCK_E)[:, None]
        dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, width, COLUMNS):
            column = (start + tl.arange(0, COLUMNS))[None, :]
            inside = is_row[:, None] & (column < width)
            da = tl.load(da_RF + narrow_at + column, inside, other=0.0).to(tl.float32)
            gate = tl.load(h_RH + wide_at + column, inside, other=0.0).to(tl.float32)
            up = tl.load(h_RH + wide_at + width + column, inside, other=0.0).to(tl.float32)
            gate, up = add_bias(gate, up, bias_EH, expert, column, inside, width)
            near, factor, steep = clamped(gate, up, LIMIT)
            sigmoid = tl.sigmoid(steep)
            silu = near * sigmoid
            if weight_R is not None:
                dweight += da * silu * factor
                da *= weight
            dgate, dup = gradients(da, gate, up, factor, sigmoid, silu, LIMIT)
            dtype = dh_RH.dtype.element_ty
            tl.store(dh_RH + wide_at + column, dgate.to(dtype), inside)
            tl.store(dh_RH + wide_at + width + column, dup.to(dtype), inside)
        if weight_R is not None:
            tl.store(dweight_R + row, tl.sum(dweight, 1).to(dweight_R.dtype.element_ty), is_row)


@triton.jit
def _sums_kernel(
    x_RC, scale_RB, ends_E, sums_EC, columns,
    BLOCKS: tl.constexpr, MX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # one program owns columns of an expert, so each sum has one order
    expert = tl.program_id(1)
    start, end = tl.load(ends_E + expert - 1, expert > 0, other=0), tl.load(ends_E + expert)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        x = tl.load(x_RC + at, inside, other=0.0).to(tl.float32)
        if scale_RB is not None:
            block = column // (columns // BLOCKS)
            scale = tl.load(scale_RB + row.to(tl.int64)[:, None] * BLOCKS + block[None, :], inside, other=0)
            if MX:
                scale = scale.to(tl.int32)
                scale = tl.where(scale > 0, scale << 23, 1 << 22).to(tl.float32, bitcast=True)
            x *= scale
        total += x
    tl.store(sums_EC + expert * columns + column, tl.sum(total, 0), column < columns)
