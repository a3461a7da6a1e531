"""Grouped GEMM over routed rows: one weight matrix for each contiguous group of rows.

Suffixes: R rows, K contraction, N output columns, E groups (experts). Rows beyond the last offset are never
read, and unwritten in results.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from graphmoe.ops import register_gradient


def grouped_mm(x_RK: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return ``y[r] = w[e(r)] @ x[r]`` [R, N] in the dtype of x; ``ends_E`` int32: end row of each group e.

    No device sync for bf16 on NVIDIA GPUs of compute capability 9 and 10; elsewhere the host reads the ends.
    """
    return torch.ops.graphmoe.grouped_mm(x_RK, w_ENK, ends_E)


def has_grouped_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ATen has a kernel that reads the ends on the device (GroupedBlas.cpp)."""
    # On ROCm none does (torch 2.11 to 2.13): ATen loops over hipBLASLt's GEMMs, or with
    # ROCM_ALLOW_GROUP_GEMM_CK=1 on gfx90a, gfx942 and gfx950 synchronizes the stream and reads the ends for a
    # kernel of CK (ck_group_gemm.hip). Capabilities (9, 4) and (9, 5) are gfx942 and gfx950, not Hopper.
    if dtype != torch.bfloat16 or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


# torch.nn.functional.grouped_mm refuses fp64 and strides that are not multiples of 16 bytes, and on meta
# tensors or compiled takes bf16 only.
@torch.library.custom_op("graphmoe::grouped_mm", mutates_args=())
def _forward(x_RK: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
    return _rows_product(x_RK, w_ENK.mT, ends_E)


@torch.library.custom_op("graphmoe::grouped_mm_dgrad", mutates_args=())
def _dgrad(dy_RN: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
    return _rows_product(dy_RN.contiguous(), w_ENK, ends_E)


@torch.library.custom_op("graphmoe::grouped_mm_wgrad", mutates_args=())
def _wgrad(dy_RN: Tensor, x_RK: Tensor, ends_E: Tensor) -> Tensor:
    dy_RN = dy_RN.contiguous()
    if _fast(dy_RN, x_RK):
        padded = F.grouped_mm(_pad(dy_RN).mT, _pad(x_RK), offs=ends_E)
        return padded[:, : dy_RN.shape[1], : x_RK.shape[1]].contiguous()
    dw_ENK = dy_RN.new_zeros(len(ends_E), dy_RN.shape[1], x_RK.shape[1])
    for expert, (start, end) in enumerate(_bounds(ends_E)):
        if end > start:
            torch.mm(dy_RN[start:end].mT, x_RK[start:end], out=dw_ENK[expert])
    return dw_ENK


_forward.register_fake(lambda x_RK, w_ENK, ends_E: x_RK.new_empty(x_RK.shape[0], w_ENK.shape[1]))
_dgrad.register_fake(lambda dy_RN, w_ENK, ends_E: dy_RN.new_empty(dy_RN.shape[0], w_ENK.shape[2]))
_wgrad.register_fake(
    lambda dy_RN, x_RK, ends_E: dy_RN.new_empty(ends_E.shape[0], dy_RN.shape[1], x_RK.shape[1])
)
register_gradient(
    _forward,
    (
        lambda dy_RN, x_RK, *of_weight: torch.ops.graphmoe.grouped_mm_dgrad(dy_RN, *of_weight),
        lambda dy_RN, x_RK, w_ENK, ends_E: torch.ops.graphmoe.grouped_mm_wgrad(dy_RN, x_RK, ends_E),
    ),
)


def _rows_product(x_RK: Tensor, w_EKN: Tensor, ends_E: Tensor) -> Tensor:
    if _fast(x_RK, w_EKN):
        # One side's stride is 1; pad the other axis of the storage, whichever that is.
        weight = _pad(w_EKN.mT).mT if w_EKN.stride(-2) == 1 else _pad(w_EKN)
        rows, inner = _pad(x_RK), weight.shape[-2]
        if rows.shape[-1] < inner:
            rows = F.pad(rows, (0, inner - rows.shape[-1]))
        elif rows.shape[-1] > inner:
            weight = F.pad(weight, (0, 0, 0, rows.shape[-1] - inner))
        return F.grouped_mm(rows, weight, offs=ends_E)[:, : w_EKN.shape[-1]].contiguous()
    y_RN = x_RK.new_empty(x_RK.shape[0], w_EKN.shape[-1])
    for expert, (start, end) in enumerate(_bounds(ends_E)):
        if end > start:
            torch.mm(x_RK[start:end], w_EKN[expert], out=y_RN[start:end])
    return y_RN


def _fast(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and len(a) > 0  # a rank may receive no rows


def _pad(x: Tensor) -> Tensor:
    """Pad the last axis with zeros to a multiple of 16 bytes; copy only if needed."""
    missing = -x.shape[-1] % (16 // x.element_size())
    if missing:
        return F.pad(x, (0, missing))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x  # a view may start anywhere; the kernel refuses that


def _bounds(ends_E: Tensor) -> list[tuple[int, int]]:
    ends = ends_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
