"""Products of matrices with their own transposes.

Suffixes: N matrices, R rows, C columns, M = R, or C with ``of_columns``.
"""

import torch
from torch import Tensor

from graphmoe.config import packages
from graphmoe.ops.grouped_mlp.tuning import kind_of


def symmetric_mm(
    x_NRC: Tensor, *, of_columns: bool = False, scale: float = 1.0, add: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """Return ``scale * x @ x.mT + add * x + diagonal * I`` [N, M, M]; ``of_columns``: with ``x.mT @ x``.

    ``add`` needs symmetric x. No device sync. In bf16 on NVIDIA GPUs of compute capability 9 and 10 one half
    is computed and mirrored, and the result rounded once.
    """
    if _has_kernel(x_NRC):
        from graphmoe.ops.symmetric_mm_kernel import launch

        return launch(x_NRC.contiguous(), of_columns, scale, add, diagonal)
    sides = (x_NRC.mT, x_NRC) if of_columns else (x_NRC, x_NRC.mT)
    product = torch.baddbmm(x_NRC, *sides, beta=add, alpha=scale) if add else scale * torch.bmm(*sides)
    if diagonal:
        product.diagonal(dim1=1, dim2=2).add_(diagonal)
    return product


def _has_kernel(x_NRC: Tensor) -> bool:
    if not (x_NRC.is_cuda and x_NRC.dtype == torch.bfloat16 and packages.is_installed("triton")):
        return False
    is_fit = len(x_NRC) > 0 and all(n % 8 == 0 for n in x_NRC.shape[1:])  # as descriptors need
    return is_fit and kind_of(x_NRC.device) == "hopper"
