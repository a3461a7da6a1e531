"""Experts stored in MXFP4 (OCP Microscaling Formats v1.0, section 5.3): 4-bit values, a scale for each 32.

``X_blocks`` is uint8 [E, out, in / 32, 16], two values in a byte, the first in its low half. ``X_scales`` is
uint8 [E, out, in / 32]: exponents of 2, biased by 127. Together they store X [E, in, out].
"""

import torch
from torch import Tensor

from graphmoe.config.schema import ConfigError

NAME = "MXFP4"
BLOCKS, SCALES = "_blocks", "_scales"
_PER_BLOCK = 32
_NOT_A_NUMBER = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def shape_of(*stored: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return the shape of the tensor that blocks and scales of these shapes store; None if they do not."""
    if len(stored) != 2 or len(stored[0]) != 4 or stored[0] != (*stored[1], _PER_BLOCK // 2):
        return None
    experts, outputs, groups, _ = stored[0]
    return experts, groups * _PER_BLOCK, outputs


def dequantised(where: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """Return bf16 [E, in, out], exact. *Raises* ConfigError that begins with ``where`` for invalid scales."""
    if bool((scales == _NOT_A_NUMBER).any()):
        raise ConfigError(f"{where}: a scale is {_NOT_A_NUMBER}, which is no number; use 0 to 254")
    lut = torch.tensor([sign * each for sign in (1, -1) for each in _MAGNITUDES])
    power = torch.tensor([2.0 ** (exponent - 127) for exponent in range(_NOT_A_NUMBER)])
    found = torch.empty(*scales.shape[:2], scales.shape[2] * _PER_BLOCK, dtype=torch.bfloat16)
    for into, block, scale in zip(found, blocks, scales, strict=True):  # in fp32 by expert only
        values = lut[torch.stack([block & 15, block >> 4], dim=-1).int()].flatten(-2)
        into.copy_((values * power[scale.int()].unsqueeze(-1)).flatten(-2))
    return found.mT
