"""Kernels of each number format of products in 8 bits; `graphmoe.config.formats` has the facts beside them.

Suffixes: R rows, N outputs, K inputs of a weight; q are stored numbers and scales those of `ops.fp8`.

The products contract the last axis of both sides, along which a row has one scale (rowwise), that of its
tensor (tensorwise), or one for each block (`ops.fp8_blocks`). Weight gradients contract the rows, whose
scales may differ: rowwise divides the numbers of dy by what the two scales of their row lack to the largest
of all, which for a row of much smaller gradients may be less than 8 bits can hold, and then is zero.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.config.formats import FORMATS
from graphmoe.ops import num_warps
from graphmoe.ops.fp8 import SMALLEST, Stored, delayed, fp8_dtype, quantise
from graphmoe.ops.fp8_blocks import reference as blocks
from graphmoe.ops.fp8_steps import Steps

ROWS_ON_CPU = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)
"""True where torch has scales of rows on a CPU; 2.11 has not."""
ALIGNED = FORMATS["rowwise"].aligned


class Form(NamedTuple):
    """An operation that stores matrices, which compiled steps compute once for each weight."""

    name: str
    plain: Callable[[Tensor], Stored] | None = None
    """The same spelt out, for Inductor to join with what makes activations that are stored by it."""

    def __call__(self, w: Tensor) -> Stored:
        stored: Stored = getattr(torch.ops.graphmoe, self.name)(w)
        return stored


class Kernels(NamedTuple):
    """Arithmetic of a format."""

    store: Callable[[Tensor, Tensor, str], Stored]
    """Storing of rows [R, C] for what contracts C: a weight's input, or the gradient of its output."""
    weight: Form
    """Storing of a weight [N, K], or of those of experts, for the forward."""
    turned: Form
    """Storing of the transposed weight, for the gradient of rows."""
    product: Callable[[Stored, Stored, torch.dtype], Tensor]
    """Product [R, N] of stored rows and a stored weight."""
    wgrad: Callable[[Stored, Stored], Tensor]
    """Sum [N, K] in fp32 over the rows of stored dy and x."""
    values: Callable[[Stored], Tensor]
    """Values of stored rows in fp32."""
    experts: Callable[[bool], Steps] | None = None
    """Steps of `ops.fp8_mlp` on a GPU or, if False, on a CPU."""


