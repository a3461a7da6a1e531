"""Execution of a run: worker processes, token dispatch, compile units, captured graphs, pipelines."""
