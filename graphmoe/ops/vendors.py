"""Dtypes that the kernels of Primus-Turbo and Transformer Engine take."""

import torch

from graphmoe.config.schema import ConfigError

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of flash attention and of the grouped kernels of both packages."""


def require_half(key: str, backend: str, dtype: torch.dtype) -> None:
    """Raise ConfigError where the dtype is none of `HALF_DTYPES`."""
    if dtype not in HALF_DTYPES:
        raise ConfigError(
            f"{key}={backend} has bf16 and fp16 kernels only and the activations are {dtype}; "
            f"use precision.compute=bf16, or {key}=auto"
        )
