"""Overlap of a backward with the next forward."""
