"""Compile cache (docs/compile.md). Other modules use `store` and, in a run, `compile.job_cache`."""
