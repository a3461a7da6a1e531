"""Tile sizes of the Triton kernels: one table for each kind of device, and the alternatives worth timing.

The six steps are the products of the layer: ``up`` and ``down`` in the forward, ``down_dgrad`` and
``up_dgrad`` for the gradients of rows, ``up_wgrad`` and ``down_wgrad`` for those of weights. Nothing is tuned
at run time: a captured step could not, and two runs would not be bitwise equal.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

STEPS = ("up", "down", "down_dgrad", "up_dgrad", "up_wgrad", "down_wgrad")


@dataclass(frozen=True)
class Config:
    """How a kernel is launched. A tile of the result is block_m x block_n, a step contracts block_k."""

    block_m: int
    block_n: int
    block_k: int
    threads: int
    """Of a program."""
    stages: int
    """Tiles that are loaded ahead, and one more."""
    group: int = 8
    """Row tiles that take turns on one column tile."""
    subtiles: int = 1
    """Parts in which a tile is stored; more take less shared memory and fewer registers."""
    ahead: int = 0
    """Parts of h that ``down_dgrad`` loads before they are needed, beginning before the product."""
    flatten: bool = False
    """Load the next tile during the epilogue. Weight gradients always do."""
    descriptors: str = "none"
    """What tensor descriptors (TMA) load: none, weights, or both, which means rows too where contiguous. A
    weight gradient loads its contiguous rows by one with either."""
    per_unit: int = 1
    """Programs for each multiprocessor or compute unit; 0 launches one for each tile that there may be."""


_HOPPER = {  # measured on an H200; 227 KiB of shared memory; wgmma wants 128 rows for two warp groups
    "up": Config(128, 256, 64, 256, 3, subtiles=2, flatten=True, descriptors="weights"),
    "down": Config(128, 256, 64, 256, 3, subtiles=2, flatten=True, descriptors="both"),
    "down_dgrad": Config(128, 256, 64, 256, 4, subtiles=8, ahead=2, descriptors="weights"),
    "up_dgrad": Config(128, 256, 64, 256, 4, group=4, subtiles=2, flatten=True, descriptors="both"),
    "up_wgrad": Config(128, 128, 64, 128, 3, per_unit=2),
    "down_wgrad": Config(256, 128, 64, 256, 3, subtiles=2),
}
_INSTINCT = {  # 64 KiB of LDS on gfx942; a stage more than two would not fit
    "up": Config(128, 256, 64, 512, 2),
    "down": Config(128, 256, 64, 512, 2),
    "down_dgrad": Config(128, 128, 64, 512, 2, subtiles=2),
    "up_dgrad": Config(128, 256, 64, 512, 2),
    "up_wgrad": Config(128, 256, 64, 512, 2),
    "down_wgrad": Config(256, 128, 64, 512, 2),
}
_SMALL = Config(128, 128, 32, 256, 3, subtiles=2)  # 99 KiB of shared memory are enough
_FP32 = Config(64, 64, 32, 256, 2)  # no matrix instruction computes in full fp32
_INTERPRETER = Config(16, 32, 16, 128, 1, group=2, per_unit=3)


def default(step: str, kind: str, dtype: torch.dtype, rows_per_expert: int) -> Config:
    """The config of one of `STEPS` on a device of `kind_of`; rows per expert set the height of row tiles."""
    if kind == "cpu":
        return _INTERPRETER
    if dtype == torch.float32:
        return _FP32
    config = {"hopper": _HOPPER, "instinct": _INSTINCT}.get(kind, {}).get(step, _SMALL)
    return config if step.endswith("wgrad") else with_height(config, rows_per_expert)


def with_height(config: Config, rows_per_expert: int) -> Config:
    """``config`` with row tiles of 16 to its own height, so that few rows do not compute on many zeros."""
    height = 16
    while height < min(rows_per_expert, config.block_m):
        height *= 2
    if height >= config.block_m:
        return config
    few = height < 64  # too few for a warp group of its own: the weights are what has to be read fast
    return replace(
        config,
        block_m=height,
        block_n=min(config.block_n, 128) if few else config.block_n,
        threads=config.threads // 2,
        subtiles=2 if few else max(config.subtiles, 2),
        flatten=config.flatten and not few,
        descriptors="none" if few else config.descriptors,
    )


def alternatives(step: str, kind: str) -> list[Config]:
    """Configs of a step in bf16 that are worth timing on a kind of device; the first is the default."""
    if kind == "hopper":
        found = _hopper_alternatives(step)
    elif kind == "instinct":
        found = [
            replace(_INSTINCT[step], block_n=n, group=g, subtiles=n // 64 if step == "down_dgrad" else 1)
            for n in (256, 128)
            for g in (8, 4)
        ]
    else:
        found = [replace(_SMALL, block_k=k, stages=s) for k, s in ((32, 4), (64, 2), (64, 3))]
    first = default(step, kind, torch.bfloat16, 1 << 20)
    return [first, *dict.fromkeys(config for config in found if config != first)]


def _hopper_alternatives(step: str) -> list[Config]:
    wide = Config(128, 256, 64, 256, 4, subtiles=2)
    loaded = replace(wide, descriptors="weights")
    square = replace(wide, block_n=128, stages=3, threads=128, per_unit=2)
    if step == "up":
        flat = replace(loaded, stages=3, flatten=True)
        return [loaded, flat, replace(loaded, stages=3), *(replace(flat, group=g) for g in (4, 16))]
    if step in ("down", "up_dgrad"):
        both = replace(wide, descriptors="both", flatten=True)
        return [replace(both, stages=s, group=g) for s in (3, 4) for g in (4, 8, 16)]
    if step == "down_dgrad":
        parts = replace(loaded, subtiles=8)
        return [
            *(replace(parts, ahead=n) for n in (0, 1, 2)),
            replace(parts, stages=3, ahead=1),
            replace(parts, subtiles=16, ahead=4),
            replace(parts, block_n=128, subtiles=4, ahead=2),
            replace(square, descriptors="weights", subtiles=8, ahead=1),
        ]
    tiles = [replace(wide, stages=3), replace(wide, stages=3, block_m=256, block_n=128), square]
    by_descriptor = [replace(c, descriptors="both") for c in tiles]
    return [*tiles, *by_descriptor, *(replace(c, stages=4) for c in by_descriptor[:2])]


def kind_of(device: torch.device) -> str:
    """hopper, instinct, small (any other GPU), or cpu, where kernels run in Triton's interpreter."""
    return _kind_of_gpu(_index(device)) if device.type == "cuda" else "cpu"


def units_of(device: torch.device) -> int:
    """Multiprocessors or compute units; 1 on a CPU. No device sync."""
    return _units_of_gpu(_index(device)) if device.type == "cuda" else 1


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _kind_of_gpu(index: int) -> str:
    if torch.version.hip:
        return "instinct"
    # Blackwell of data centres has as much shared memory; its consumer cards (12.x) have less.
    return "hopper" if torch.cuda.get_device_capability(index)[0] in (9, 10) else "small"


@functools.cache
def _units_of_gpu(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
