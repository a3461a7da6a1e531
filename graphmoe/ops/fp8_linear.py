"""Products with a weight in 8 bits, forward and gradients, by a recipe of scales.

Suffixes: R rows, N outputs, K inputs of the weight; q are stored numbers and scales those of `ops.fp8`.

The products contract the last axis of both sides, along which a row has one scale (rowwise), that of its
tensor (tensorwise), or one for each block (`ops.fp8_blocks`). Weight gradients contract the rows, whose
scales may differ: rowwise divides the numbers of dy by what the two scales of their row lack to the largest
of all, which for a row of much smaller gradients may be less than 8 bits can hold, and then is zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.ops import fp8_blocks, num_warps  # noqa: F401  # registers operations
from graphmoe.ops.fp8 import BLOCK, GRADIENT, INPUT, SMALLEST, delayed, fp8_dtype, given, rounded, wide_dtype
from graphmoe.ops.fp8_blocks import reference as blocks

FIRST_SCALE = 2.0**-2
"""The delayed scale of numbers of which nothing is known: up to 112."""
ROWS_ON_CPU = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)
"""True where torch has scales of rows on a CPU; 2.11 has not."""
ALIGNED = 16
"""Elements of which the sides of a product are multiples. (aten/src/ATen/native/cuda/ScaledBlas.cpp)"""
Stored = tuple[Tensor, Tensor]
"""Numbers of 8 bits and their scales."""


class Recipe(NamedTuple):
    """Kind of scales, and what is computed with them."""

    aligned: int
    """Elements of which both sides of a weight are multiples."""
    rows: Callable[[Tensor], Stored] | None
    """Storing of rows [R, C] for what contracts C; None by a delayed scale, `ops.fp8.delayed`."""
    weight: Callable[[Tensor], Stored]
    """Storing of a weight [N, K] for the forward."""
    turned: Callable[[Tensor], Stored]
    """Storing of the transposed weight, for the gradient of rows."""
    product: Callable[[Stored, Stored, torch.dtype], Tensor]
    """Product [R, N] of stored rows and a stored weight."""
    wgrad: Callable[[Stored, Stored], Tensor]
    """Sum [N, K] in fp32 over the rows of stored dy and x."""
    values: Callable[[Stored], Tensor]
    """Values of stored rows in fp32."""


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


def _first(w: Tensor) -> tuple[Tensor, Tensor]:
    """The delayed scale [1] of what a weight meets, and what takes up its largest number [1], as they begin.

    Units of a run have those of `runtime.compile.delayed_scales` instead.
    """
    return w.new_full((1,), FIRST_SCALE, dtype=torch.float32), w.new_zeros(1, dtype=torch.float32)


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


RECIPES = {
    "rowwise": Recipe(
        ALIGNED,
        lambda x: torch.ops.graphmoe.fp8_rows(x),
        lambda w: torch.ops.graphmoe.fp8_rows(w),
        lambda w: torch.ops.graphmoe.fp8_columns(w),
        lambda x, w, dtype: product(x[0], w[0], x[1], w[1], dtype),
        _rowwise_wgrad,
        lambda x: x[0].float() * x[1],
    ),
    "tensorwise": Recipe(
        ALIGNED,
        None,
        lambda w: torch.ops.graphmoe.fp8_whole_rows(w),
        lambda w: torch.ops.graphmoe.fp8_whole_columns(w),
        _whole_product,
        _whole_wgrad,
        lambda x: x[0].float() * x[1],
    ),
    "blockwise": Recipe(
        BLOCK,
        blocks.quantise_blockwise,
        fp8_blocks.squares,
        fp8_blocks.squares_turned,
        _with_blocks,
        _blocks_wgrad,
        lambda x: blocks.values(*x),
    ),
    "mxfp8": Recipe(
        blocks.MX_BLOCK,
        fp8_blocks.mx_rows,
        fp8_blocks.mx_rows,
        fp8_blocks.mx_columns,
        _with_blocks,
        _blocks_wgrad,
        lambda x: blocks.values(*x),
    ),
}


def stored(by: Recipe, x_RC: Tensor, w: Tensor, side: str) -> Stored:
    """Store the input of a weight's product, or the gradient of its output, by a recipe."""
    return delayed(x_RC, w, side) if by.rows is None else by.rows(x_RC)


