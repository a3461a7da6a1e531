"""The plain form of the grouped MLP in 8 bits: what the kernels compute, expert by expert, summed in fp32.

Suffixes as in the package. Dead rows are left zero.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from graphmoe.ops.fp8 import SMALLEST, block_values, fp8_dtype, quantise, quantise_blocks, saturated
from graphmoe.ops.grouped_mlp.reference import Plan, row_weights, slot_values

Scaled = tuple[Tensor, Tensor]
"""Stored numbers and their scales."""
Known = tuple[Tensor, Tensor]
"""A scale [1] that is known before, and what takes up the largest number [1], in place."""


def rows(w: Tensor, *, whole: bool = False) -> Scaled:
    """q like w, and the scales [..., 1] of its rows, or of each ``whole`` matrix."""
    q, scale = quantise(w, fp8_dtype(), whole=whole)
    return q.contiguous(), scale.contiguous()


def columns(w_ENC: Tensor, *, whole: bool = False) -> Scaled:
    """q [E, C, N], and the scales [E, C, 1] of the columns of w, or of each ``whole`` matrix."""
    return rows(w_ENC.mT, whole=whole)


def forward(
    x: Scaled,
    w_gate_up: Scaled,
    w_down: Scaled,
    weight_TK: Tensor,
    plan: Plan,
    dtype: torch.dtype,
    known: Known | None = None,
    more: Sequence[Scaled] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """y_TD, and h by blocks; the scale of the activation may be ``known``.

    ``more`` are both weights of further experts, whose rows follow: replicas of those of other ranks.
    """
    w_gate_up, w_down = joined((w_gate_up, w_down), more)
    h_RH, kind = _hidden(x, w_gate_up, plan, dtype), x[0].dtype
    gate_RF, up_RF = h_RH.chunk(2, -1)
    a_RF = F.silu(gate_RF) * up_RF * row_weights(weight_TK, plan.slot_R)[:, None]
    a = _by_rows(a_RF.where(live_rows(plan)[:, None], 0), kind, *(known or ()))
    y_RD = _rows(a, w_down, plan).to(dtype)
    return torch.ops.graphmoe.unpermute(y_RD, *plan, None), *_by_halves(h_RH, kind)


def hidden(
    x: Scaled, w_gate_up: Scaled, plan: Plan, dtype: torch.dtype, more: Sequence[Scaled] = ()
) -> Scaled:
    """h by blocks, as `forward` makes it."""
    (w_gate_up,) = joined((w_gate_up,), more)
    return _by_halves(_hidden(x, w_gate_up, plan, dtype), x[0].dtype)


def _hidden(x: Scaled, w_gate_up: Scaled, plan: Plan, dtype: torch.dtype) -> Tensor:
    (xq_TD, x_scale_T1), token_R = x, token_of_rows(plan)
    return _rows((xq_TD[token_R], x_scale_T1[token_R]), w_gate_up, plan).to(dtype).float()


def dgrad(
    dy: Scaled,
    h: Scaled,
    w_gate_up: Scaled,
    w_down: Scaled,
    weight_TK: Tensor,
    plan: Plan,
    dtype: torch.dtype,
    known_a: Tensor | None = None,
    known: Known | None = None,
    more: Sequence[Scaled] = (),
) -> tuple[Tensor, ...]:
    """dx_TD, dweight_TK, dh with its scales, the weighted activation with its; weights lie transposed.

    The scales of the activation and of dh may be ``known``.
    """
    w_gate_up, w_down = joined((w_gate_up, w_down), more)
    (dyq_TD, dy_scale_T1), token_R = dy, token_of_rows(plan)
    kind, weight_R = dyq_TD.dtype, row_weights(weight_TK, plan.slot_R)
    da_RF = _rows((dyq_TD[token_R], dy_scale_T1[token_R]), w_down, plan).to(dtype).float()
    dh_RH, a_RF, dweight_R = swiglu_gradients(da_RF, *block_halves(*h), weight_R)
    live_R1 = live_rows(plan)[:, None]
    dh = _by_rows(dh_RH.where(live_R1, 0), kind, *(known or ()))
    dx_RD = _rows(dh, w_gate_up, plan).to(dtype)
    a = _by_rows(a_RF.where(live_R1, 0), h[0].dtype, known_a)
    dx_TD = torch.ops.graphmoe.unpermute(dx_RD, *plan, None)
    return dx_TD, slot_values(dweight_R, plan.row_TK), *dh, *a


def wgrad(
    dy: Scaled, x: Scaled, dh: Scaled, a: Scaled, plan: Plan,
    totals: tuple[Tensor, Tensor] | None = None, *, add: bool = False, of_more: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dw_gate_up and dw_down in fp32, in ``totals`` where there are any, on top of them with ``add``.

    Those of further experts are stored in the two of ``of_more``, where such without rows may be left as they
    are.
    """
    token_R = token_of_rows(plan)
    (dyq_RD, dy_scale_R1), (xq_RD, x_scale_R1) = ([part[token_R] for part in of] for of in (dy, x))
    up = _weight_grad(dh[0], xq_RD, dh[1] * x_scale_R1, plan)
    down = _weight_grad(a[0], dyq_RD, a[1] * dy_scale_R1, plan).mT.contiguous()
    return into((up, down), totals, add=add, of_more=of_more)


