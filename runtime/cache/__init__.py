"""The compile cache, docs/compile.md: begin to read at `store`; a run uses it by `compile.job_cache`."""
