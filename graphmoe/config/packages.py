"""Optional packages: their import names, how they are installed, and errors that say so."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from graphmoe.config.schema import ConfigError

PACKAGES = {"turbo": "primus_turbo", "te": "transformer_engine"}
"""Import name of the package behind a backend."""
INSTALL = {
    "turbo": "pip install --no-build-isolation 'primus-turbo[pytorch]' "
    "--extra-index-url https://amd-agi.github.io/Primus-Turbo/simple/",
    "te": "pip install --no-build-isolation 'transformer-engine[pytorch]'",
}


def is_installed(package: str) -> bool:
    """Return whether a top-level package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require_package(key: str, backend: str, installed: Callable[[str], bool] = is_installed) -> None:
    """Raise ConfigError where ``key`` asks for a backend whose package is missing."""
    if backend in PACKAGES and not installed(PACKAGES[backend]):
        raise ConfigError(
            f"{key}={backend} needs the package {PACKAGES[backend]}, which is not installed; "
            f"install it with: {INSTALL[backend]}, or use {key}=auto"
        )
