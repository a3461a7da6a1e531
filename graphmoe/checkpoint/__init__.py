"""Atomic, checksummed checkpoints of nested state on ``torch.distributed.checkpoint``.

`graphmoe.checkpoint.store` saves and loads; this module imports no torch.
"""

from graphmoe.checkpoint.folders import CHECKPOINTS, CheckpointError, saved_steps

__all__ = ["CHECKPOINTS", "CheckpointError", "saved_steps"]
