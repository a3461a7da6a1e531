"""One file for each operation: reference, kernels, vendor adapters and the choice among them."""

import torch


def num_warps(threads: int) -> int:
    """Warps of 32 threads (NVIDIA) or 64 (AMD) that hold a Triton program's ``threads``; at least one."""
    return max(threads // (64 if torch.version.hip else 32), 1)
