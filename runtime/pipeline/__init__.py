"""Run time of a pipeline: stages, channels and the engine."""
