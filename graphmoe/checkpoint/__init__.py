"""Atomic, checksummed checkpoints of nested state on ``torch.distributed.checkpoint``."""

from graphmoe.checkpoint.errors import CheckpointError
from graphmoe.checkpoint.store import CheckpointStore

__all__ = ["CheckpointError", "CheckpointStore"]
