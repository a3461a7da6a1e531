"""The history of a GPU's memory (torch/cuda/memory.py): pytorch.org/docs/stable/torch_cuda_memory."""

from __future__ import annotations

from pathlib import Path

import torch

MAX_EVENTS = 1_000_000
"""The last so many allocations and frees are kept, some KB of the host's memory each."""


def start_memory_history() -> None:
    """Record from now on each allocation and free, with the Python stack that made it."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_EVENTS, clear_history=True)


def write_memory_history(path: Path) -> None:
    """Write what is allocated now and what was recorded, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


def stop_memory_history() -> None:
    """Record nothing any more."""
    torch.cuda.memory._record_memory_history(enabled=None)
