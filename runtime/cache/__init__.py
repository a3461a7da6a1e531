"""Compile cache (docs/compile.md). Entry points: `store`, and `compile.job_cache` in a run."""
