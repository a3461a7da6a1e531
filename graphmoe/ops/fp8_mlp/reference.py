"""Steps of the grouped MLP in an fp8 format (`MlpSteps`); their reference, which sums in fp32 by expert.

Suffixes as in the package.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.ops.fp8 import SMALLEST, Stored, block_values, fp8_dtype, quantise, quantise_blocks, saturated
from graphmoe.ops.fp8_blocks.reference import quantise_mx, turned, values
from graphmoe.ops.grouped_mlp.reference import Plan, row_weights, slot_values
from graphmoe.ops.swiglu import activation, activation_grad, with_bias

Parts = Sequence[tuple[int, slice]]  # experts that have rows, and their rows


class Known(NamedTuple):
    """A tensor's delayed scale [1], and its running maximum [1] for later scales, updated in place."""

    scale: Tensor
    largest: Tensor


class Activation(NamedTuple):
    """What `ops.swiglu` adds to h [E, H], and its limit."""

    b_gate_up: Tensor | None = None
    limit: float = 0.0


PLAIN = Activation()


class MlpSteps(NamedTuple):
    """Functions of the experts' MLP that differ between fp8 formats, and between kernels and reference.

    ``more``: quantized replica weights, whose rows follow those of own experts.
    """

    # (plan, number of own experts) -> rows of own experts and of replicas, per GEMM
    parts: Callable[[Plan, int], Any]
    # (x, weights, out, plan, parts, gathers): out[r] = w[e(r)] @ x[r]; gathers: x is [T, C], not [R, C]
    product: Callable[..., None]
    # (x, h_RH, weight_TK, plan, known, act) -> saved h without bias, and with weights the weighted activation
    swiglu: Callable[..., tuple[Stored, Any]]
    # (dy, da_RF, h, weight_TK, plan, known_a, known, act) -> dh, the weighted activation, dweight_TK
    swiglu_grad: Callable[..., tuple[Stored, Stored, Tensor]]
    # (dy, x, dh, a, plan, totals, add, of_more): dw_gate_up and dw_down are written or added to totals, fp32;
    # those of replicas are written to of_more, except for replicas without rows
    wgrad: Callable[..., None]

    def forward(
        self, x: Stored, w_gate_up: Stored, w_down: Stored, weight_TK: Tensor, plan: Plan,
        dtype: torch.dtype, known: Known | None = None, more: Sequence[Stored] = (),
        act: Activation = PLAIN,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return y_TD, and values and scales of h, to save. ``known``: delayed scale of the activation."""
        parts = self.parts(plan, len(w_down[0]))
        y_RD = x[0].new_empty(len(plan.slot_R), w_down[0].shape[1], dtype=dtype)
        h, a = self._hidden(x, (w_gate_up, *more[:1]), weight_TK, plan, dtype, known, parts, act)
        self.product(a, (w_down, *more[1:]), y_RD, plan, parts)
        return torch.ops.graphmoe.unpermute(y_RD, *plan, None), *h

    def hidden(
        self, x: Stored, w_gate_up: Stored, plan: Plan, dtype: torch.dtype, more: Sequence[Stored] = ()
    ) -> Stored:
        parts = self.parts(plan, len(w_gate_up[0]))
        return self._hidden(x, (w_gate_up, *more), None, plan, dtype, None, parts)[0]

    def _hidden(
        self, x: Stored, weights: Sequence[Stored], weight_TK: Tensor | None, plan: Plan,
        dtype: torch.dtype, known: Known | None, parts: Any, act: Activation = PLAIN,
    ) -> tuple[Stored, Any]:  # fmt: skip
        h_RH = x[0].new_empty(len(plan.slot_R), weights[0][0].shape[1], dtype=dtype)
        self.product(x, weights, h_RH, plan, parts, gathers=True)
        return self.swiglu(x, h_RH, weight_TK, plan, known, act)

    def dgrad(
        self, dy: Stored, h: Stored, w_gate_up: Stored, w_down: Stored, weight_TK: Tensor, plan: Plan,
        dtype: torch.dtype, known_a: Tensor | None = None, known: Known | None = None,
        more: Sequence[Stored] = (), act: Activation = PLAIN,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dx_TD, dweight_TK, quantized dh and weighted activation, from transposed weights.

        ``known_a`` and ``known``: delayed scales of the activation and of dh.
        """
        parts, R = self.parts(plan, len(w_down[0])), len(plan.slot_R)
        da_RF, dx_RD = (h[0].new_empty(R, w[0].shape[1], dtype=dtype) for w in (w_down, w_gate_up))
        self.product(dy, (w_down, *more[1:]), da_RF, plan, parts, gathers=True)
        dh, a, dweight_TK = self.swiglu_grad(dy, da_RF, h, weight_TK, plan, known_a, known, act)
        self.product(dh, (w_gate_up, *more[:1]), dx_RD, plan, parts)
        return torch.ops.graphmoe.unpermute(dx_RD, *plan, None), dweight_TK, *dh, *a


class Rounding(NamedTuple):
    """Functions of an fp8 format by which the reference quantizes and multiplies."""

    # quantizes live rows [R, C] to a dtype, by a scale if one is known; see _by_rows
    rows: Callable[..., Stored]
    hidden: Callable[[Tensor, torch.dtype], Stored]
    halves: Callable[[Stored], Sequence[Tensor]]  # gate and up in fp32 of what hidden has quantized
    product: Callable[[Stored, Stored], Tensor]  # GEMM in fp32 of rows with the weight of an expert
    # in fp32, of dy, x, dh, a, the rows of each expert, and the number of experts
    wgrads: Callable[[Stored, Stored, Stored, Stored, Parts, int], tuple[Tensor, Tensor]]


def rows(w: Tensor, *, whole: bool = False) -> Stored:
    q, scale = quantise(w, fp8_dtype(), whole=whole)
    return q.contiguous(), scale.contiguous()


def columns(w_ENC: Tensor, *, whole: bool = False) -> Stored:
    return rows(w_ENC.mT, whole=whole)


def _steps(by: Rounding) -> MlpSteps:
    return MlpSteps(
        lambda plan, _: [*rows_of_experts(plan)],
        functools.partial(_product, by),
        functools.partial(_swiglu, by),
        functools.partial(_swiglu_grad, by),
        functools.partial(_wgrad, by),
    )


def _product(
    by: Rounding, x: Stored, weights: Sequence[Stored], out: Tensor, plan: Plan, parts: Parts,
    *, gathers: bool = False,
) -> None:  # fmt: skip
    q, scale = _of_rows(x, plan) if gathers else x
    w_q, w_scale = weights[0] if len(weights) == 1 else map(torch.cat, zip(*weights, strict=True))
    out.zero_()
    for expert, rows in parts:
        out[rows] = by.product((q[rows], scale[rows]), (w_q[expert], w_scale[expert]))


def _swiglu(
    by: Rounding, x: Stored, h_RH: Tensor, weight_TK: Tensor | None, plan: Plan, known: Known | None,
    act: Activation,
) -> tuple[Stored, Stored | None]:  # fmt: skip
    h_RH, kind = h_RH.float(), x[0].dtype
    if weight_TK is None:
        return by.hidden(h_RH, kind), None
    of_rows = with_bias(h_RH, act.b_gate_up, plan.ends_E), row_weights(weight_TK, plan.slot_R)
    a_RF = activation(*of_rows, act.limit)
    return by.hidden(h_RH, kind), by.rows(a_RF.where(_is_live(plan), 0), kind, *(known or ()))


def _swiglu_grad(
    by: Rounding, dy: Stored, da_RF: Tensor, h: Stored, weight_TK: Tensor, plan: Plan,
    known_a: Tensor | None, known: Known | None, act: Activation,
) -> tuple[Stored, Stored, Tensor]:  # fmt: skip
    h_RH = with_bias(torch.cat([*by.halves(h)], -1), act.b_gate_up, plan.ends_E)
    given = h_RH, row_weights(weight_TK, plan.slot_R), act.limit
    dh_RH, dweight_R = activation_grad(da_RF, *given)
    dh = by.rows(dh_RH.where(_is_live(plan), 0), dy[0].dtype, *(known or ()))
    a = by.rows(activation(*given).where(_is_live(plan), 0), h[0].dtype, known_a)
    return dh, a, slot_values(dweight_R, plan.row_TK)


def _wgrad(
    by: Rounding, dy: Stored, x: Stored, dh: Stored, a: Stored, plan: Plan,
    totals: tuple[Tensor, Tensor], *, add: bool = False, of_more: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    parts, E = [*rows_of_experts(plan)], len(plan.ends_E)
    gradients = by.wgrads(_of_rows(dy, plan), _of_rows(x, plan), dh, a, parts, E)
    for gradient, more in zip(gradients, of_more, strict=False):
        more.copy_(gradient[-len(more) :])
    for total, gradient in zip(totals, gradients, strict=True):
        own = gradient[: len(total)]
        total.copy_(total + own if add else own)


def _outer(
    left_RM: Stored, right_RN: Stored, of: Callable[[Stored, Stored], Tensor], parts: Parts, E: int
) -> Tensor:
    result = left_RM[0].new_zeros(E, left_RM[0].shape[1], right_RN[0].shape[1], dtype=torch.float32)
    for expert, rows in parts:
        left, right = ((q[rows], scale[rows]) for q, scale in (left_RM, right_RN))
        result[expert] = of(left, right)
    return result


def _outer_by_rows(left: Stored, right: Stored) -> Tensor:
    scale_R1 = left[1] * right[1]
    largest = scale_R1.amax().clamp(min=SMALLEST)
    factored = (left[0].float() * (scale_R1 / largest)).to(left[0].dtype)
    return factored.float().t() @ right[0].float() * largest


def _outer_by_blocks(left: Stored, right: Stored) -> Tensor:
    return values(*turned(*left)) @ values(*turned(*right)).t()


def _wgrads_by_rows(
    dy: Stored, x: Stored, dh: Stored, a: Stored, parts: Parts, E: int
) -> tuple[Tensor, Tensor]:
    down = _outer(a, dy, _outer_by_rows, parts, E).mT.contiguous()
    return _outer(dh, x, _outer_by_rows, parts, E), down


def _wgrads_by_blocks(
    dy: Stored, x: Stored, dh: Stored, a: Stored, parts: Parts, E: int
) -> tuple[Tensor, Tensor]:
    return _outer(dh, x, _outer_by_blocks, parts, E), _outer(dy, a, _outer_by_blocks, parts, E)


def _by_rows(
    x_RC: Tensor, kind: torch.dtype, scale: Tensor | None = None, largest: Tensor | None = None
) -> Stored:
    if scale is None:
        return quantise(x_RC, kind)
    if largest is not None:
        largest.copy_(torch.maximum(largest, x_RC.abs().amax()))
    return saturated(x_RC, scale, kind), scale.expand(len(x_RC), 1).clone()


def _by_halves(h_RH: Tensor, kind: torch.dtype) -> Stored:
    gate, up = (quantise_blocks(half, kind) for half in h_RH.chunk(2, -1))
    return torch.cat([gate[0], up[0]], -1), torch.cat([gate[1], up[1]], -1)


def block_halves(h: Stored) -> list[Tensor]:
    pairs = zip(h[0].chunk(2, -1), h[1].chunk(2, -1), strict=True)
    return [block_values(*pair) for pair in pairs]


def rows_of_experts(plan: Plan) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(plan.ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _of_rows(x: Stored, plan: Plan) -> Stored:
    most = max(plan.row_TK.numel() - 1, 0)
    token_R = plan.slot_R.long().clamp(0, most) // plan.row_TK.shape[1]
    return x[0][token_R], x[1][token_R]


def _is_live(plan: Plan) -> Tensor:
    return (torch.arange(len(plan.slot_R), device=plan.slot_R.device) < plan.ends_E[-1])[:, None]


BY_ROWS = _steps(
    Rounding(
        _by_rows,
        _by_halves,
        block_halves,
        lambda x, w: x[0].float() @ w[0].float().t() * (x[1] * w[1].t()),
        _wgrads_by_rows,
    )
)
BY_BLOCKS = _steps(
    Rounding(
        lambda x_RC, *_: quantise_mx(x_RC),
        lambda h_RH, _: quantise_mx(h_RH),
        lambda h: values(*h).chunk(2, -1),
        lambda x, w: values(*x) @ values(*w).t(),
        _wgrads_by_blocks,
    )
)
