"""Atomic, checksummed checkpoints of nested state on ``torch.distributed.checkpoint``."""

from typing import TYPE_CHECKING, Any

from graphmoe.checkpoint.folders import CHECKPOINTS, CheckpointError, saved_steps

if TYPE_CHECKING:
    from graphmoe.checkpoint.store import CheckpointStore
else:

    def __getattr__(name: str) -> Any:
        if name == "CheckpointStore":  # which imports torch
            from graphmoe.checkpoint.store import CheckpointStore

            return CheckpointStore
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


__all__ = ["CHECKPOINTS", "CheckpointError", "CheckpointStore", "saved_steps"]
