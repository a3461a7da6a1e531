"""Atomic, checksummed checkpoints; entry point: `graphmoe.checkpoint.store`."""

# imports no torch
from graphmoe.checkpoint.folders import CHECKPOINTS, CheckpointError, saved_steps

__all__ = ["CHECKPOINTS", "CheckpointError", "saved_steps"]
