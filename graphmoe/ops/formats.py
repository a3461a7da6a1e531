"""Kernels of each fp8 format, and dense GEMMs by them; `graphmoe.config.formats` has their properties.

Suffixes: R rows, N outputs and K inputs of a weight; q are quantized values, scales as in `ops.fp8`. GEMMs
contract the last axis of both operands. A row has one scale (rowwise), its tensor has one (tensorwise), or
each block has one (`ops.fp8_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from graphmoe.config.formats import FORMATS
from graphmoe.ops import num_warps, register_gradient
from graphmoe.ops.fp8 import GRADIENT, INPUT, SMALLEST, Stored, delayed, fp8_dtype, quantise, rounded
from graphmoe.ops.fp8_blocks import reference as blocks

if TYPE_CHECKING:  # its package imports this file
    from graphmoe.ops.fp8_mlp.reference import MlpSteps

# torch 2.11 has no row scales on a CPU
ROWS_ON_CPU = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)
ALIGNED = FORMATS["rowwise"].aligned


class Form(NamedTuple):
    """Custom op, by its name, that quantizes matrices; compiled steps run it once per weight."""

    name: str
    # the same in torch operations, which Inductor fuses with the producer of an activation
    plain: Callable[[Tensor], Stored] | None = None

    def __call__(self, w: Tensor) -> Stored:
        return getattr(torch.ops.graphmoe, self.name)(w)


class Kernels(NamedTuple):
    # rows [R, C], given the weight and whether they are its input or output gradient
    quantize: Callable[[Tensor, Tensor, str], Stored]
    weight: Form  # weights [N, K] or [E, N, K] for the forward
    transposed: Form  # transposed weights for dgrad
    product: Callable[[Stored, Stored, torch.dtype], Tensor]  # GEMM [R, N] of quantized rows and weight
    wgrad: Callable[[Stored, Stored], Tensor]  # [N, K] in fp32 of quantized dy and x
    values: Callable[[Stored], Tensor]  # dequantized rows, fp32
    experts: Callable[[bool], MlpSteps] | None = None  # steps of the routed experts on a GPU (True) or CPU


def product(q_RK: Tensor, q_NK: Tensor, scale_R1: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x @ w.T [R, N] of rowwise fp8 operands, which are contiguous along the contracted axis K."""
    if q_RK.device.type == "cpu" and not ROWS_ON_CPU:
        one = torch.ones_like(scale_R1[:1, 0])
        sums_RN = torch._scaled_mm(q_RK, q_NK.t(), one, one, out_dtype=torch.float32)
        return (sums_RN * (scale_R1 * scale_N1.t())).to(dtype)
    return torch._scaled_mm(q_RK, q_NK.t(), scale_R1, scale_N1.t(), out_dtype=dtype, use_fast_accum=True)


def row_factors(scale_R1: Tensor, of_x_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors [R, 1] that multiply dy's rows before the GEMM of wgrad, and the scale of its result."""
    # wgrad contracts rows with different scales; rows with much smaller gradients can underflow to zero
    both_R1 = scale_R1 * of_x_R1
    largest = both_R1.amax().clamp(min=SMALLEST)
    return both_R1 / largest, largest


@torch.library.custom_op("graphmoe::fp8_transposed", mutates_args=())
def _transposed(q_RC: Tensor, factor_R1: Tensor | None) -> Tensor:
    """Multiply rows by factors, if any, and transpose -> q [C, R'], R' zero-padded to a multiple of 16."""
    rows, columns = q_RC.shape
    padded = rows + -rows % ALIGNED
    if q_RC.is_cuda:
        return by_kernel(q_RC, factor_R1, padded)
    q_CR = q_RC.new_zeros(columns, padded)
    values_RC = q_RC if factor_R1 is None else (q_RC.float() * factor_R1).to(q_RC.dtype)
    q_CR[:, :rows] = values_RC.t()
    return q_CR


def by_kernel(q_RC: Tensor, factor_R1: Tensor | None, padded: int) -> Tensor:
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


def _whole_wgrad(dy: Stored, x: Stored, factor_R1: Tensor | None = None) -> Tensor:
    dy_q, x_q = (torch.ops.graphmoe.fp8_transposed(*side) for side in ((dy[0], factor_R1), (x[0], None)))
    return torch._scaled_mm(dy_q, x_q.t(), dy[1], x[1], out_dtype=torch.float32)


def _rowwise_wgrad(dy: Stored, x: Stored) -> Tensor:
    factor_R1, scale = row_factors(dy[1], x[1])
    return _whole_wgrad((dy[0], scale), (x[0], torch.ones_like(scale)), factor_R1)


def _with_blocks(rows: Stored, weight: Stored, dtype: torch.dtype) -> Tensor:
    return torch.ops.graphmoe.fp8_blocks_mm(*rows, *weight, not blocks.is_mx(rows[1]), dtype)


def _blocks_wgrad(dy: Stored, x: Stored) -> Tensor:
    ops = torch.ops.graphmoe
    return ops.fp8_blocks_mm(*ops.fp8_blocks_turned(*dy), *ops.fp8_blocks_turned(*x), False, torch.float32)


def _experts_by_rows(on_gpu: bool) -> MlpSteps:
    from graphmoe.ops.fp8_mlp import launches, reference

    return launches.STEPS if on_gpu else reference.BY_ROWS


def _experts_by_blocks(on_gpu: bool) -> MlpSteps:
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


def linear(x_RK: Tensor, w_NK: Tensor, wgrad: str, recipe: str) -> Tensor:
    """Return x @ w.T by an fp8 GEMM -> [R, N] in the dtype of x (bf16 or fp32). No device sync.

    ``wgrad``: "fp8", or "bf16" for a weight gradient in the dtype of x; ``recipe``: a key of `KERNELS`.
    """
    by = KERNELS[recipe]
    return by.product(by.quantize(x_RK, w_NK, INPUT), by.weight(w_NK), x_RK.dtype)


def linear_dgrad(dy_RN: Tensor, w_NK: Tensor, recipe: str) -> Tensor:
    """Return the gradient of the input of `linear` [R, K], by an fp8 GEMM."""
    by = KERNELS[recipe]
    return by.product(by.quantize(dy_RN, w_NK, GRADIENT), by.transposed(w_NK), dy_RN.dtype)


def linear_wgrad(dy_RN: Tensor, x_RK: Tensor, w_NK: Tensor, wgrad: str, recipe: str) -> Tensor:
    """Return the gradient of the weight of `linear` [N, K], summed in fp32, rounded once."""
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
register_gradient(
    _forward,
    (
        lambda dy_RN, x_RK, w_NK, wgrad, recipe: torch.ops.graphmoe.fp8_linear_dgrad(dy_RN, w_NK, recipe),
        lambda dy_RN, *saved: torch.ops.graphmoe.fp8_linear_wgrad(dy_RN, *saved),
    ),
)
