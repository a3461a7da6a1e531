"""The packages behind the backends turbo and te, of attention and of the experts, and what they take."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from graphmoe.config.schema import ConfigError

PACKAGES = {"turbo": "primus_turbo", "te": "transformer_engine"}
"""Import name of the package behind a backend."""
INSTALL = {
    "turbo": "pip install --no-build-isolation 'primus-turbo[pytorch]' "
    "--extra-index-url https://amd-agi.github.io/Primus-Turbo/simple/",
    "te": "pip install --no-build-isolation 'transformer-engine[pytorch]'",
}
HALF_DTYPES = (torch.bfloat16, torch.float16)
"""What flash attention and the grouped kernels of both packages take."""


def is_installed(package: str) -> bool:
    """Whether a top-level package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require_package(key: str, backend: str, installed: Callable[[str], bool] = is_installed) -> None:
    """Raises ConfigError where ``key`` asks for a backend whose package is missing."""
    if backend in PACKAGES and not installed(PACKAGES[backend]):
        raise ConfigError(
            f"{key}={backend} needs the package {PACKAGES[backend]}, which is not installed; "
            f"install it with: {INSTALL[backend]}, or use {key}=auto"
        )


def require_half(key: str, backend: str, dtype: torch.dtype) -> None:
    """Raises ConfigError where the dtype is none of `HALF_DTYPES`."""
    if dtype not in HALF_DTYPES:
        raise ConfigError(
            f"{key}={backend} has bf16 and fp16 kernels only and the activations are {dtype}; "
            f"use precision.compute=bf16, or {key}=auto"
        )
