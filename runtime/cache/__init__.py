"""The compile cache, docs/cache.md: `store` is where a reader begins, `job` how a run uses it."""
