"""Grouped products of Transformer Engine for the steps of `reference`.

Suffixes: E experts, R routed rows, N and C the output and contracted width of a product.

``GroupedLinear`` is a module with one parameter ``weight{i}`` per expert and no bias. Ours is built once per
shape on the meta device and called with views of our weights. It takes counts on the device where cuBLASLt
has the grouped product (13.3, and 13.4 on Hopper, in bf16 and fp16); elsewhere it would wait for the host,
and this backend refuses. Its kernels have no public entry of their own, so gradients pay more than they must:
that of rows is a forward with transposed copies of the weights, and that of weights runs a forward first.
Written against the source of commit d0067d0d, and not run with the package yet.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from graphmoe.config.packages import require_package
from graphmoe.config.schema import ConfigError
from graphmoe.ops.grouped_mlp import KEY
from graphmoe.ops.grouped_mlp.reference import Products
from graphmoe.ops.vendors import require_half


def products(dtype: torch.dtype) -> Products:
    """The package's. Raises ConfigError where it, or a kernel for the dtype or the GPU, is missing."""
    require_half(KEY, "te", dtype)
    require_package(KEY, "te")
    from transformer_engine.pytorch.module.grouped_linear import (  # type: ignore[import-not-found]
        is_module_grouped_tensor_path_supported,
    )

    if not is_module_grouped_tensor_path_supported(None, dtype):
        raise ConfigError(
            f"{KEY}=te needs the grouped products of cuBLASLt (13.3, on Hopper 13.4), which this GPU or "
            f"build of Transformer Engine lacks for {dtype}; use {KEY}=auto"
        )
    return Products(_rows, _rows_grad, _weight_grad)


def _rows(x_RC: Tensor, w_ENC: Tensor, ends_E: Tensor) -> Tensor:
    with torch.no_grad():
        return _call(x_RC.contiguous(), list(w_ENC.contiguous()), ends_E)


def _rows_grad(dy_RN: Tensor, w_ENC: Tensor, ends_E: Tensor) -> Tensor:
    return _rows(dy_RN, w_ENC.mT, ends_E)


def _weight_grad(dy_RN: Tensor, x_RC: Tensor, ends_E: Tensor) -> Tensor:
    E, N, C = len(ends_E), dy_RN.shape[1], x_RC.shape[1]
    with torch.enable_grad():
        weights = [w.requires_grad_() for w in x_RC.new_zeros(1, N, C).expand(E, N, C).detach()]
        y_RN = _call(x_RC.contiguous(), weights, ends_E)
        return torch.stack(torch.autograd.grad(y_RN, weights, dy_RN.contiguous()))


def _call(x_RC: Tensor, weights: list[Tensor], ends_E: Tensor) -> Tensor:
    N, C = weights[0].shape
    module = _module(len(weights), C, N, x_RC.dtype)
    named = {f"weight{expert}": weight for expert, weight in enumerate(weights)}
    counts_E = torch.diff(ends_E.long(), prepend=ends_E.new_zeros(1, dtype=torch.long))
    return torch.func.functional_call(module, named, (x_RC, counts_E))


@functools.cache
def _module(experts: int, in_features: int, out_features: int, dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch import GroupedLinear  # type: ignore[import-not-found]

    return GroupedLinear(
        num_gemms=experts,
        in_features=in_features,
        out_features=out_features,
        bias=False,
        params_dtype=dtype,
        device="meta",
        use_grouped_tensor=True,
    )
