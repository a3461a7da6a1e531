"""Atomic, checksummed checkpoints of nested state on ``torch.distributed.checkpoint``."""

from graphmoe.checkpoint.folders import CHECKPOINTS, CheckpointError, saved_steps
from graphmoe.checkpoint.store import CheckpointStore

__all__ = ["CHECKPOINTS", "CheckpointError", "CheckpointStore", "saved_steps"]
