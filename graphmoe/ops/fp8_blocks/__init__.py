"""fp8 operands with one scale per block of the contracted axis, and their GEMMs.

Suffixes: R rows, C columns, N outputs and K inputs of a weight, B blocks; q are quantized values, s scales.

*blockwise*: 128 elements of a row, or 128 x 128 of a weight, share an fp32 scale of `ops.fp8`. Scales are [B,
R], or [N / 128, B] with B padded to a multiple of 4, as cuBLASLt reads them
(aten/src/ATen/native/cuda/ScaledBlas.cpp).

*mxfp8*: 32 elements share a power of two, stored as a byte (e8m0), [R, B]: 2^(floor(log2 amax) - 8), or NaN
(255) if amax is not finite. Values beyond 448 times the scale saturate (OCP Microscaling Formats 1.0, 6.3).
"""

from typing import Any

import torch
from torch import Tensor

from graphmoe.ops.fp8 import BLOCK
from graphmoe.ops.fp8_blocks import reference
from graphmoe.ops.fp8_blocks.reference import block_of, is_mx, mx_like, quantise_mx, squares_like


def _kernels(x: Tensor) -> Any:
    if not x.is_cuda:
        return reference
    from graphmoe.ops.fp8_blocks import launches

    return launches


@torch.library.custom_op("graphmoe::fp8_squares", mutates_args=())
def squares(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight -> q [N, K], and scales [N / 128, B] of its blocks of 128 x 128. No device sync."""
    return _kernels(w_NK).squares(w_NK, turned=False)


@torch.library.custom_op("graphmoe::fp8_squares_turned", mutates_args=())
def squares_turned(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    return _kernels(w_NK).squares(w_NK, turned=True)


@torch.library.custom_op("graphmoe::mx_rows", mutates_args=())
def mx_rows(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K], or experts' [E, N, K], to mxfp8 -> q, scales [..., N, B]. No device sync."""
    return _kernels(w_NK).quantise_mx(w_NK)


@torch.library.custom_op("graphmoe::mx_columns", mutates_args=())
def mx_columns(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    return _kernels(w_NK).turned(w_NK, None) if w_NK.is_cuda else quantise_mx(w_NK.mT.contiguous())


@torch.library.custom_op("graphmoe::fp8_blocks_turned", mutates_args=())
def turned(q_RC: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _kernels(q_RC).turned(q_RC, scale)


@torch.library.custom_op("graphmoe::fp8_blocks_mm", mutates_args=())
def product(
    q_RK: Tensor, scale: Tensor, q_NK: Tensor, of_w: Tensor, squares: bool, dtype: torch.dtype
) -> Tensor:
    return _kernels(q_RK).product(q_RK, scale, q_NK, of_w, squares, dtype)


squares.register_fake(lambda w_NK: squares_like(w_NK, *w_NK.shape))
squares_turned.register_fake(lambda w_NK: squares_like(w_NK, w_NK.shape[1], w_NK.shape[0]))
mx_rows.register_fake(lambda w_NK: mx_like(w_NK, *w_NK.shape))
mx_columns.register_fake(lambda w_NK: mx_like(w_NK, *w_NK.mT.shape))
product.register_fake(
    lambda q_RK, scale, q_NK, of_w, squares, dtype: q_RK.new_empty(len(q_RK), len(q_NK), dtype=dtype)
)


@turned.register_fake
def _(q_RC: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    R, C = q_RC.shape
    padded = R + -R % block_of(scale)
    if is_mx(scale):
        return mx_like(q_RC, C, padded)
    return q_RC.new_empty(C, padded), scale.new_empty(padded // BLOCK, C)