def joined(weights: Sequence[Scaled], more: Sequence[Scaled]) -> Sequence[Scaled]:
    """Weights of experts with those of further ones behind them, if there are any."""
    if not more:
        return weights
    pairs = zip(weights, more, strict=True)
    return [(torch.cat([q, q_more]), torch.cat([s, s_more])) for (q, s), (q_more, s_more) in pairs]


def into(
    gradients: tuple[Tensor, Tensor],
    totals: tuple[Tensor, Tensor] | None,
    *,
    add: bool,
    of_more: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Store gradients in ``totals`` where there are any, or add to these; return the gradients.

    The last ones are stored in ``of_more``, if there are such, and not returned.
    """
    for gradient, more in zip(gradients, of_more, strict=False):
        more.copy_(gradient[-len(more) :])
    if of_more:
        gradients = gradients[0][: -len(of_more[0])], gradients[1][: -len(of_more[1])]
    for total, gradient in zip(totals or (), gradients, strict=False):
        total.copy_(total + gradient if add else gradient)
    return gradients


def block_halves(q_RH: Tensor, scale_RB: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up in fp32; blocks do not reach from one into the other."""
    pairs = zip(q_RH.chunk(2, -1), scale_RB.chunk(2, -1), strict=True)
    gate_RF, up_RF = (block_values(*pair) for pair in pairs)
    return gate_RF, up_RF


def _by_rows(
    x_RC: Tensor, kind: torch.dtype, scale: Tensor | None = None, largest: Tensor | None = None
) -> Scaled:
    if scale is None:
        return quantise(x_RC, kind)
    if largest is not None:
        largest.copy_(torch.maximum(largest, x_RC.abs().amax()))
    return saturated(x_RC, scale, kind), scale.expand(len(x_RC), 1).clone()


def _by_halves(h_RH: Tensor, kind: torch.dtype) -> Scaled:
    gate, up = (quantise_blocks(half, kind) for half in h_RH.chunk(2, -1))
    return torch.cat([gate[0], up[0]], -1), torch.cat([gate[1], up[1]], -1)


def swiglu_gradients(
    da_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dh [R, H], the activation silu(gate) * up * weight itself, and dweight [R]."""
    plain_RF = F.silu(gate_RF) * up_RF
    dweight_R = (da_RF * plain_RF).sum(-1)
    da_RF = da_RF * weight_R[:, None]
    sigmoid_RF = gate_RF.sigmoid()
    silu_RF = gate_RF * sigmoid_RF
    dgate_RF = da_RF * up_RF * (sigmoid_RF + silu_RF * (1 - sigmoid_RF))
    return torch.cat([dgate_RF, da_RF * silu_RF], -1), plain_RF * weight_R[:, None], dweight_R


def _rows(x: Scaled, w: Scaled, plan: Plan) -> Tensor:
    """w[e(r)] @ x[r] in fp32; zero in dead rows."""
    (q_RC, scale_R1), (w_ENC, scale_EN1) = x, w
    result = q_RC.new_zeros(len(q_RC), w_ENC.shape[1], dtype=torch.float32)
    for expert, rows in rows_of_experts(plan):
        sums = q_RC[rows].float() @ w_ENC[expert].float().t()
        result[rows] = sums * (scale_R1[rows] * scale_EN1[expert].t())
    return result


def _weight_grad(left_RM: Tensor, right_RN: Tensor, scale_R1: Tensor, plan: Plan) -> Tensor:
    """Sum of outer products of an expert's rows, the left ones with one scale for all of them."""
    result = left_RM.new_zeros(len(plan.ends_E), left_RM.shape[1], right_RN.shape[1], dtype=torch.float32)
    for expert, rows in rows_of_experts(plan):
        largest = scale_R1[rows].amax().clamp(min=SMALLEST)
        left = (left_RM[rows].float() * (scale_R1[rows] / largest)).to(left_RM.dtype)
        result[expert] = left.float().t() @ right_RN[rows].float() * largest
    return result


def rows_of_experts(plan: Plan) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and its rows."""
    start = 0
    for expert, end in enumerate(plan.ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def token_of_rows(plan: Plan) -> Tensor:
    """The token of each row; some token in dead rows."""
    most = max(plan.row_TK.numel() - 1, 0)
    return plan.slot_R.long().clamp(0, most) // plan.row_TK.shape[1]


def live_rows(plan: Plan) -> Tensor:
    return torch.arange(len(plan.slot_R), device=plan.slot_R.device) < plan.ends_E[-1]
