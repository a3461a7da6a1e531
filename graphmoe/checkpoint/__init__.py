"""Atomic, checksummed checkpoints of nested state on ``torch.distributed.checkpoint``."""

from graphmoe.checkpoint.errors import CheckpointError
from graphmoe.checkpoint.folders import CHECKPOINTS, saved_steps
from graphmoe.checkpoint.store import CheckpointStore

__all__ = ["CHECKPOINTS", "CheckpointError", "CheckpointStore", "saved_steps"]
