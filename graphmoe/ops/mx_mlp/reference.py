"""The plain form of the grouped MLP in mxfp8: what the kernels compute, expert by expert, summed in fp32.

Suffixes as in the package. Dead rows are left zero.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from graphmoe.ops.fp8_blocks.reference import quantise_mx, turned, values
from graphmoe.ops.fp8_mlp.reference import (
    Scaled,
    into,
    joined,
    live_rows,
    rows_of_experts,
    swiglu_gradients,
    token_of_rows,
)
from graphmoe.ops.grouped_mlp.reference import Plan, row_weights, slot_values


def forward(
    x: Scaled,
    w_gate_up: Scaled,
    w_down: Scaled,
    weight_TK: Tensor,
    plan: Plan,
    dtype: torch.dtype,
    more: Sequence[Scaled] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """y_TD, and h; ``more`` as in `ops.fp8_mlp.reference`."""
    w_gate_up, w_down = joined((w_gate_up, w_down), more)
    h_RH = _hidden(x, w_gate_up, plan, dtype)
    gate_RF, up_RF = h_RH.chunk(2, -1)
    a_RF = F.silu(gate_RF) * up_RF * row_weights(weight_TK, plan.slot_R)[:, None]
    y_RD = _rows(quantise_mx(a_RF), w_down, plan).to(dtype)
    return torch.ops.graphmoe.unpermute(y_RD, *plan, None), *quantise_mx(h_RH)


def hidden(
    x: Scaled, w_gate_up: Scaled, plan: Plan, dtype: torch.dtype, more: Sequence[Scaled] = ()
) -> Scaled:
    """h, as `forward` makes it."""
    (w_gate_up,) = joined((w_gate_up,), more)
    return quantise_mx(_hidden(x, w_gate_up, plan, dtype))


def _hidden(x: Scaled, w_gate_up: Scaled, plan: Plan, dtype: torch.dtype) -> Tensor:
    return _rows(_of_rows(x, plan), w_gate_up, plan).to(dtype).float()


def dgrad(
    dy: Scaled,
    h: Scaled,
    w_gate_up: Scaled,
    w_down: Scaled,
    weight_TK: Tensor,
    plan: Plan,
    dtype: torch.dtype,
    more: Sequence[Scaled] = (),
) -> tuple[Tensor, ...]:
    """dx_TD, dweight_TK, dh with its scales, the weighted activation with its; weights lie transposed."""
    w_gate_up, w_down = joined((w_gate_up, w_down), more)
    da_RF = _rows(_of_rows(dy, plan), w_down, plan).to(dtype).float()
    gate_RF, up_RF = values(*h).chunk(2, -1)
    weight_R = row_weights(weight_TK, plan.slot_R)
    dh_RH, a_RF, dweight_R = swiglu_gradients(da_RF, gate_RF, up_RF, weight_R)
    live_R1 = live_rows(plan)[:, None]
    dh, a = (quantise_mx(each.where(live_R1, 0)) for each in (dh_RH, a_RF))
    dx_RD = _rows(dh, w_gate_up, plan).to(dtype)
    dx_TD = torch.ops.graphmoe.unpermute(dx_RD, *plan, None)
    return dx_TD, slot_values(dweight_R, plan.row_TK), *dh, *a


def wgrad(
    dy: Scaled, x: Scaled, dh: Scaled, a: Scaled, plan: Plan,
    totals: tuple[Tensor, Tensor] | None = None, *, add: bool = False, of_more: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dw_gate_up and dw_down in fp32, in ``totals`` where there are any, on top of them with ``add``."""
    gradients = _weight_grad(dh, _of_rows(x, plan), plan), _weight_grad(_of_rows(dy, plan), a, plan)
    return into(gradients, totals, add=add, of_more=of_more)


def _of_rows(x: Scaled, plan: Plan) -> Scaled:
    token_R = token_of_rows(plan)
    return x[0][token_R], x[1][token_R]


def _rows(x: Scaled, w: Scaled, plan: Plan) -> Tensor:
    """w[e(r)] @ x[r] in fp32; zero in dead rows."""
    result = x[0].new_zeros(len(x[0]), w[0].shape[1], dtype=torch.float32)
    for expert, rows in rows_of_experts(plan):
        result[rows] = values(x[0][rows], x[1][rows]) @ values(w[0][expert], w[1][expert]).t()
    return result


def _weight_grad(left: Scaled, right: Scaled, plan: Plan) -> Tensor:
    """Sum of outer products of an expert's rows, which both sides have stored anew along them."""
    sizes = len(plan.ends_E), left[0].shape[1], right[0].shape[1]
    result = left[0].new_zeros(*sizes, dtype=torch.float32)
    for expert, rows in rows_of_experts(plan):
        sides = (values(*turned(q[rows], scale[rows])) for q, scale in (left, right))
        one, other = sides
        result[expert] = one @ other.t()
    return result
