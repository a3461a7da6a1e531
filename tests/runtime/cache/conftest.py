"""An empty cache for each test."""

from pathlib import Path

import pytest

from graphmoe.runtime.cache.store import CompileCache
from tests.runtime.cache.cache_contents import empty_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompileCache:
    return empty_cache(tmp_path, monkeypatch)
