"""Tile sizes of the Triton kernels: one table for each kind of device.

Nothing is tuned at run time: a captured step could not be, and two runs would not be bitwise equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Config:
    """Launch settings of a GEMM kernel: tiles are block_m x block_n, one loop iteration contracts block_k."""

    block_m: int
    block_n: int
    block_k: int
    threads: int  # of a program
    stages: int  # tiles loaded ahead, plus one
    group: int = 8  # row tiles that take turns on one column tile
    subtiles: int = 1  # parts in which a tile is stored; more need less shared memory and fewer registers
    ahead: int = 0  # parts of h that down_dgrad prefetches, beginning before the GEMM
    flatten: bool = False  # load the next tile during the epilogue; wgrad always does
    # loaded by descriptors (TMA): none, weights, or both, which adds contiguous rows; wgrad loads its
    # contiguous rows so with either
    descriptors: str = "none"
    per_unit: int = 1  # programs per multiprocessor or compute unit; 0 launches one for each possible tile


_HOPPER = {  # measured on an H200; 227 KiB of shared memory; wgmma wants 128 rows for two warp groups
    "up": Config(128, 256, 64, 256, 3, subtiles=2, flatten=True, descriptors="weights"),
    "down": Config(128, 256, 64, 256, 3, subtiles=2, flatten=True, descriptors="both"),
    "down_dgrad": Config(128, 256, 64, 256, 4, subtiles=8, ahead=2, descriptors="weights"),
    "up_dgrad": Config(128, 256, 64, 256, 4, group=4, subtiles=2, flatten=True, descriptors="both"),
    "up_wgrad": Config(128, 128, 64, 128, 3, per_unit=2),
    "down_wgrad": Config(256, 128, 64, 256, 3, subtiles=2),
    "up_wgrad_into": Config(128, 128, 64, 128, 3, subtiles=8, per_unit=2),
    "down_wgrad_into": Config(128, 128, 64, 128, 3, subtiles=8, per_unit=2),
}
_INSTINCT = {  # at most 60 of the 64 KiB of LDS on gfx942; a stage more than two would not fit
    "up": Config(128, 256, 64, 512, 2),
    "down": Config(128, 256, 64, 512, 2),
    "down_dgrad": Config(128, 128, 64, 512, 2, subtiles=2),
    "up_dgrad": Config(128, 256, 64, 512, 2),
    "up_wgrad": Config(128, 128, 64, 512, 2),  # 128 x 256 and 256 x 128 spill registers on gfx942
    "down_wgrad": Config(256, 128, 64, 512, 2),
    # larger tiles, and 512 threads, need 64 KiB or more to store fp32
    "up_wgrad_into": Config(128, 128, 64, 256, 2, subtiles=4),
    "down_wgrad_into": Config(128, 128, 64, 256, 2, subtiles=4),
}
_SMALL = Config(128, 128, 32, 256, 3, subtiles=2)  # 99 KiB of shared memory are enough
_FP32 = Config(64, 64, 32, 256, 2)  # no matrix instruction of NVIDIA computes in full fp32
_INTERPRETER = Config(16, 32, 16, 128, 1, group=2, per_unit=3)
_SMALL_FP8 = Config(128, 256, 64, 256, 2, subtiles=2)
_INTERPRETER_FP8 = Config(16, 256, 32, 128, 1, per_unit=3)
BLOCK_R = 128  # rows of a tile of an fp8 weight gradient, to which each expert's rows are padded


def default(step: str, kind: str, dtype: torch.dtype, rows_per_expert: int) -> Config:
    """Return the config of a GEMM (``step``) on a ``kind`` of device; few rows per expert get lower tiles."""
    if kind == "cpu":
        return _INTERPRETER
    if dtype == torch.float32:
        return _FP32
    config = {"hopper": _HOPPER, "instinct": _INSTINCT}.get(kind, {}).get(step, _SMALL)
    return config if "wgrad" in step else with_height(config, rows_per_expert)


def fp8_config(table: Mapping[str, Config], kind: str) -> Config:
    """Return the entry of ``table`` for a ``kind`` of device, else a default."""
    return _INTERPRETER_FP8 if kind == "cpu" else table.get(kind, _SMALL_FP8)


def with_height(config: Config, rows_per_expert: int) -> Config:
    """Return the config with lower row tiles, at least 16, so that few rows don't multiply many zeros."""
    height = height_of(config, rows_per_expert)
    if height == config.block_m:
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


def height_of(config: Config, rows_per_expert: int) -> int:
    return min(max(1 << (rows_per_expert - 1).bit_length(), 16), config.block_m)


def kind_of(device: torch.device) -> str:
    """Return the kind of device: hopper, instinct, small (any other GPU), cpu (kernels are interpreted)."""
    if device.type != "cuda":
        return "cpu"
    if torch.version.hip:
        return "instinct"
    # Blackwell of data centres has as much shared memory; its consumer cards (12.x) have less.
    return "hopper" if torch.cuda.get_device_capability(device)[0] in (9, 10) else "small"


def units_of(device: torch.device) -> int:
    """Return the number of multiprocessors or compute units; 1 on a CPU. No device sync."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
