"""Run time of a pipeline: stages of a model on several ranks, their channels, and the engine."""
