"""Where caches lie if the configuration does not say so."""

from __future__ import annotations

import os
from pathlib import Path

from graphmoe.config.schema import ConfigError


def cache_root(configured: str | None = None) -> Path:
    """``configured``, else $GRAPHMOE_CACHE or ~/.cache/graphmoe. *Raises* ConfigError without a home."""
    named = configured or os.environ.get("GRAPHMOE_CACHE") or "~/.cache/graphmoe"
    path = os.path.expanduser(named)
    if path.startswith("~"):
        raise ConfigError(
            f"there is no home folder for the cache {named}; set HOME, or GRAPHMOE_CACHE=/a/folder"
        )
    folder = Path(path).absolute()
    if not is_path(path):
        raise ConfigError(
            f"{ascii(named)[1:-1]} can be no folder of a cache; use at most 255 bytes between slashes for "
            f"compile.cache_dir, data.cache_dir or GRAPHMOE_CACHE"
        )
    return folder


def is_path(text: str) -> bool:
    """Tell whether a file system can have a file of this name."""
    try:
        parts = os.fsencode(text).split(b"/")
    except UnicodeEncodeError:
        return False
    return "\0" not in text and max(map(len, parts)) < 256 and len(text) < 2048


def compiled_folder(configured: str | None = None) -> Path:
    """The compile cache: ``configured``, else ``compiled`` in the common folder."""
    return cache_root(configured) if configured else cache_root() / "compiled"
