"""What surrounds `ops.delta_net`: convolution, unit norm and gated norm, in fp32 inside.

Plain PyTorch: each is one compiled kernel (tests/ops/test_short_conv.py), so none needs one of its own.
Suffixes: B batch, S sequence, C channels, T taps, W size of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from graphmoe.ops import accumulator

UNIT_NORM_EPS = 1e-6


def short_conv(x_BSC: Tensor, w_CT: Tensor, first_BS: Tensor | None) -> Tensor:
    """Return silu of a causal depthwise convolution, [B, S, C] in the dtype of x. No device sync.

    The last tap multiplies the position itself. Taps before ``first_BS``, the first position of each
    position's document, are 0; None: before the sequence.
    """
    taps, position_S = (
        w_CT.to(accumulator(x_BSC)).unbind(1),
        torch.arange(x_BSC.shape[1], device=x_BSC.device),
    )
    own_BS = position_S[None] if first_BS is None else position_S - first_BS
    total = x_BSC * taps[-1]
    for back, tap in enumerate(taps[-2::-1], 1):
        # compiled, a roll is an index of the kernel; padding would be saved for the backward
        total = total + x_BSC.roll(back, 1).where((own_BS >= back)[..., None], 0.0) * tap
    return F.silu(total).to(x_BSC.dtype)


def unit_norm(x: Tensor) -> Tensor:
    """Divide by the norm of the last axis."""
    wide = x.to(accumulator(x))
    # not of ``wide``, or a compiled unit saves that for the backward
    return (x * torch.rsqrt(wide.square().sum(-1, keepdim=True) + UNIT_NORM_EPS)).to(x.dtype)


def gated_norm(x: Tensor, weight_W: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return weight * x / rms(x) * silu(gate), with statistics over the last axis."""
    wide = x.to(accumulator(x))
    normed = F.rms_norm(wide, weight_W.shape, weight_W.to(wide.dtype), eps)
    return (normed * F.silu(gate.to(wide.dtype))).to(x.dtype)
