"""Grouped GEMMs of Primus-Turbo (ROCm) and Transformer Engine (CUDA) for the steps of `reference`.

Primus-Turbo takes int64 counts and offsets on the device and never waits for the host. Written against the
source of commit a6a16cdc, not run with the package yet.

Transformer Engine takes counts on the device if cuBLASLt has the grouped GEMM (13.3, on Hopper 13.4), by
``GroupedLinear``, built once per shape on the meta device and called with views of our weights: dgrad is a
forward with transposed copies of the weights, and wgrad runs a forward first. Else a GEMM for each expert
gets counts of the host, which waits for them.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphmoe.config.formats import FORMATS, TurboScales
from graphmoe.config.packages import is_installed, require_package
from graphmoe.ops import HALF_DTYPES, require_half, transformer_engine
from graphmoe.ops.grouped_mlp.reference import KEY, Products, Stepwise

_LACKS = "as there is no grouped GEMM of cuBLASLt (13.3, on Hopper 13.4) with counts on the device"


def _turbo_products(dtype: torch.dtype) -> Products:
    require_half(KEY, "turbo", dtype)
    require_package(KEY, "turbo")
    rows, rows_grad = (functools.partial(_turbo_rows, trans_b=trans_b) for trans_b in (True, False))
    return Products(rows, rows_grad, _turbo_weight_grad)


def _turbo_rows(x: Tensor, w_ENC: Tensor, ends_E: Tensor, *, trans_b: bool) -> Tensor:
    from primus_turbo.pytorch.ops import grouped_gemm  # type: ignore[import-not-found]

    lens_E, offsets = _offsets(ends_E)
    return grouped_gemm(
        x.contiguous(), w_ENC.contiguous(), group_lens=lens_E, group_offs=offsets, trans_b=trans_b
    )


def _turbo_fp8_products(scales: TurboScales, dtype: torch.dtype) -> Products:
    rows, rows_grad = (
        functools.partial(_turbo_fp8_rows, scales, trans_b=trans_b) for trans_b in (True, False)
    )
    # wgrad stays in bf16: in fp8 the public function would cost three GEMMs
    return _turbo_products(dtype)._replace(rows=rows, rows_grad=rows_grad)


@torch.no_grad()
def _turbo_fp8_rows(
    scales: TurboScales, x: Tensor, w_ENC: Tensor, ends_E: Tensor, *, trans_b: bool
) -> Tensor:
    from primus_turbo.pytorch.ops import grouped_gemm_fp8

    if not (trans_b or scales.transposes):
        w_ENC, trans_b = w_ENC.mT, True
    lens_E, offsets = _offsets(ends_E)
    # the package takes scales of tensors and columns over all rows, so dead rows must be zeros
    is_live = torch.arange(len(x), device=x.device)[:, None] < offsets[-1]
    return grouped_gemm_fp8(
        x.where(is_live, 0),
        w_ENC.contiguous(),
        group_lens=lens_E,
        group_offs=offsets,
        trans_b=trans_b,
        config=turbo_config(scales),
    )


def turbo_config(scales: TurboScales) -> Any:
    """Return Primus-Turbo's ``Float8QuantConfig`` of a format."""
    from primus_turbo.pytorch.core.low_precision import Float8QuantConfig, ScaleDtype, ScalingGranularity  # type: ignore[import-not-found]

    return Float8QuantConfig(
        granularity=ScalingGranularity[scales.granularity],
        block_size=scales.block_size,
        scale_dtype=ScaleDtype[scales.scale_dtype],
    )


def _turbo_weight_grad(dy_RN: Tensor, x_RC: Tensor, ends_E: Tensor) -> Tensor:
    # the operation behind the package's own backward; its public function would run the forward first
    from primus_turbo.pytorch.core.backend import BackendType  # type: ignore[import-not-found]
    from primus_turbo.pytorch.kernels.grouped_gemm.grouped_gemm_impl import grouped_gemm_variable_k_impl  # type: ignore[import-not-found]

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


def _offsets(ends_E: Tensor) -> tuple[Tensor, Tensor]:
    offsets = torch.nn.functional.pad(ends_E.long(), (1, 0))
    return torch.diff(offsets), offsets


def _te_products(dtype: torch.dtype) -> Products:
    require_half(KEY, "te", dtype)
    require_package(KEY, "te")
    if _te_takes_device_counts(dtype):
        return Products(_te_rows, lambda dy, w_ENC, ends_E: _te_rows(dy, w_ENC.mT, ends_E), _te_weight_grad)
    _warn_of_waiting()
    rows, rows_grad = (functools.partial(_te_gemms, layout=layout) for layout in ("TN", "NN"))
    return Products(rows, rows_grad, _te_gemms_of_weights)


