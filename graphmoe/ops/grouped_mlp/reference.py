"""The grouped MLP in separate steps around a grouped product: torch's own, or that of a vendor.

Suffixes: T tokens, K slots, E experts, R routed rows, D hidden, F expert width, H = 2 * F; N and C are the
output and contracted width of a product.

On a CPU this is the plain reference of the op. On a GPU it gathers, multiplies, activates and sums in
kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class Products(NamedTuple):
    """A grouped product and its two gradients; the last argument is ``ends_E``. Dead rows are not read."""

    rows: Product
    """x_RC, w_ENC -> y_RN: ``y[r] = w[e(r)] @ x[r]``."""
    rows_grad: Product
    """dy_RN, w_ENC -> dx_RC: ``dx[r] = w[e(r)].T @ dy[r]``."""
    weight_grad: Product
    """dy_RN, x_RC -> dw_ENC: the sum of ``outer(dy[r], x[r])`` over the rows of an expert, or zeros."""


def products(dtype: torch.dtype) -> Products:
    """Torch's own, in any dtype."""
    from graphmoe.ops import grouped_mm  # noqa: F401  # registers the ops

    ops = torch.ops.graphmoe
    return Products(ops.grouped_mm, ops.grouped_mm_dgrad, ops.grouped_mm_wgrad)


def forward(
    products: Products,
    x_TD: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weight_TK: Tensor,
    slot_R: Tensor,
    row_TK: Tensor,
    ends_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """y_TD and h_RH. The weight is applied before the down product, which then needs no epilogue."""
    ops = torch.ops.graphmoe
    h_RH = hidden(products, x_TD, w_gate_up, slot_R, row_TK, ends_E)
    a_RF = ops.swiglu(h_RH, _of_rows(weight_TK, slot_R), ends_E)
    y_RD = products.rows(a_RF, w_down, ends_E)
    return ops.unpermute(y_RD, slot_R, row_TK, ends_E, None), h_RH


def hidden(
    products: Products, x_TD: Tensor, w_gate_up: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor
) -> Tensor:
    """h_RH alone."""
    x_RD = torch.ops.graphmoe.permute(x_TD, slot_R, row_TK, ends_E)
    return products.rows(x_RD, w_gate_up, ends_E)


def dgrad(
    products: Products,
    dy_TD: Tensor,
    h_RH: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weight_TK: Tensor,
    slot_R: Tensor,
    row_TK: Tensor,
    ends_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx_TD, dweight_TK, dh_RH, a_RF. The down product itself is not needed: dweight is <W.T dy, a>."""
    ops = torch.ops.graphmoe
    weight_R = _of_rows(weight_TK, slot_R)
    dy_RD = ops.permute(dy_TD, slot_R, row_TK, ends_E)
    da_RF = products.rows_grad(dy_RD, w_down, ends_E)
    dh_RH, dweight_R = ops.swiglu_backward(da_RF, h_RH, weight_R, ends_E)
    a_RF = ops.swiglu(h_RH, weight_R, ends_E)
    dx_RD = products.rows_grad(dh_RH, w_gate_up, ends_E)
    dx_TD = ops.unpermute(dx_RD, slot_R, row_TK, ends_E, None)
    return dx_TD, _of_slots(dweight_R, row_TK), dh_RH, a_RF


def wgrad(
    products: Products,
    dy_TD: Tensor,
    x_TD: Tensor,
    dh_RH: Tensor,
    a_RF: Tensor,
    slot_R: Tensor,
    row_TK: Tensor,
    ends_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """dw_gate_up and dw_down."""
    ops = torch.ops.graphmoe
    x_RD = ops.permute(x_TD, slot_R, row_TK, ends_E)
    dw_gate_up = products.weight_grad(dh_RH, x_RD, ends_E)
    dy_RD = ops.permute(dy_TD, slot_R, row_TK, ends_E)
    return dw_gate_up, products.weight_grad(dy_RD, a_RF, ends_E)


def into(total: Tensor, gradient: Tensor, *, add: bool) -> None:
    """Store a gradient of any dtype in ``total``, or add it."""
    if add:
        total.add_(gradient)
    else:
        total.copy_(gradient)


def _of_rows(weight_TK: Tensor, slot_R: Tensor) -> Tensor:
    """The routing weight of each row; that of some other slot in dead rows, which may name any slot."""
    if weight_TK.numel() == 0:
        return weight_TK.new_empty(slot_R.shape)
    return weight_TK.reshape(-1)[slot_R.long().clamp(0, weight_TK.numel() - 1)]


def _of_slots(value_R: Tensor, row_TK: Tensor) -> Tensor:
    """The value of the row of each slot; 0 where it has none."""
    if len(value_R) == 0:
        return value_R.new_zeros(row_TK.shape)
    return value_R[row_TK.clamp(min=0)].masked_fill(row_TK < 0, 0)
