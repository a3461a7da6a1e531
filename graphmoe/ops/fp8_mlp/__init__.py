"""Routed experts of a layer in fp8: `ops.grouped_mlp` on quantized values with scales.

Suffixes: T tokens, K choices, E experts, R rows, D hidden, F expert width, H = 2F, B blocks of the columns of
H; q are quantized values, s their scales. ``recipe`` is a key of `ops.formats.KERNELS`.

A token is quantized once, before its rows are gathered. h (gate and up) has one scale per block, computed in
a tile of the GEMM. The activation and row gradients have one per row, or a delayed scale. Formats with block
scales quantize them by blocks; for wgrad they requantize both operands along each expert's rows, zero-padded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphmoe.config.formats import FORMATS
from graphmoe.ops import register_gradient
from graphmoe.ops.formats import KERNELS
from graphmoe.ops.fp8 import GRADIENT, INPUT, Stored, fp8_dtype, rounded
from graphmoe.ops.fp8_mlp import launches, reference
from graphmoe.ops.fp8_mlp.reference import Activation, Known, MlpSteps
from graphmoe.ops.grouped_mlp import weight_shapes
from graphmoe.ops.grouped_mlp.reference import Plan
from graphmoe.ops.symm.peers import exchange_of

DTYPE = torch.float32  # of scales, slot weights and sums


def _rounding(w: Tensor) -> Any:
    return launches if w.is_cuda else reference


def _steps(x: Tensor, recipe: str) -> MlpSteps:
    of_device = KERNELS[recipe].experts
    assert of_device is not None, FORMATS[recipe].why_no_experts
    return of_device(x.is_cuda)


def _known(scale: Tensor | None, largest: Tensor | None) -> Known | None:
    return None if scale is None or largest is None else Known(scale, largest.clone())


def _pulled(expert_RS: Tensor | None, *weights: Tensor) -> list[Stored]:
    parts = [] if expert_RS is None else exchange_of(len(expert_RS)).pull(weights, expert_RS)
    return [*zip(parts[::2], parts[1::2], strict=True)]


def _largest(known: Known | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=DTYPE) if known is None else known.largest


@torch.library.custom_op("graphmoe::fp8_rows", mutates_args=())
def rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize w [..., N, C] by rows -> q, contiguous, scales [..., N, 1]. No device sync."""
    return _rounding(w).rows(w)


