"""Dense fp8 GEMMs with their gradients; formats and suffixes of `ops.formats`."""

from typing import Any

import torch
from torch import Tensor

from graphmoe.ops.formats import KERNELS
from graphmoe.ops.fp8 import GRADIENT, INPUT, rounded


def linear(x_RK: Tensor, w_NK: Tensor, wgrad: str, recipe: str) -> Tensor:
    """Return x @ w.T by an fp8 GEMM -> [R, N] in the dtype of x (bf16 or fp32). No device sync.

    ``wgrad``: "fp8", or "bf16" for a weight gradient in the dtype of x; ``recipe``: a key of `KERNELS`.
    """
    by = KERNELS[recipe]
    return by.product(by.quantize(x_RK, w_NK, INPUT), by.weight(w_NK), x_RK.dtype)


def linear_dgrad(dy_RN: Tensor, w_NK: Tensor, recipe: str) -> Tensor:
    """Return dx of `linear` [R, K]."""
    by = KERNELS[recipe]
    return by.product(by.quantize(dy_RN, w_NK, GRADIENT), by.transposed(w_NK), dy_RN.dtype)


def linear_wgrad(dy_RN: Tensor, x_RK: Tensor, w_NK: Tensor, wgrad: str, recipe: str) -> Tensor:
    """Return dw of `linear` [N, K], summed in fp32, rounded once."""
    by = KERNELS[recipe]
    x = by.quantize(x_RK, w_NK, INPUT)
    if wgrad == "bf16":
        return dy_RN.t() @ by.values(x).to(dy_RN.dtype)
    return rounded(by.wgrad(by.quantize(dy_RN, w_NK, GRADIENT), x), dy_RN.dtype)


_forward = torch.library.custom_op("graphmoe::fp8_linear", linear, mutates_args=())
_dgrad = torch.library.custom_op("graphmoe::fp8_linear_dgrad", linear_dgrad, mutates_args=())
_wgrad = torch.library.custom_op("graphmoe::fp8_linear_wgrad", linear_wgrad, mutates_args=())
_forward.register_fake(lambda x_RK, w_NK, wgrad, recipe: x_RK.new_empty(x_RK.shape[0], w_NK.shape[0]))
_dgrad.register_fake(lambda dy_RN, w_NK, recipe: dy_RN.new_empty(dy_RN.shape[0], w_NK.shape[1]))
_wgrad.register_fake(lambda dy_RN, x_RK, w_NK, wgrad, recipe: dy_RN.new_empty(w_NK.shape))


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
