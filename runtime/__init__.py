"""Execution of a run: processes, dispatch, compiled units, captured graphs, pipelines."""
