"""Weights of linear products in fp8 with an fp32 scale for each 128 x 128 block, as DeepSeek-V3 is published.

Beside ``X.weight`` (e4m3, [out, in]) a folder has ``X.weight_scale_inv``, fp32 [ceil(out / 128), ceil(in /
128)]; the value of an element is its fp8 number times the scale of its block.
"""

import json
import re
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint.hf.keys import Keys

BLOCK = 128
FP8, FP8_NAME = torch.float8_e4m3fn, "F8_E4M3"
SCALE = "_scale_inv"
"""End of the name of a weight's scales, behind the weight's own name."""
PRODUCTS = re.compile(r"\.(?!eh_)(\w+_proj(_with_mqa)?|w[123])\.weight$")
"""Weights that are written in fp8: embedding, norms, router, head and eh_proj are published without."""
QUANTIZATION: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}


def check_quantization(keys: Keys) -> None:
    """Refuse a quantization_config that is not read, key by key."""
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
    """Shape of the scales of a weight [out, in]."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def wrong_scale(scale: Tensor) -> str | None:
    """The first scale that no weight can have, with its place; None if all are right."""
    wrong = ~(scale.isfinite() & (scale >= 0))
    if not wrong.any():
        return None
    place = wrong.nonzero()[0].tolist()
    return f"{scale[tuple(place)].item()} at {place}"


def scales_of(weight: Tensor) -> Tensor:
    """Largest magnitude over 448 of each block of [out, in], fp32; 1 for zeros and what is below 5e-36.

    Values in fp32 that come from fp8 numbers and such scales have the same scales and numbers again.
    """
    by_column = torch.stack([rows.abs().amax(0).float() for rows in weight.split(BLOCK)])
    largest = torch.stack([columns.amax(1) for columns in by_column.split(BLOCK, dim=1)], dim=1)
    scale = largest / torch.finfo(FP8).max
    return scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 1.0)  # such scales would lose digits


def quantised(weight: Tensor, scale: Tensor) -> Tensor:
    """The fp8 numbers of a weight [out, in], one row of blocks after the other."""
    found = torch.empty(weight.shape, dtype=FP8)
    by_column = scale.repeat_interleave(BLOCK, dim=1)[:, : weight.shape[1]]
    for into, rows, scales in zip(found.split(BLOCK), weight.split(BLOCK), by_column, strict=True):
        into.copy_(rows.float() / scales)
    return found


def dequantised(part: Tensor, scale: Tensor, rows: range, columns: range) -> Tensor:
    """The fp32 values of ``part``, fp8 rows and columns of a weight, by the scales of all of the weight."""
    assert part.shape == (len(rows), len(columns))
    values = part.float()
    by_column = scale.repeat_interleave(BLOCK, dim=1)[:, columns.start : columns.stop]
    for block in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
        within = slice(max(block * BLOCK - rows.start, 0), (block + 1) * BLOCK - rows.start)
        values[within] *= by_column[block]
    return values