def product(q_RK: Tensor, q_NK: Tensor, scale_R1: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    """The product [R, N] of two sides that lie along what is contracted."""
    if q_RK.device.type == "cpu" and not ROWS_ON_CPU:
        one = torch.ones_like(scale_R1[:1, 0])
        sums_RN = torch._scaled_mm(q_RK, q_NK.t(), one, one, out_dtype=torch.float32)
        return (sums_RN * (scale_R1 * scale_N1.t())).to(dtype)
    return torch._scaled_mm(q_RK, q_NK.t(), scale_R1, scale_N1.t(), out_dtype=dtype, use_fast_accum=True)


def row_factors(scale_R1: Tensor, of_x_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the rows of dy, at most 1, before its product with x; and the scale of that product."""
    both_R1 = scale_R1 * of_x_R1
    largest = both_R1.amax().clamp(min=SMALLEST)
    return both_R1 / largest, largest


@torch.library.custom_op("graphmoe::fp8_transposed", mutates_args=())
def _transposed(q_RC: Tensor, factor_R1: Tensor | None) -> Tensor:
    """q [C, R'] of the rows times their factors; R' is R up to the next multiple of 16, with zeros there."""
    rows, columns = q_RC.shape
    padded = rows + -rows % ALIGNED
    if q_RC.is_cuda:
        return by_kernel(q_RC, factor_R1, padded)
    q_CR = q_RC.new_zeros(columns, padded)
    values_RC = q_RC if factor_R1 is None else (q_RC.float() * factor_R1).to(q_RC.dtype)
    q_CR[:, :rows] = values_RC.t()
    return q_CR


def by_kernel(q_RC: Tensor, factor_R1: Tensor | None, padded: int) -> Tensor:
    """The same by a kernel, into ``padded`` columns."""
    from graphmoe.ops.fp8_mlp.kernels import transpose_kernel

    q_RC = q_RC.contiguous()
    R, C = q_RC.shape
    q_CR = q_RC.new_empty(C, padded)
    if q_CR.numel():
        factor = None if factor_R1 is None else factor_R1.contiguous()
        transpose_kernel[(-(-padded // 128), -(-C // 128))](
            q_RC, factor, q_CR, R, padded, C=C, BLOCK_R=128, COLUMNS=128, num_warps=num_warps(128)
        )
    return q_CR


_transposed.register_fake(
    lambda q_RC, factor_R1: q_RC.new_empty(q_RC.shape[1], q_RC.shape[0] + -q_RC.shape[0] % ALIGNED)
)


def _whole_product(x: Stored, w: Stored, dtype: torch.dtype) -> Tensor:
    scale_1 = w[1].view(-1)[:1]
    return torch._scaled_mm(x[0], w[0].t(), x[1], scale_1, out_dtype=dtype, use_fast_accum=True)


def _whole_wgrad(dy: Stored, x: Stored) -> Tensor:
    transposed = torch.ops.graphmoe.fp8_transposed
    sides = transposed(dy[0], None), transposed(x[0], None)
    return torch._scaled_mm(sides[0], sides[1].t(), dy[1], x[1], out_dtype=torch.float32)


def _rowwise_wgrad(dy: Stored, x: Stored) -> Tensor:
    factor_R1, scale = row_factors(dy[1], x[1])
    transposed = torch.ops.graphmoe.fp8_transposed
    sides = transposed(dy[0], factor_R1), transposed(x[0], None)
    return torch._scaled_mm(sides[0], sides[1].t(), scale, torch.ones_like(scale), out_dtype=torch.float32)


def _with_blocks(rows: Stored, weight: Stored, dtype: torch.dtype) -> Tensor:
    found: Tensor = torch.ops.graphmoe.fp8_blocks_mm(*rows, *weight, not blocks.is_mx(rows[1]), dtype)
    return found


def _blocks_wgrad(dy: Stored, x: Stored) -> Tensor:
    ops = torch.ops.graphmoe
    sides = ops.fp8_blocks_turned(*dy), ops.fp8_blocks_turned(*x)
    found: Tensor = ops.fp8_blocks_mm(*sides[0], *sides[1], False, torch.float32)
    return found


def _experts_by_rows(on_gpu: bool) -> Steps:
    from graphmoe.ops.fp8_mlp import launches, reference

    return launches.STEPS if on_gpu else reference.BY_ROWS


def _experts_by_blocks(on_gpu: bool) -> Steps:
    from graphmoe.ops.fp8_mlp import mx_launches, reference

    return mx_launches.STEPS if on_gpu else reference.BY_BLOCKS


KERNELS = {
    "rowwise": Kernels(
        lambda x, *_: torch.ops.graphmoe.fp8_rows(x),
        Form("fp8_rows", lambda x: quantise(x, fp8_dtype())),
        Form("fp8_columns"),
        lambda x, w, dtype: product(x[0], w[0], x[1], w[1], dtype),
        _rowwise_wgrad,
        lambda x: x[0].float() * x[1],
        _experts_by_rows,
    ),
    "tensorwise": Kernels(
        delayed,
        Form("fp8_whole_rows"),
        Form("fp8_whole_columns"),
        _whole_product,
        _whole_wgrad,
        lambda x: x[0].float() * x[1],
        _experts_by_rows,
    ),
    "blockwise": Kernels(
        lambda x, *_: blocks.quantise_blockwise(x),
        Form("fp8_squares"),
        Form("fp8_squares_turned"),
        _with_blocks,
        _blocks_wgrad,
        lambda x: blocks.values(*x),
    ),
    "mxfp8": Kernels(
        lambda x, *_: torch.ops.graphmoe.mx_rows(x),
        Form("mx_rows", blocks.quantise_mx),
        Form("mx_columns"),
        _with_blocks,
        _blocks_wgrad,
        lambda x: blocks.values(*x),
        _experts_by_blocks,
    ),
}
"""Kernels by the names of `FORMATS`."""
