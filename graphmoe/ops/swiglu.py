"""SwiGLU of routed rows times their routing weight, and its gradients, in one pass.

Suffixes: R routed rows, F expert width, H = 2F (gate, then up), E experts. Rows from ``ends_E[-1]`` on are
dead.
"""

import torch
from torch import Tensor

from graphmoe.ops import accumulator, has_kernel, register_gradient


@torch.library.custom_op("graphmoe::swiglu", mutates_args=())
def _forward(h_RH: Tensor, weight_R: Tensor | None, ends_E: Tensor) -> Tensor:
    """Return silu(gate) * up * weight ([R], [R, 1] or None) -> [R, F] like h; fp32 inside. No device sync."""
    if has_kernel(h_RH):
        from graphmoe.ops import swiglu_kernels

        return swiglu_kernels.forward(h_RH, weight_R, ends_E)
    gate_RF, up_RF = h_RH.to(accumulator(h_RH)).chunk(2, dim=-1)
    a_RF = gate_RF * gate_RF.sigmoid() * up_RF
    if weight_R is not None:
        a_RF = a_RF * weight_R.reshape(-1, 1)
    return a_RF.to(h_RH.dtype)


@torch.library.custom_op("graphmoe::swiglu_backward", mutates_args=())
def _gradients(da_RF: Tensor, h_RH: Tensor, weight_R: Tensor | None, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return dh [R, H] in the dtype of h, and dweight like the weight (empty fp32 without one)."""
    if has_kernel(h_RH) and da_RF.dtype == h_RH.dtype:
        from graphmoe.ops import swiglu_kernels

        return swiglu_kernels.backward(da_RF, h_RH, weight_R, ends_E)
    gate_RF, up_RF = h_RH.to(accumulator(h_RH)).chunk(2, dim=-1)
    da_RF = da_RF.to(gate_RF.dtype)
    sigmoid_RF = gate_RF.sigmoid()
    silu_RF = gate_RF * sigmoid_RF
    dweight_R = _no_weight_grad(h_RH)
    if weight_R is not None:
        dweight_R = (da_RF * silu_RF * up_RF).sum(1).to(weight_R.dtype).view(weight_R.shape)
        da_RF = da_RF * weight_R.reshape(-1, 1)
    dgate_RF = da_RF * up_RF * (sigmoid_RF + silu_RF * (1 - sigmoid_RF))
    return torch.cat([dgate_RF, da_RF * silu_RF], dim=1).to(h_RH.dtype), dweight_R


_forward.register_fake(lambda h_RH, weight_R, ends_E: h_RH.new_empty(h_RH.shape[0], h_RH.shape[1] // 2))


@_gradients.register_fake
def _(da_RF: Tensor, h_RH: Tensor, weight_R: Tensor | None, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    dweight_R = _no_weight_grad(h_RH) if weight_R is None else weight_R.new_empty(weight_R.shape)
    return h_RH.new_empty(h_RH.shape), dweight_R


def _backward(
    da_RF: Tensor, h_RH: Tensor, weight_R: Tensor | None, ends_E: Tensor
) -> tuple[Tensor, Tensor | None]:
    dh_RH, dweight_R = torch.ops.graphmoe.swiglu_backward(da_RF, h_RH, weight_R, ends_E)
    return dh_RH, None if weight_R is None else dweight_R


register_gradient(_forward, _backward)


def _no_weight_grad(h_RH: Tensor) -> Tensor:
    return h_RH.new_empty(0, dtype=torch.float32)
