"""The grouped MLP in our Triton kernels: gather in the prologue, activation and its gradient in the epilogue.

Suffixes: T tokens, K slots, E experts, R routed rows, D hidden, F expert width, H = 2 * F.

Two kernels do the six products: `rows_kernel` those of rows, `weight_grad_kernel` those of weights. Row
results are summed to tokens by ``graphmoe::unpermute``. No call waits for the device or reads a count on the
host, and every sum has a fixed order. The module is a `reference.Backend`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.ops.grouped_mlp import triton_steps as steps
from graphmoe.ops.grouped_mlp.reference import Installed, Plan
from graphmoe.ops.vendors import HALF_DTYPES


def reason_against(
    dtype: torch.dtype, device: torch.device, sync_free: bool, installed: Installed
) -> str | None:
    """Return why the device or the dtype rules the kernels out, or None."""
    if device.type != "cuda":
        return f"needs a GPU and the device is {device.type}"
    if not installed("triton"):
        return "needs the package triton, which is not installed"
    return None if dtype in (*HALF_DTYPES, torch.float32) else f"has no kernels for {dtype}"


def forward(
    x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, weight_TK: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """y_TD and h_RH."""
    tiles = steps.row_tiles(plan.ends_E, len(plan.slot_R))
    h_RH, a_RF = steps.up(x_TD, w_gate_up, weight_TK, plan, tiles)
    y_RD = steps.down(a_RF, w_down, plan.ends_E, tiles)
    return torch.ops.graphmoe.unpermute(y_RD, *plan, None), h_RH


def hidden(x_TD: Tensor, w_gate_up: Tensor, plan: Plan) -> Tensor:
    """h_RH alone."""
    return steps.hidden_rows(x_TD, w_gate_up, plan, steps.row_tiles(plan.ends_E, len(plan.slot_R)))


def dgrad(
    dy_TD: Tensor, h_RH: Tensor, w_gate_up: Tensor, w_down: Tensor, weight_TK: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx_TD, dweight_TK, dh_RH, a_RF."""
    tiles = steps.row_tiles(plan.ends_E, len(plan.slot_R))
    dh_RH, a_RF, partial = steps.down_dgrad(dy_TD, h_RH, w_down, weight_TK, plan, tiles)
    dx_RD = steps.up_dgrad(dh_RH, w_gate_up, plan.ends_E, tiles)
    dx_TD = torch.ops.graphmoe.unpermute(dx_RD, *plan, None)
    return dx_TD, steps.weight_sums(partial, plan.row_TK), dh_RH, a_RF


def wgrad(dy_TD: Tensor, x_TD: Tensor, dh_RH: Tensor, a_RF: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """dw_gate_up and dw_down."""
    dw_gate_up = steps.weight_grad("up_wgrad", dh_RH, x_TD, plan)
    return dw_gate_up, steps.weight_grad("down_wgrad", dy_TD, a_RF, plan)


def wgrad_into(
    dy_TD: Tensor,
    x_TD: Tensor,
    dh_RH: Tensor,
    a_RF: Tensor,
    plan: Plan,
    totals: tuple[Tensor, Tensor],
    add: bool,
) -> None:
    """Store both in ``totals`` from their fp32 sums, or add them."""
    steps.weight_grad("up_wgrad", dh_RH, x_TD, plan, totals[0], add=add)
    steps.weight_grad("down_wgrad", dy_TD, a_RF, plan, totals[1], add=add)
