"""One file for each operation: reference, kernels, vendor adapters and the choice among them."""

import torch

from graphmoe.config.ranges import ConfigError

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of flash attention, and of the kernels of Primus-Turbo and Transformer Engine."""


def require_half(key: str, backend: str, dtype: torch.dtype) -> None:
    """Raise ConfigError where the dtype is none of `HALF_DTYPES`."""
    if dtype not in HALF_DTYPES:
        raise ConfigError(
            f"{key}={backend} has bf16 and fp16 kernels only and the activations are {dtype}; "
            f"use precision.compute=bf16, or {key}=auto"
        )


def num_warps(threads: int) -> int:
    """Warps of 32 threads (NVIDIA) or 64 (AMD) that hold a Triton program's ``threads``; at least one."""
    return max(threads // (64 if torch.version.hip else 32), 1)