@torch.library.custom_op("graphmoe::fp8_columns", mutates_args=())
def columns(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize w [..., N, C] by columns, transpose -> q [..., C, N], scales [..., C, 1]. No device sync."""
    return _columns(w, whole=False)


@torch.library.custom_op("graphmoe::fp8_whole_rows", mutates_args=())
def whole_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize w [..., N, C] with one scale per matrix -> q, contiguous, scales [..., N, 1]. No sync."""
    return _rounding(w).rows(w, whole=True)


@torch.library.custom_op("graphmoe::fp8_whole_columns", mutates_args=())
def whole_columns(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize w [..., N, C], one scale a matrix; return q transposed [..., C, N], scale [..., C, 1]."""
    return _columns(w, whole=True)


def _columns(w: Tensor, *, whole: bool) -> Stored:
    q, scale = _rounding(w).columns(w if w.dim() == 3 else w[None], whole=whole)
    return (q, scale) if w.dim() == 3 else (q[0], scale[0])


@torch.library.custom_op("graphmoe::fp8_mlp_forward", mutates_args=())
def _forward(
    xq_TD: Tensor, xs_T1: Tensor, gate_up_q: Tensor, gate_up_s: Tensor, down_q: Tensor, down_s: Tensor,
    weight_TK: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor,
    dtype: torch.dtype, recipe: str, known_a: Tensor | None = None, largest_a: Tensor | None = None,
    expert_RS: Tensor | None = None, b_gate_up: Tensor | None = None, limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return y [T, D], and h saved for the backward: hq [R, H], hs [R, B]. `rows` quantized the weights.

    ``b_gate_up`` and ``limit`` as in ``graphmoe::grouped_mlp``: h is saved without biases.

    The last result is the running maximum [1] of the activation if it has a delayed scale, else empty.
    """
    plan, known = Plan(slot_R, row_TK, ends_E), _known(known_a, largest_a)
    x, gate_up, down = (xq_TD, xs_T1), (gate_up_q, gate_up_s), (down_q, down_s)
    more = _pulled(expert_RS, *gate_up, *down)
    act = Activation(b_gate_up, limit)
    made = _steps(xq_TD, recipe).forward(x, gate_up, down, weight_TK, plan, dtype, known, more, act)
    return *made, _largest(known, xs_T1)


@torch.library.custom_op("graphmoe::fp8_mlp_hidden", mutates_args=())
def _hidden(
    xq_TD: Tensor, xs_T1: Tensor, gate_up_q: Tensor, gate_up_s: Tensor,
    slot_R: Tensor, row_TK: Tensor, ends_E: Tensor,
    dtype: torch.dtype, recipe: str, expert_RS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    plan, more = Plan(slot_R, row_TK, ends_E), _pulled(expert_RS, gate_up_q, gate_up_s)
    return _steps(xq_TD, recipe).hidden((xq_TD, xs_T1), (gate_up_q, gate_up_s), plan, dtype, more)


@torch.library.custom_op("graphmoe::fp8_mlp_dgrad", mutates_args=())
def _dgrad(
    dyq_TD: Tensor, dys_T1: Tensor, hq_RH: Tensor, hs_RB: Tensor,
    gate_up_q: Tensor, gate_up_s: Tensor, down_q: Tensor, down_s: Tensor,
    weight_TK: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor,
    dtype: torch.dtype, recipe: str,
    known_a: Tensor | None = None, known_dh: Tensor | None = None, largest_dh: Tensor | None = None,
    expert_RS: Tensor | None = None, b_gate_up: Tensor | None = None, limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx [T, D], dweight [T, K], then dh [R, H] and the activation [R, F], each as q and scales.

    `columns` quantized the weights. Last result: dh's running maximum [1] if its scale is delayed, else [0].
    """
    plan, known = Plan(slot_R, row_TK, ends_E), _known(known_dh, largest_dh)
    dy, h, gate_up, down = (dyq_TD, dys_T1), (hq_RH, hs_RB), (gate_up_q, gate_up_s), (down_q, down_s)
    how = plan, dtype, known_a, known, _pulled(expert_RS, *gate_up, *down), Activation(b_gate_up, limit)
    made = _steps(dyq_TD, recipe).dgrad(dy, h, gate_up, down, weight_TK, *how)
    return *made, _largest(known, dys_T1)


@torch.library.custom_op("graphmoe::fp8_mlp_wgrad", mutates_args=())
def _wgrad(
    dyq_TD: Tensor, dys_T1: Tensor, xq_TD: Tensor, xs_T1: Tensor, dhq_RH: Tensor, dhs_R1: Tensor,
    aq_RF: Tensor, as_R1: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor,
    recipe: str, expert_RS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dw_gate_up [E, H, D], dw_down [E, D, F] in fp32; exactly zero for experts without rows."""
    sizes = weight_shapes(xq_TD, dhq_RH, aq_RF, ends_E, expert_RS)
    up, down = (dys_T1.new_empty(size, dtype=DTYPE) for size in sizes)
    sides = (dyq_TD, dys_T1), (xq_TD, xs_T1), (dhq_RH, dhs_R1), (aq_RF, as_R1)
    plan = Plan(slot_R, row_TK, ends_E)
    _store_gradients(sides, plan, (up, down), recipe, False, expert_RS, may_defer=False)
    return up, down


@torch.library.custom_op("graphmoe::fp8_mlp_wgrad_into", mutates_args=("of_gate_up", "of_down"))
def _wgrad_into(
    dyq_TD: Tensor, dys_T1: Tensor, xq_TD: Tensor, xs_T1: Tensor, dhq_RH: Tensor, dhs_R1: Tensor,
    aq_RF: Tensor, as_R1: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor,
    of_gate_up: Tensor, of_down: Tensor,
    recipe: str, add: bool, expert_RS: Tensor | None = None,
) -> None:  # fmt: skip
    sides = (dyq_TD, dys_T1), (xq_TD, xs_T1), (dhq_RH, dhs_R1), (aq_RF, as_R1)
    totals = of_gate_up, of_down
    _store_gradients(sides, Plan(slot_R, row_TK, ends_E), totals, recipe, add, expert_RS, may_defer=True)


def _store_gradients(
    sides: Sequence[tuple[Tensor, Tensor]], plan: Plan, totals: tuple[Tensor, Tensor], recipe: str,
    add: bool, expert_RS: Tensor | None, *, may_defer: bool,
) -> None:  # fmt: skip
    wgrad = _steps(sides[0][0], recipe).wgrad
    if expert_RS is None:
        wgrad(*sides, plan, totals, add=add)
        return
    exchange = exchange_of(len(expert_RS))
    with exchange.slot_gradients(totals, expert_RS, DTYPE, may_defer=may_defer) as made:
        wgrad(*sides, plan, totals, add=add, of_more=made)


def _stored_tokens(x_TD: Tensor, w: Tensor, side: str, recipe: str, carries: bool) -> Stored:
    if carries:
        return torch.ops.graphmoe.fp8_arrived(x_TD)
    q, scale = KERNELS[recipe].quantize(x_TD, w, side)
    return q, scale.expand(len(x_TD), 1).contiguous() if FORMATS[recipe].is_delayed else scale


def mlp(
    *layer: Tensor, recipe: str, carries: bool = False, biased: bool = False, limit: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y [T, D]; to save: hq [R, H], hs [R, B]. With ``carries`` x is an fp8 carrier (`ops.symm`).

    ``layer``: the arguments of ``graphmoe::fp8_mlp``, then expert_RS if any, or if ``biased`` b_gate_up.
    """
    x_TD, w_gate_up, w_down, *rest = layer
    ops, by = torch.ops.graphmoe, KERNELS[recipe]
    x = _stored_tokens(x_TD, w_gate_up, INPUT, recipe, carries)
    known = getattr(ops, INPUT)(w_down) if FORMATS[recipe].is_delayed else (None, None)
    weights = *by.weight(w_gate_up), *by.weight(w_down)
    how = x_TD.dtype, recipe, *known
    last = *_expert_RS_and_bias(rest[4:], biased), limit
    y_TD, hq_RH, hs_RB, _ = ops.fp8_mlp_forward(*x, *weights, *rest[:4], *how, *last)
    return y_TD, hq_RH, hs_RB


def mlp_gradients(
    dy_TD: Tensor, hq_RH: Tensor, hs_RB: Tensor, *layer: Tensor, recipe: str, carries: bool = False,
    biased: bool = False, limit: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return gradients of x, both weights, routing weights and b_gate_up, which is [0] unless ``biased``.

    With ``carries`` x and dy are fp8 carriers; ``layer`` as in `mlp`.
    """
    x_TD, w_gate_up, w_down, weight_TK, *plan = layer
    plan, (expert_RS, b_gate_up) = plan[:3], _expert_RS_and_bias(plan[3:], biased)
    ops, by, dtype = torch.ops.graphmoe, KERNELS[recipe], x_TD.dtype
    dy = _stored_tokens(dy_TD, w_down, GRADIENT, recipe, carries)
    known = (None,) * 3
    if FORMATS[recipe].is_delayed:
        known = (getattr(ops, INPUT)(w_down)[0], *getattr(ops, GRADIENT)(w_gate_up))
    weights = *by.transposed(w_gate_up), *by.transposed(w_down)
    dx_TD, dweight_TK, *made, _ = ops.fp8_mlp_dgrad(
        *dy, hq_RH, hs_RB, *weights, weight_TK, *plan, dtype, recipe, *known, expert_RS, b_gate_up, limit
    )
    x = _stored_tokens(x_TD, w_gate_up, INPUT, recipe, carries)
    dw_gate_up, dw_down = ops.fp8_mlp_wgrad(*dy, *x, *made, *plan, recipe, expert_RS)
    db_gate_up = dx_TD.new_empty(0)
    if b_gate_up is not None:
        db_gate_up = rounded(ops.expert_sums(made[0], plan[2], made[1]), b_gate_up.dtype)
    return dx_TD, rounded(dw_gate_up, dtype), rounded(dw_down, dtype), dweight_TK, db_gate_up


def _expert_RS_and_bias(rest: Sequence[Tensor], biased: bool) -> tuple[Tensor | None, Tensor | None]:
    last = rest[0] if rest else None
    return (None, last) if biased else (last, None)


@torch.library.custom_op("graphmoe::fp8_mlp", mutates_args=())
def _whole(
    x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, weight_TK: Tensor, slot_R: Tensor, row_TK: Tensor,
    ends_E: Tensor, recipe: str, expert_RS: Tensor | None = None, b_gate_up: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return y [T, D] of ``graphmoe::grouped_mlp`` with fp8 GEMMs. The pass fp8_quantise expands this op."""
    layer = x_TD, w_gate_up, w_down, weight_TK, slot_R, row_TK, ends_E, *_if_any(expert_RS, b_gate_up)
    return mlp(*layer, recipe=recipe, biased=b_gate_up is not None, limit=limit)[0]


@torch.library.custom_op("graphmoe::fp8_mlp_grad", mutates_args=())
def _grad(
    dy_TD: Tensor, x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, weight_TK: Tensor, slot_R: Tensor,
    row_TK: Tensor, ends_E: Tensor, recipe: str, expert_RS: Tensor | None = None,
    b_gate_up: Tensor | None = None, limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    layer = x_TD, w_gate_up, w_down, weight_TK, slot_R, row_TK, ends_E, *_if_any(expert_RS, b_gate_up)
    words: dict[str, Any] = {"recipe": recipe, "biased": b_gate_up is not None, "limit": limit}
    return mlp_gradients(dy_TD, *mlp(*layer, **words)[1:], *layer, **words)  # type: ignore[return-value]


def _if_any(expert_RS: Tensor | None, b_gate_up: Tensor | None) -> tuple[Tensor, ...]:
    assert expert_RS is None or b_gate_up is None, "biases of replicas are not fetched"
    return tuple(each for each in (expert_RS, b_gate_up) if each is not None)


for _of_rows in (rows, whole_rows):
    _of_rows.register_fake(
        lambda w: (w.new_empty(w.shape, dtype=fp8_dtype()), w.new_empty(*w.shape[:-1], 1, dtype=DTYPE))
    )


@columns.register_fake
@whole_columns.register_fake
def _(w: Tensor) -> tuple[Tensor, Tensor]:
    *E, N, C = w.shape
    return w.new_empty(*E, C, N, dtype=fp8_dtype()), w.new_empty(*E, C, 1, dtype=DTYPE)


@_hidden.register_fake
def _of_h(xq_TD: Tensor, xs_T1: Tensor, gate_up_q: Tensor, _: Tensor, slot_R: Tensor, *rest: Any) -> Any:
    R, H = slot_R.shape[0], gate_up_q.shape[1]
    blocks = 2 * -(-(H // 2) // FORMATS[rest[3]].hidden_block)
    return xq_TD.new_empty(R, H), xs_T1.new_empty(R, blocks)


@_forward.register_fake
def _(*layer: Any) -> tuple[Tensor, ...]:
    xq_TD, *rest = layer
    h, largest = _of_h(xq_TD, *rest[:3], rest[6], *rest[7:11]), _of_largest(rest[0], rest, 12)
    return xq_TD.new_empty(xq_TD.shape, dtype=rest[9]), *h, largest


@_dgrad.register_fake
def _(dyq_TD: Tensor, dys_T1: Tensor, hq_RH: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    (R, H), weight_TK, dtype, block = hq_RH.shape, rest[5], rest[9], FORMATS[rest[10]].block
    dx_TD, dweight_TK = dyq_TD.new_empty(dyq_TD.shape, dtype=dtype), weight_TK.new_empty(weight_TK.shape)
    of_dh, of_a = (H // block, H // 2 // block) if block else (1, 1)
    dh = dyq_TD.new_empty(R, H), dys_T1.new_empty(R, of_dh)
    a = hq_RH.new_empty(R, H // 2), dys_T1.new_empty(R, of_a)
    return dx_TD, dweight_TK, *dh, *a, _of_largest(dys_T1, rest, 13)


def _of_largest(like: Tensor, rest: Sequence[Any], place: int) -> Tensor:
    return like.new_empty(0 if len(rest) <= place or rest[place] is None else 1, dtype=DTYPE)


@_wgrad.register_fake
def _(dyq_TD: Tensor, dys_T1: Tensor, xq_TD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _, dhq_RH, _, aq_RF, *_, ends_E, _, expert_RS = (*rest, None)[:10]
    up, down = weight_shapes(xq_TD, dhq_RH, aq_RF, ends_E, expert_RS)
    return dys_T1.new_empty(up, dtype=DTYPE), dys_T1.new_empty(down, dtype=DTYPE)


_whole.register_fake(lambda x_TD, *_: x_TD.new_empty(x_TD.shape))


@_grad.register_fake
def _(dy_TD: Tensor, *layer: Any) -> tuple[Tensor, ...]:
    b_gate_up = (*layer, None, None)[9]
    db_gate_up = dy_TD.new_empty(0) if b_gate_up is None else b_gate_up.new_empty(b_gate_up.shape)
    return *(each.new_empty(each.shape) for each in layer[:4]), db_gate_up


def _backward(dy_TD: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    *layer, expert_RS, b_gate_up, recipe, limit = saved
    grad = torch.ops.graphmoe.fp8_mlp_grad
    *found, db_gate_up = grad(dy_TD.contiguous(), *layer, recipe, expert_RS, b_gate_up, limit)
    return *found, *[None] * 5, None if b_gate_up is None else db_gate_up


register_gradient(_whole, _backward)
