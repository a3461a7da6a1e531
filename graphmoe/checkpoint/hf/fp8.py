"""Linear weights in fp8 with an fp32 scale per 128 x 128 block, as in published DeepSeek-V3.

``X.weight`` is e4m3 [out, in]; ``X.weight_scale_inv``, its factor, is fp32 [ceil(out / 128), ceil(in / 128)].
"""

import json
import re
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint.hf.keys import Keys

BLOCK = 128
FP8, FP8_NAME = torch.float8_e4m3fn, "F8_E4M3"
# Suffix of a weight's name for its scales
SCALE = "_scale_inv"
# Weights written in fp8; embedding, norms, router, head and eh_proj are published without
PRODUCTS = re.compile(r"\.(?!eh_)(\w+_proj(_with_mqa)?|w[123])\.weight$")
# quantization_config of config.json
QUANTIZATION: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}


def check_quantization(keys: Keys) -> None:
    """Record each unsupported key of quantization_config as a problem."""
    found = keys.raw.get("quantization_config")
    if found and not isinstance(found, dict):
        keys.refuse("quantization_config", found, json.dumps(QUANTIZATION))
    elif found:
        for name, value in QUANTIZATION.items():
            given = found.get(name, None if name == "quant_method" else value)
            if given != value:
                keys.refuse(f"quantization_config.{name}", given, json.dumps(value))
        if (given := found.get("scale_fmt", "float")) not in ("float", "ue8m0"):  # powers of two, in fp32 too
            keys.refuse("quantization_config.scale_fmt", given, '"float" or "ue8m0"')


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def wrong_scale(scale: Tensor) -> str | None:
    """Return a text with the first invalid scale and its index, or None."""
    wrong = ~(scale.isfinite() & (scale >= 0))
    if not wrong.any():
        return None
    place = wrong.nonzero()[0].tolist()
    return f"{scale[tuple(place)].item()} at {place}"


def scales_of(weight: Tensor) -> Tensor:
    """Return fp32 scales of [out, in]: a block's largest magnitude / 448; 1 for zeros and below 5e-36.

    Dequantized values round-trip exactly.
    """
    by_column = torch.stack([rows.abs().amax(0).float() for rows in weight.split(BLOCK)])
    largest = torch.stack([columns.amax(1) for columns in by_column.split(BLOCK, dim=1)], dim=1)
    scale = largest / torch.finfo(FP8).max
    return scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 1.0)  # subnormal scales lose digits


def quantised(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the fp8 values of a weight [out, in]."""
    found = torch.empty(weight.shape, dtype=FP8)
    by_column = scale.repeat_interleave(BLOCK, dim=1)[:, : weight.shape[1]]
    for into, rows, scales in zip(found.split(BLOCK), weight.split(BLOCK), by_column, strict=True):
        into.copy_(rows.float() / scales)
    return found


def dequantised(part: Tensor, scale: Tensor, rows: range, columns: range) -> Tensor:
    """Return fp32 values of ``part``, these rows and columns of a weight whose block scales are ``scale``."""
    assert part.shape == (len(rows), len(columns))
    values = part.float()
    by_column = scale.repeat_interleave(BLOCK, dim=1)[:, columns.start : columns.stop]
    for block in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
        within = slice(max(block * BLOCK - rows.start, 0), (block + 1) * BLOCK - rows.start)
        values[within] *= by_column[block]
    return values
