"""Estimates of time and memory of the parts of a step, for a model of GPU."""