def linear(x_RK: Tensor, w_NK: Tensor, wgrad: str, recipe: str) -> Tensor:
    """x @ w.T in 8 bits -> [R, N] in the dtype of x (bf16 or fp32). No device sync.

    ``wgrad`` says how the weight's gradient is computed: "fp8", or "bf16" in the dtype of x; ``recipe`` names
    one of `RECIPES`.
    """
    by = RECIPES[recipe]
    return by.product(stored(by, x_RK, w_NK, INPUT), by.weight(w_NK), x_RK.dtype)


def linear_dgrad(dy_RN: Tensor, w_NK: Tensor, recipe: str) -> Tensor:
    """The gradient of x of `linear`."""
    by = RECIPES[recipe]
    return by.product(stored(by, dy_RN, w_NK, GRADIENT), by.turned(w_NK), dy_RN.dtype)


def linear_wgrad(dy_RN: Tensor, x_RK: Tensor, w_NK: Tensor, wgrad: str, recipe: str) -> Tensor:
    """The gradient of w of `linear`: a sum in fp32, rounded last."""
    by = RECIPES[recipe]
    x = stored(by, x_RK, w_NK, INPUT)
    if wgrad == "bf16":
        return dy_RN.t() @ by.values(x).to(dy_RN.dtype)
    return rounded(by.wgrad(stored(by, dy_RN, w_NK, GRADIENT), x), dy_RN.dtype)


_forward = torch.library.custom_op("graphmoe::fp8_linear", linear, mutates_args=())
_dgrad = torch.library.custom_op("graphmoe::fp8_linear_dgrad", linear_dgrad, mutates_args=())
_wgrad = torch.library.custom_op("graphmoe::fp8_linear_wgrad", linear_wgrad, mutates_args=())
_transposed.register_fake(
    lambda q_RC, factor_R1: q_RC.new_empty(q_RC.shape[1], q_RC.shape[0] + -q_RC.shape[0] % ALIGNED)
)
_forward.register_fake(lambda x_RK, w_NK, wgrad, recipe: x_RK.new_empty(x_RK.shape[0], w_NK.shape[0]))
_dgrad.register_fake(lambda dy_RN, w_NK, recipe: dy_RN.new_empty(dy_RN.shape[0], w_NK.shape[1]))
_wgrad.register_fake(lambda dy_RN, x_RK, w_NK, wgrad, recipe: dy_RN.new_empty(w_NK.shape))
_given = torch.library.custom_op("graphmoe::fp8_given", given, mutates_args=())
_given.register_fake(
    lambda x_RC, scale, largest, wide: (
        torch.empty_like(x_RC, dtype=wide_dtype() if wide else fp8_dtype()),
        torch.empty_like(largest),
    )
)
for _name in (INPUT, GRADIENT):
    torch.library.custom_op(f"graphmoe::{_name}", _first, mutates_args=()).register_fake(
        lambda w: (w.new_empty(1, dtype=torch.float32), w.new_empty(1, dtype=torch.float32))
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_RK, w_NK, ctx.wgrad, ctx.recipe = inputs
    ctx.save_for_backward(x_RK, w_NK)


def _backward(ctx: Any, dy_RN: Tensor) -> tuple[Tensor | None, ...]:
    (x_RK, w_NK), dx_RK, dw_NK = ctx.saved_tensors, None, None
    if ctx.needs_input_grad[0]:
        dx_RK = torch.ops.graphmoe.fp8_linear_dgrad(dy_RN, w_NK, ctx.recipe)
    if ctx.needs_input_grad[1]:
        dw_NK = torch.ops.graphmoe.fp8_linear_wgrad(dy_RN, x_RK, w_NK, ctx.wgrad, ctx.recipe)
    return dx_RK, dw_NK, None, None


_forward.register_autograd(_backward, setup_context=_save)
