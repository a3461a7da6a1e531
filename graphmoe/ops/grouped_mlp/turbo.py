"""Grouped products of Primus-Turbo (ROCm) for the steps of `reference`.

Suffixes: E experts, R routed rows, N and C the output and contracted width of a product.

It takes int64 counts and offsets on the device (the ends after a leading zero); nothing waits for the host.
Rows beyond the last offset are not read, and zero in what it returns. Written against the source of commit
a6a16cdc, and not run with the package yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.config.packages import require_package
from graphmoe.ops.grouped_mlp import KEY
from graphmoe.ops.grouped_mlp.reference import Products
from graphmoe.ops.vendors import require_half


def products(dtype: torch.dtype) -> Products:
    """The package's. Raises ConfigError where it, or a kernel for the dtype, is missing."""
    require_half(KEY, "turbo", dtype)
    require_package(KEY, "turbo")
    return Products(_rows, _rows_grad, _weight_grad)


def _rows(x_RC: Tensor, w_ENC: Tensor, ends_E: Tensor) -> Tensor:
    return _grouped_gemm(x_RC, w_ENC, *_offsets(ends_E), trans_b=True)


def _rows_grad(dy_RN: Tensor, w_ENC: Tensor, ends_E: Tensor) -> Tensor:
    return _grouped_gemm(dy_RN, w_ENC, *_offsets(ends_E), trans_b=False)


def _weight_grad(dy_RN: Tensor, x_RC: Tensor, ends_E: Tensor) -> Tensor:
    """The operation behind the package's own backward; its public function would multiply forward first."""
    from primus_turbo.pytorch.core.backend import BackendType  # type: ignore[import-not-found]
    from primus_turbo.pytorch.kernels.grouped_gemm.grouped_gemm_impl import (  # type: ignore[import-not-found]
        grouped_gemm_variable_k_impl,
    )

    lens_E, offsets = _offsets(ends_E)
    return grouped_gemm_variable_k_impl(
        x_RC.contiguous(),
        dy_RN.contiguous(),
        lens_E,
        offsets,
        trans_a=True,
        trans_b=False,
        trans_c=True,  # [E, N, C] rather than [E, C, N]
        num_cu=None,
        default_backend=BackendType.TRITON.value,
    )


def _grouped_gemm(a: Tensor, b: Tensor, lens_E: Tensor, offsets: Tensor, *, trans_b: bool) -> Tensor:
    from primus_turbo.pytorch.ops import grouped_gemm  # type: ignore[import-not-found]

    return grouped_gemm(
        a.contiguous(), b.contiguous(), group_lens=lens_E, group_offs=offsets, trans_b=trans_b
    )


def _offsets(ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [E] and offsets [E + 1] of experts, int64."""
    offsets = torch.nn.functional.pad(ends_E.long(), (1, 0))
    return torch.diff(offsets), offsets
