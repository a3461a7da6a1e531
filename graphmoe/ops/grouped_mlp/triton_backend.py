"""The grouped MLP in our Triton kernels: gather in the prologue, activation and its gradient in the epilogue.

Suffixes: T tokens, K slots, E experts, R routed rows, D hidden, F expert width, H = 2 * F.

Two kernels do the six products: `rows_kernel` those of rows, `weight_grad_kernel` those of weights. Row
results are summed to tokens by ``graphmoe::unpermute``. No call waits for the device or reads a count on the
host, and every sum has a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.ops.grouped_mlp.triton_steps import (
    down,
    down_dgrad,
    hidden_rows,
    row_tiles,
    up,
    up_dgrad,
    weight_grad,
    weight_sums,
)


def forward(
    x_TD: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weight_TK: Tensor,
    slot_R: Tensor,
    row_TK: Tensor,
    ends_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """y_TD and h_RH."""
    tiles = row_tiles(ends_E, len(slot_R))
    h_RH, a_RF = up(x_TD, w_gate_up, weight_TK, slot_R, ends_E, tiles)
    y_RD = down(a_RF, w_down, ends_E, tiles)
    return torch.ops.graphmoe.unpermute(y_RD, slot_R, row_TK, ends_E, None), h_RH


def hidden(x_TD: Tensor, w_gate_up: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor) -> Tensor:
    """h_RH alone."""
    tiles = row_tiles(ends_E, len(slot_R))
    return hidden_rows(x_TD, w_gate_up, row_TK.shape[1], slot_R, ends_E, tiles)


def dgrad(
    dy_TD: Tensor,
    h_RH: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weight_TK: Tensor,
    slot_R: Tensor,
    row_TK: Tensor,
    ends_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx_TD, dweight_TK, dh_RH, a_RF."""
    tiles = row_tiles(ends_E, len(slot_R))
    dh_RH, a_RF, partial = down_dgrad(dy_TD, h_RH, w_down, weight_TK, slot_R, ends_E, tiles)
    dx_RD = up_dgrad(dh_RH, w_gate_up, ends_E, tiles)
    dx_TD = torch.ops.graphmoe.unpermute(dx_RD, slot_R, row_TK, ends_E, None)
    return dx_TD, weight_sums(partial, row_TK), dh_RH, a_RF


def wgrad(
    dy_TD: Tensor,
    x_TD: Tensor,
    dh_RH: Tensor,
    a_RF: Tensor,
    slot_R: Tensor,
    row_TK: Tensor,
    ends_E: Tensor,
    totals: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    *,
    add: bool = False,
) -> tuple[Tensor, Tensor]:
    """dw_gate_up and dw_down; in ``totals`` where they are given, with ``add`` on top of what they hold."""
    plan = (slot_R, ends_E, row_TK.shape[1])
    return (
        weight_grad("up_wgrad", dh_RH, x_TD, *plan, totals[0], add=add),
        weight_grad("down_wgrad", dy_TD, a_RF, *plan, totals[1], add=add),
    )
