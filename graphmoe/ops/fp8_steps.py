"""Routed experts in fp8, built from the `MlpSteps` of a format on a device; suffixes as in `ops.fp8_mlp`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.ops.fp8 import Stored
from graphmoe.ops.grouped_mlp.reference import Plan


class Known(NamedTuple):
    """A delayed scale [1], and the running maximum [1] for later scales, updated in place."""

    scale: Tensor
    largest: Tensor


class MlpSteps(NamedTuple):
    """Functions of the experts' MLP that differ between fp8 formats, and between kernels and reference.

    ``more``: quantized replica weights, whose rows follow those of own experts.
    """

    # (plan, number of own experts) -> rows of own experts and of replicas, per GEMM
    parts: Callable[[Plan, int], Any]
    # (x, weights, out, plan, parts, gathers): out[r] = w[e(r)] @ x[r]; gathers: x is [T, C], not [R, C]
    product: Callable[..., None]
    # (x, h_RH, weight_TK, plan, known) -> saved h, and with weights the weighted activation
    swiglu: Callable[..., tuple[Stored, Any]]
    # (dy, da_RF, h, weight_TK, plan, known_a, known) -> dh, the weighted activation, dweight_TK
    swiglu_grad: Callable[..., tuple[Stored, Stored, Tensor]]
    # (dy, x, dh, a, plan, totals, add, of_more) -> dw_gate_up and dw_down in fp32, written or added to totals
    # if given; those of replicas are written to of_more, except for replicas without rows
    wgrad: Callable[..., tuple[Tensor, Tensor]]

    def forward(
        self, x: Stored, w_gate_up: Stored, w_down: Stored, weight_TK: Tensor, plan: Plan,
        dtype: torch.dtype, known: Known | None = None, more: Sequence[Stored] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return y_TD, and h to save: values and scales. ``known``: delayed scale of the activation."""
        parts = self.parts(plan, len(w_down[0]))
        y_RD = x[0].new_empty(len(plan.slot_R), w_down[0].shape[1], dtype=dtype)
        h, a = self._hidden(x, (w_gate_up, *more[:1]), weight_TK, plan, dtype, known, parts)
        self.product(a, (w_down, *more[1:]), y_RD, plan, parts)
        return torch.ops.graphmoe.unpermute(y_RD, *plan, None), *h

    def hidden(
        self, x: Stored, w_gate_up: Stored, plan: Plan, dtype: torch.dtype, more: Sequence[Stored] = ()
    ) -> Stored:
        parts = self.parts(plan, len(w_gate_up[0]))
        return self._hidden(x, (w_gate_up, *more), None, plan, dtype, None, parts)[0]

    def _hidden(
        self, x: Stored, weights: Sequence[Stored], weight_TK: Tensor | None, plan: Plan,
        dtype: torch.dtype, known: Known | None, parts: Any,
    ) -> tuple[Stored, Any]:  # fmt: skip
        h_RH = x[0].new_empty(len(plan.slot_R), weights[0][0].shape[1], dtype=dtype)
        self.product(x, weights, h_RH, plan, parts, gathers=True)
        return self.swiglu(x, h_RH, weight_TK, plan, known)

    def dgrad(
        self, dy: Stored, h: Stored, w_gate_up: Stored, w_down: Stored, weight_TK: Tensor, plan: Plan,
        dtype: torch.dtype, known_a: Tensor | None = None, known: Known | None = None,
        more: Sequence[Stored] = (),
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dx_TD, dweight_TK, quantized dh and weighted activation. Weights are transposed.

        ``known_a`` and ``known``: delayed scales of the activation and of dh.
        """
        parts, R = self.parts(plan, len(w_down[0])), len(plan.slot_R)
        da_RF, dx_RD = (h[0].new_empty(R, w[0].shape[1], dtype=dtype) for w in (w_down, w_gate_up))
        self.product(dy, (w_down, *more[1:]), da_RF, plan, parts, gathers=True)
        dh, a, dweight_TK = self.swiglu_grad(dy, da_RF, h, weight_TK, plan, known_a, known)
        self.product(dh, (w_gate_up, *more[:1]), dx_RD, plan, parts)
        return torch.ops.graphmoe.unpermute(dx_RD, *plan, None), dweight_TK, *dh, *a
