"""Where caches lie if the configuration does not say so."""

from __future__ import annotations

import os
from pathlib import Path

from graphmoe.config import ConfigError


def cache_root(configured: str | None = None) -> Path:
    """``configured``, else $GRAPHMOE_CACHE or ~/.cache/graphmoe. *Raises* ConfigError without a home."""
    named = configured or os.environ.get("GRAPHMOE_CACHE") or "~/.cache/graphmoe"
    path = os.path.expanduser(named)
    if path.startswith("~"):
        raise ConfigError(
            f"there is no home folder for the cache {named}; set HOME, or GRAPHMOE_CACHE=/a/folder"
        )
    return Path(path).absolute()


def compiled_folder(configured: str | None = None) -> Path:
    """The compile cache: ``configured``, else ``compiled`` in the common folder."""
    return cache_root(configured) if configured else cache_root() / "compiled"
