"""The compile cache, docs/cache.md: begin to read at `store`; a run uses it by `compile.job_cache`."""
