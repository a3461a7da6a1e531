"""Where caches lie if the configuration does not say so."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root(configured: str | None = None) -> Path:
    """``configured``, else $GRAPHMOE_CACHE or ~/.cache/graphmoe."""
    return Path(configured or os.environ.get("GRAPHMOE_CACHE") or "~/.cache/graphmoe").expanduser().absolute()


def compiled_folder(configured: str | None = None) -> Path:
    """The compile cache: ``configured``, else ``compiled`` in the common folder."""
    return cache_root(configured) if configured else cache_root() / "compiled"
