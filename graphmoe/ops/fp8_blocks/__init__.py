"""fp8 operands with a scale for each block of the contracted axis, and their GEMMs.

Suffixes: R rows, C columns, N outputs and K inputs of a weight, B blocks; q are quantized values, s scales.

*blockwise* has blocks of 128 numbers of a row, and of 128 x 128 of a weight, with the fp32 scales of
`ops.fp8`: [B, R] of rows, [N / 128, B] of a weight with B padded to a multiple of 4, as cuBLASLt reads them
(aten/src/ATen/native/cuda/ScaledBlas.cpp).

*mxfp8* has blocks of 32 numbers whose scale is the byte of a power of two (e8m0), [R, B]: 2^(floor(log2 a) -
8) for the largest number a of a block, NaN (255) if a is not finite; larger numbers saturate at 448 scales
(OCP Microscaling Formats 1.0, 6.3).

Weight gradients contract rows: `turned` requantizes along them. Between power-of-two scales only numbers
under 2^-13 of the largest in their new block are rounded again, and in mxfp8 those above 448 scales.
"""

from typing import Any

import torch
from torch import Tensor

from graphmoe.ops.fp8 import BLOCK
from graphmoe.ops.fp8_blocks import reference
from graphmoe.ops.fp8_blocks.reference import KIND, MX_BLOCK, block_of, is_mx, quantise_mx


def _launches() -> Any:
    from graphmoe.ops.fp8_blocks import launches

    return launches


@torch.library.custom_op("graphmoe::fp8_squares", mutates_args=())
def squares(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return q [N, K] of a weight, and the scales [N / 128, B] of its blocks of 128 x 128. No device sync."""
    return _launches().squares(w_NK, turned=False) if w_NK.is_cuda else reference.squares(w_NK)


@torch.library.custom_op("graphmoe::fp8_squares_turned", mutates_args=())
def squares_turned(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    if w_NK.is_cuda:
        return _launches().squares(w_NK, turned=True)
    return reference.squares(w_NK.t().contiguous())


@torch.library.custom_op("graphmoe::mx_rows", mutates_args=())
def mx_rows(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise_mx` of a weight, or of those of experts [E, N, K]. No device sync."""
    return _launches().mx_rows(w_NK) if w_NK.is_cuda else quantise_mx(w_NK)


@torch.library.custom_op("graphmoe::mx_columns", mutates_args=())
def mx_columns(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    return _launches().turned(w_NK, None) if w_NK.is_cuda else quantise_mx(w_NK.mT.contiguous())


@torch.library.custom_op("graphmoe::fp8_blocks_turned", mutates_args=())
def turned(q_RC: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (_launches() if q_RC.is_cuda else reference).turned(q_RC, scale)


@torch.library.custom_op("graphmoe::fp8_blocks_mm", mutates_args=())
def product(
    q_RK: Tensor, scale: Tensor, q_NK: Tensor, of_w: Tensor, squares: bool, dtype: torch.dtype
) -> Tensor:
    kernels = _launches() if q_RK.is_cuda else reference
    return kernels.product(q_RK, scale, q_NK, of_w, squares, dtype)


def _squares_like(w: Tensor, N: int, K: int) -> tuple[Tensor, Tensor]:
    blocks = K // BLOCK
    scale = w.new_empty(N // BLOCK, blocks + -blocks % 4, dtype=torch.float32)
    return w.new_empty(N, K, dtype=KIND), scale


def _mx_like(w: Tensor, *size: int) -> tuple[Tensor, Tensor]:
    *rows, K = size
    return w.new_empty(size, dtype=KIND), w.new_empty(*rows, K // MX_BLOCK, dtype=torch.uint8)


squares.register_fake(lambda w_NK: _squares_like(w_NK, *w_NK.shape))
squares_turned.register_fake(lambda w_NK: _squares_like(w_NK, w_NK.shape[1], w_NK.shape[0]))
mx_rows.register_fake(lambda w_NK: _mx_like(w_NK, *w_NK.shape))
mx_columns.register_fake(lambda w_NK: _mx_like(w_NK, *w_NK.mT.shape))
product.register_fake(
    lambda q_RK, scale, q_NK, of_w, squares, dtype: q_RK.new_empty(len(q_RK), len(q_NK), dtype=dtype)
)


@turned.register_fake
def _(q_RC: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    R, C = q_RC.shape
    padded = R + -R % block_of(scale)
    if is_mx(scale):
        return _mx_like(q_RC, C, padded)
    return q_RC.new_empty(C, padded), scale.new_empty(padded // BLOCK, C)
