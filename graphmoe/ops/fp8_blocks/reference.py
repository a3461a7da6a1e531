"""Reference of block-scaled operands and their GEMMs: dequantized, summed in fp32. Suffixes as in the
package.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from graphmoe.ops.fp8 import BLOCK, nan_unless_finite, quantise

KIND = torch.float8_e4m3fn
LARGEST = 448.0
MX_BLOCK = 32
MX_EXPONENT = 8  # of the largest fp8 number
MX_NAN = 255  # in e8m0


def is_mx(scale: Tensor) -> bool:
    return scale.dtype == torch.uint8


def squares_like(w: Tensor, N: int, K: int) -> tuple[Tensor, Tensor]:
    """Return empty values [N, K] and scales of 128 x 128 blocks, padded to 4 columns."""
    blocks = K // BLOCK
    scale = w.new_empty(N // BLOCK, blocks + -blocks % 4, dtype=torch.float32)
    return w.new_empty(N, K, dtype=KIND), scale


def mx_like(w: Tensor, *size: int) -> tuple[Tensor, Tensor]:
    """Return empty mxfp8 values of this size, and their scales."""
    *rows, K = size
    return w.new_empty(size, dtype=KIND), w.new_empty(*rows, K // MX_BLOCK, dtype=torch.uint8)


def mx_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the e8m0 byte of the scale for fp32 ``amax``, at least 2^-127, and the scale's inverse.

    Both are NaN if amax is not finite.
    """
    power = ((amax.view(torch.int32) >> 23) - MX_EXPONENT).clamp(min=0)
    inverse = ((254 - power) << 23).view(torch.float32) + nan_unless_finite(amax)
    return power.where(amax < torch.inf, MX_NAN).to(torch.uint8), inverse


def mx_powers(scale: Tensor) -> Tensor:
    power = scale.int()
    return torch.where(power > 0, power << 23, 1 << 22).view(torch.float32)


def quantise_blockwise(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x by blocks of 128 columns -> q [R, C] and fp32 scales [B, R]."""
    q_RBC, scale_RB1 = quantise(x_RC.reshape(x_RC.shape[0], -1, BLOCK), KIND)
    return q_RBC.view(x_RC.shape), scale_RB1.squeeze(-1).t().contiguous()


def quantise_mx(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x to mxfp8, by blocks of 32 columns -> q [..., R, C] and e8m0 scales [..., R, B]."""
    x_RBC = x_RC.unflatten(-1, (-1, MX_BLOCK))
    scale_RB1, inverse_RB1 = mx_scales(x_RBC.abs().amax(-1, keepdim=True).float())
    q_RBC = (x_RBC.float() * inverse_RB1).clamp(-LARGEST, LARGEST).to(KIND)
    return q_RBC.view(x_RC.shape), scale_RB1.squeeze(-1)


def values(q_RC: Tensor, scale: Tensor) -> Tensor:
    """Dequantize blockwise or mxfp8 rows -> fp32 [R, C]."""
    scale_RB = mx_powers(scale) if is_mx(scale) else scale.t()
    return (q_RC.float().view(*scale_RB.shape, -1) * scale_RB[:, :, None]).view(q_RC.shape)


def square_values(q_NK: Tensor, scale_NB: Tensor) -> Tensor:
    scale_NK = scale_NB.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return q_NK.float() * scale_NK[:, : q_NK.shape[1]]


def squares(w_NK: Tensor, *, turned: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize a weight, or its transpose -> q [N, K] and scales [N / 128, B] of 128 x 128 blocks."""
    w_NK = w_NK.t().contiguous() if turned else w_NK
    N, K = w_NK.shape
    tiles = w_NK.view(N // BLOCK, BLOCK, K // BLOCK, BLOCK).permute(0, 2, 1, 3).reshape(-1, BLOCK * BLOCK)
    q, scale = quantise(tiles, KIND)
    q_NK = q.view(N // BLOCK, K // BLOCK, BLOCK, BLOCK).permute(0, 2, 1, 3).reshape(N, K)
    return q_NK, pad(scale.view(N // BLOCK, -1), (0, -(K // BLOCK) % 4), value=1.0)


def turned(q_RC: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantize, transpose, quantize in blocks along R, zero-padded to whole blocks -> q [C, R'], scales."""
    # with power-of-two scales, requantization rounds only numbers under 2^-13 of the largest in their new
    # block, and in mxfp8 those above 448 scales
    x_RC = values(q_RC, scale)
    x_CR = pad(x_RC, (0, 0, 0, -len(x_RC) % block_of(scale))).t().contiguous()
    return quantise_mx(x_CR) if is_mx(scale) else quantise_blockwise(x_CR)


def product(
    q_RK: Tensor, scale: Tensor, q_NK: Tensor, of_w: Tensor, squares: bool, dtype: torch.dtype
) -> Tensor:
    """Return x @ w.T [R, N]; w has a scale per 128 x 128 block if ``squares``, else scales as x has."""
    w_NK = square_values(q_NK, of_w) if squares else values(q_NK, of_w)
    return (values(q_RK, scale) @ w_NK.t()).to(dtype)


def block_of(scale: Tensor) -> int:
    return MX_BLOCK if is_mx(scale) else BLOCK