@functools.cache
def _warn_of_waiting() -> None:
    logging.getLogger(__name__).warning("%s=te: each GEMM waits for the host, %s", KEY, _LACKS)


def _te_takes_device_counts(dtype: torch.dtype) -> bool:
    module = transformer_engine(".module.grouped_linear")
    return bool(module.is_module_grouped_tensor_path_supported(None, dtype))


def _te_gemms(x_RC: Tensor, w_ENC: Tensor, ends_E: Tensor, *, layout: str) -> Tensor:
    counts = _offsets(ends_E)[0].tolist()
    y_RN = x_RC.new_empty(len(x_RC), w_ENC.shape[1 if layout == "TN" else 2])
    parts = x_RC[: sum(counts)].contiguous().split(counts)
    _general_grouped_gemm(list(w_ENC.contiguous()), parts, [y_RN], counts, layout, single_output=True)
    return y_RN


def _te_gemms_of_weights(dy_RN: Tensor, x_RC: Tensor, ends_E: Tensor) -> Tensor:
    counts = _offsets(ends_E)[0].tolist()
    dw_ENC = x_RC.new_empty(len(counts), dy_RN.shape[1], x_RC.shape[1])
    x, dy = (tensor[: sum(counts)].contiguous().split(counts) for tensor in (x_RC, dy_RN))
    _general_grouped_gemm(x, dy, list(dw_ENC), counts, "NT")
    return dw_ENC


def _general_grouped_gemm(
    a: Sequence[Tensor], b: Sequence[Tensor], out: list[Tensor], counts: list[int], layout: str, **how: bool
) -> None:
    run, kept = transformer_engine(".cpp_extensions").general_grouped_gemm, [None] * len(a)  # no quantizers
    run([*a], [*b], out, kept, out[0].dtype, layout=layout, m_splits=counts, **how)


def _te_rows(x_RC: Tensor, w_ENC: Tensor, ends_E: Tensor) -> Tensor:
    with torch.no_grad():
        return _call(x_RC.contiguous(), list(w_ENC.contiguous()), ends_E)


def _te_weight_grad(dy_RN: Tensor, x_RC: Tensor, ends_E: Tensor) -> Tensor:
    E, N, C = len(ends_E), dy_RN.shape[1], x_RC.shape[1]
    with torch.enable_grad():
        weights = [w.requires_grad_() for w in x_RC.new_zeros(1, N, C).expand(E, N, C).detach()]
        y_RN = _call(x_RC.contiguous(), weights, ends_E)
        return torch.stack(torch.autograd.grad(y_RN, weights, dy_RN.contiguous()))


def _call(x_RC: Tensor, weights: list[Tensor], ends_E: Tensor) -> Tensor:
    N, C = weights[0].shape
    module = te_module(len(weights), C, N, x_RC.dtype)
    named = {f"weight{expert}": weight for expert, weight in enumerate(weights)}
    counts_E, _ = _offsets(ends_E)
    return torch.func.functional_call(module, named, (x_RC, counts_E))


@functools.cache
def te_module(experts: int, in_features: int, out_features: int, dtype: torch.dtype) -> Any:
    """Return the ``GroupedLinear`` of a shape, on the meta device."""
    return transformer_engine().GroupedLinear(
        num_gemms=experts,
        in_features=in_features,
        out_features=out_features,
        bias=False,
        params_dtype=dtype,
        device="meta",
        use_grouped_tensor=True,
    )


def _reason_against(
    missing: str, wants_rocm: bool, dtype: torch.dtype, device: torch.device, sync_free: bool
) -> str | None:
    if device.type != "cuda":
        return f"needs a GPU and the device is {device.type}"
    if dtype not in HALF_DTYPES:
        return f"has bf16 and fp16 kernels only and the activations are {dtype}"
    return None if wants_rocm == (torch.version.hip is not None) else missing


_against_turbo = functools.partial(
    _reason_against, "is Primus-Turbo, which needs a ROCm build of torch", True
)
TURBO = Stepwise(_turbo_products, _against_turbo)
# the same with fp8 GEMMs of rows, by format
TURBO_FP8 = {
    name: Stepwise(functools.partial(_turbo_fp8_products, each.turbo), _against_turbo)
    for name, each in FORMATS.items()
}


def _against_te(dtype: torch.dtype, device: torch.device, sync_free: bool) -> str | None:
    reason = _reason_against("needs CUDA", False, dtype, device, sync_free)
    if reason or not sync_free or not is_installed("transformer_engine") or _te_takes_device_counts(dtype):
        return reason
    return f"waits for the host, {_LACKS}; moe.sync_free_stage=1 allows that"


TE = Stepwise(_te_products, _against_te)
