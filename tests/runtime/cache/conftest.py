"""An empty cache for each test."""

from tests.runtime.cache.cache_contents import cache  # noqa: F401  (a fixture)
