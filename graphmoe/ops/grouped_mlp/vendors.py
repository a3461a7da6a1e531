"""Packages behind the vendor backends, and what to say where one is missing or has no kernel."""

from __future__ import annotations

import importlib.util

import torch

from graphmoe.config import ConfigError

KEY = "moe.experts"
PACKAGES = {"turbo": "primus_turbo", "te": "transformer_engine"}
"""Import name of the package behind a backend."""
INSTALL = {
    "turbo": "pip install --no-build-isolation 'primus-turbo[pytorch]' (from AMD's index)",
    "te": "pip install --no-build-isolation 'transformer-engine[pytorch]'",
}
DTYPES = (torch.bfloat16, torch.float16)
"""What the grouped kernels of both packages take."""


def is_installed(package: str) -> bool:
    """Whether a top-level package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def missing_package(backend: str) -> ConfigError:
    """The error for a backend without its package."""
    return ConfigError(
        f"{KEY}={backend} needs the package {PACKAGES[backend]}, which is not installed; "
        f"install it with: {INSTALL[backend]}, or use {KEY}=auto"
    )


def check_dtype(backend: str, dtype: torch.dtype) -> None:
    """Raises ConfigError where a vendor has no kernel for the dtype."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"{KEY}={backend} has bf16 and fp16 kernels only and the activations are {dtype}; "
            f"use precision.compute=bf16, or {KEY}=auto"
        )
