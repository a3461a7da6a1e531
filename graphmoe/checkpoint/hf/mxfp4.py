"""Experts stored in MXFP4 (OCP Microscaling Formats v1.0, section 5.3): 4-bit values, a scale for each 32.

``X_blocks`` is uint8 [E, out, in / 32, 16], two values in a byte, the first in its low half. ``X_scales`` is
uint8 [E, out, in / 32]: exponents of 2, biased by 127. Together they store X [E, in, out].
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from graphmoe.config.schema import ConfigError

NAME = "MXFP4"
BLOCKS, SCALES = "_blocks", "_scales"
_PER_BLOCK = 32
_NUM_SCALES = 255  # the last is not a number
_ALWAYS_FINITE = 252  # 6 times the next overflows
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def shape_of(*stored: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return the shape of the tensor that blocks and scales of these shapes store; None if they do not."""
    if len(stored) != 2 or len(stored[0]) != 4 or stored[0] != (*stored[1], _PER_BLOCK // 2):
        return None
    experts, outputs, groups, _ = stored[0]
    return experts, groups * _PER_BLOCK, outputs


def stored_shapes(shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the shapes of blocks and scales that store a tensor [E, in, out]."""
    experts, inputs, outputs = shape
    groups = [experts, outputs, inputs // _PER_BLOCK]
    return [*groups, _PER_BLOCK // 2], groups


def unpacked(where: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """Return bf16 [E, in, out], exact. *Raises* ConfigError that begins with ``where`` if not finite."""
    lut = torch.tensor([sign * each for sign in (1, -1) for each in _MAGNITUDES])
    power = torch.tensor([*(2.0 ** (exponent - 127) for exponent in range(_NUM_SCALES)), math.nan])
    found = torch.empty(*scales.shape[:2], scales.shape[2] * _PER_BLOCK, dtype=torch.bfloat16)
    for into, block, scale in zip(found, blocks, scales, strict=True):  # in fp32 by expert only
        values = lut[torch.stack([block & 15, block >> 4], dim=-1).int()].flatten(-2)
        into.copy_((values * power[scale.int()].unsqueeze(-1)).flatten(-2))
        if len(wrong := scale[~into.unflatten(-1, (-1, _PER_BLOCK)).isfinite().all(-1)]):
            raise ConfigError(
                f"{where}: values with scale {int(wrong[0])} are not finite; a scale of at most "
                f"{_ALWAYS_FINITE} always makes finite ones"
            )
    return found.mT
