"""Size of a Triton program in threads, which a warp of 32 (NVIDIA) or 64 (AMD) turns into ``num_warps``."""

from __future__ import annotations

import torch


def num_warps(threads: int) -> int:
    """Warps that hold ``threads`` threads on this build of PyTorch; at least one."""
    return max(threads // (64 if torch.version.hip else 32), 1)
