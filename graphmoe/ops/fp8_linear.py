"""Products with a weight in 8 bits, forward and gradients.

Suffixes: R rows, N outputs, K inputs of the weight; q are stored numbers and scales those of `ops.fp8`.

The products contract the last axis of both sides, along which a scale must be the same (one for each row of
either side). Weight gradients contract the rows, whose scales differ: the numbers of dy are divided by what
the two scales of their row lack to the largest of all, which for a row of much smaller gradients may be less
than 8 bits can hold, and then is zero.
"""

from typing import Any

import torch
from torch import Tensor

from graphmoe.ops import num_warps
from graphmoe.ops.fp8 import fp8_dtype, quantise, rounded

ALIGNED = 16
"""Elements of which the sides of a product are multiples. (aten/src/ATen/native/cuda/ScaledBlas.cpp)"""


def product(q_RK: Tensor, q_NK: Tensor, scale_R1: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    """The product [R, N] of two sides that lie along what is contracted."""
    return torch._scaled_mm(q_RK, q_NK.t(), scale_R1, scale_N1.t(), out_dtype=dtype, use_fast_accum=True)


def row_factors(scale_R1: Tensor, of_x_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the rows of dy, at most 1, before its product with x; and the scale of that product."""
    both_R1 = scale_R1 * of_x_R1
    largest = both_R1.amax().clamp(min=2.0**-120)
    return both_R1 / largest, largest


@torch.library.custom_op("graphmoe::fp8_transposed", mutates_args=())
def _transposed(q_RC: Tensor, factor_R1: Tensor | None) -> Tensor:
    """q [C, R'] of the rows times their factors; R' is R up to the next multiple of 16, with zeros there."""
    rows, columns = q_RC.shape
    padded = rows + -rows % ALIGNED
    if q_RC.is_cuda:
        return turned(q_RC, factor_R1, padded)
    q_CR = q_RC.new_zeros(columns, padded)
    values_RC = q_RC if factor_R1 is None else (q_RC.float() * factor_R1).to(q_RC.dtype)
    q_CR[:, :rows] = values_RC.t()
    return q_CR


def turned(q_RC: Tensor, factor_R1: Tensor | None, padded: int) -> Tensor:
    """`_transposed` by a kernel, into ``padded`` columns."""
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


def linear(x_RK: Tensor, w_NK: Tensor, wgrad: str) -> Tensor:
    """x @ w.T in 8 bits -> [R, N] in the dtype of x (bf16 or fp32). No device sync.

    ``wgrad`` says how the weight's gradient is computed: "fp8", or "bf16" in the dtype of x.
    """
    q_RK, scale_R1 = quantise(x_RK, fp8_dtype())
    q_NK, scale_N1 = torch.ops.graphmoe.fp8_rows(w_NK)
    return product(q_RK, q_NK, scale_R1, scale_N1, x_RK.dtype)


def linear_dgrad(dy_RN: Tensor, w_NK: Tensor) -> Tensor:
    """The gradient of x of `linear`."""
    q_RN, scale_R1 = quantise(dy_RN, fp8_dtype())
    q_KN, scale_K1 = torch.ops.graphmoe.fp8_columns(w_NK)
    return product(q_RN, q_KN, scale_R1, scale_K1, dy_RN.dtype)


def linear_wgrad(dy_RN: Tensor, x_RK: Tensor, wgrad: str) -> Tensor:
    """The gradient of w of `linear`: a sum in fp32, rounded last."""
    q_RK, of_x_R1 = quantise(x_RK, fp8_dtype())
    if wgrad == "bf16":
        return dy_RN.t() @ (q_RK.float() * of_x_R1).to(dy_RN.dtype)
    q_RN, scale_R1 = quantise(dy_RN, fp8_dtype())
    factor_R1, scale = row_factors(scale_R1, of_x_R1)
    turned = torch.ops.graphmoe.fp8_transposed
    sides = turned(q_RN, factor_R1), turned(q_RK, None)
    sums_NK = torch._scaled_mm(sides[0], sides[1].t(), scale, torch.ones_like(scale), out_dtype=torch.float32)
    return rounded(sums_NK, dy_RN.dtype)


_forward = torch.library.custom_op("graphmoe::fp8_linear", linear, mutates_args=())
_dgrad = torch.library.custom_op("graphmoe::fp8_linear_dgrad", linear_dgrad, mutates_args=())
_wgrad = torch.library.custom_op("graphmoe::fp8_linear_wgrad", linear_wgrad, mutates_args=())
_transposed.register_fake(
    lambda q_RC, factor_R1: q_RC.new_empty(q_RC.shape[1], q_RC.shape[0] + -q_RC.shape[0] % ALIGNED)
)
_forward.register_fake(lambda x_RK, w_NK, wgrad: x_RK.new_empty(x_RK.shape[0], w_NK.shape[0]))
_dgrad.register_fake(lambda dy_RN, w_NK: dy_RN.new_empty(dy_RN.shape[0], w_NK.shape[1]))
_wgrad.register_fake(lambda dy_RN, x_RK, wgrad: dy_RN.new_empty(dy_RN.shape[1], x_RK.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_RK, w_NK, ctx.wgrad = inputs
    ctx.save_for_backward(x_RK, w_NK)


def _backward(ctx: Any, dy_RN: Tensor) -> tuple[Tensor | None, ...]:
    (x_RK, w_NK), dx_RK, dw_NK = ctx.saved_tensors, None, None
    if ctx.needs_input_grad[0]:
        dx_RK = torch.ops.graphmoe.fp8_linear_dgrad(dy_RN, w_NK)
    if ctx.needs_input_grad[1]:
        dw_NK = torch.ops.graphmoe.fp8_linear_wgrad(dy_RN, x_RK, ctx.wgrad)
    return dx_RK, dw_NK, None


_forward.register_autograd(_backward, setup_context=_save)
