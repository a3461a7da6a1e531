"""SwiGLU of routed rows times their routing weight, and its gradients, in one pass.

Suffixes: R routed rows, F expert width, H = 2F (gate, then up), E experts. Rows from ``ends_E[-1]`` on are
dead.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from graphmoe.ops import accumulator, has_kernel, register_gradient

STEEPNESS = 1.702  # of the sigmoid of a clamped SwiGLU, as in gpt-oss


@torch.library.custom_op("graphmoe::swiglu", mutates_args=())
def _forward(
    h_RH: Tensor, weight_R: Tensor | None, ends_E: Tensor, bias_EH: Tensor | None = None, limit: float = 0.0
) -> Tensor:
    """Return silu(gate) * up * weight ([R], [R, 1] or None) -> [R, F] like h; fp32 inside. No device sync.

    ``bias_EH``: added to h. With ``limit`` > 0, gate is clamped to at most the limit, and up to plus or minus
    the limit. The result is then (up + 1) * gate * sigmoid(1.702 * gate) * weight. Gradients beyond a clamp
    are 0, and NaN stays NaN.
    """
    if has_kernel(h_RH):
        from graphmoe.ops import swiglu_kernels

        return swiglu_kernels.forward(h_RH, weight_R, ends_E, bias_EH, limit)
    return activation(with_bias(h_RH, bias_EH, ends_E), weight_R, limit).to(h_RH.dtype)


@torch.library.custom_op("graphmoe::swiglu_backward", mutates_args=())
def _gradients(
    da_RF: Tensor, h_RH: Tensor, weight_R: Tensor | None, ends_E: Tensor, bias_EH: Tensor | None = None,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dh [R, H] in the dtype of h, and dweight like the weight (empty fp32 without one)."""
    if has_kernel(h_RH) and da_RF.dtype == h_RH.dtype:
        from graphmoe.ops import swiglu_kernels

        return swiglu_kernels.backward(da_RF, h_RH, weight_R, ends_E, bias_EH, limit)
    dh_RH, dweight_R = activation_grad(da_RF, with_bias(h_RH, bias_EH, ends_E), weight_R, limit)
    if weight_R is None:
        return dh_RH.to(h_RH.dtype), _no_weight_grad(h_RH)
    return dh_RH.to(h_RH.dtype), dweight_R.to(weight_R.dtype).view(weight_R.shape)


@torch.library.custom_op("graphmoe::expert_sums", mutates_args=())
def _sums(x_RC: Tensor, ends_E: Tensor) -> Tensor:
    """Return the sum of x over each expert's rows [E, C] in fp32 (fp64 for fp64), added in one order."""
    if has_kernel(x_RC):
        from graphmoe.ops import swiglu_kernels

        return swiglu_kernels.expert_sums(x_RC, ends_E)
    offsets = F.pad(ends_E.long(), (1, 0))
    return torch.segment_reduce(x_RC.to(accumulator(x_RC)), "sum", offsets=offsets, unsafe=True)


def with_bias(h_RH: Tensor, bias_EH: Tensor | None, ends_E: Tensor) -> Tensor:
    """Return h in fp32 (fp64 for fp64), plus the bias of each row's expert if there are biases."""
    h_RH = h_RH.to(accumulator(h_RH))
    if bias_EH is None:
        return h_RH
    row_R = torch.arange(len(h_RH), dtype=ends_E.dtype, device=h_RH.device)
    expert_R = torch.searchsorted(ends_E, row_R, right=True)
    return h_RH + bias_EH[expert_R.clamp(max=len(ends_E) - 1)]


def activation(h_RH: Tensor, weight_R: Tensor | None, limit: float) -> Tensor:
    """Return the activation of h, which includes its bias, times the weight -> [R, F]."""
    gate_RF, sigmoid_RF, up_RF = _factors(h_RH, limit)
    a_RF = gate_RF * sigmoid_RF * up_RF
    return a_RF if weight_R is None else a_RF * weight_R.reshape(-1, 1)


def activation_grad(
    da_RF: Tensor, h_RH: Tensor, weight_R: Tensor | None, limit: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of h, which includes its bias [R, H], and of the weight [R]."""
    gate_RF, sigmoid_RF, up_RF = _factors(h_RH, limit)
    da_RF, silu_RF = da_RF.to(h_RH.dtype), gate_RF * sigmoid_RF
    dweight_R = (da_RF * silu_RF * up_RF).sum(1)
    if weight_R is not None:
        da_RF = da_RF * weight_R.reshape(-1, 1)
    slope_RF = sigmoid_RF + (STEEPNESS if limit else 1.0) * silu_RF * (1 - sigmoid_RF)
    dgate_RF, dup_RF = da_RF * up_RF * slope_RF, da_RF * silu_RF
    if limit:
        gate_RF, up_RF = h_RH.chunk(2, dim=-1)
        dgate_RF, dup_RF = (
            dgate_RF.masked_fill(gate_RF > limit, 0),
            dup_RF.masked_fill(up_RF.abs() > limit, 0),
        )
    return torch.cat([dgate_RF, dup_RF], dim=1), dweight_R


def _factors(h_RH: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    gate_RF, up_RF = h_RH.chunk(2, dim=-1)
    if not limit:
        return gate_RF, gate_RF.sigmoid(), up_RF
    gate_RF = gate_RF.clamp(max=limit)
    return gate_RF, (STEEPNESS * gate_RF).sigmoid(), up_RF.clamp(-limit, limit) + 1


_forward.register_fake(lambda h_RH, *_: h_RH.new_empty(h_RH.shape[0], h_RH.shape[1] // 2))
_sums.register_fake(lambda x_RC, ends_E: x_RC.new_empty(len(ends_E), x_RC.shape[1], dtype=accumulator(x_RC)))


@_gradients.register_fake
def _(da_RF: Tensor, h_RH: Tensor, weight_R: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    dweight_R = _no_weight_grad(h_RH) if weight_R is None else weight_R.new_empty(weight_R.shape)
    return h_RH.new_empty(h_RH.shape), dweight_R


def _backward(
    da_RF: Tensor, h_RH: Tensor, weight_R: Tensor | None, ends_E: Tensor, bias_EH: Tensor | None, limit: float
) -> tuple[Tensor | None, ...]:
    ops = torch.ops.graphmoe
    dh_RH, dweight_R = ops.swiglu_backward(da_RF, h_RH, weight_R, ends_E, bias_EH, limit)
    dbias_EH = None if bias_EH is None else ops.expert_sums(dh_RH, ends_E).to(bias_EH.dtype)
    return dh_RH, None if weight_R is None else dweight_R, None, dbias_EH


register_gradient(_forward, _backward)


def _no_weight_grad(h_RH: Tensor) -> Tensor:
    return h_RH.new_empty(0, dtype=torch.float32)
