"""The experts as one operation whose weight gradients are summed in the optimizer's fp32 tensors.

For a backward that no graph holds: compiled units do so by their graphs (`runtime.compile.code`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphmoe.ops.gradients import Gradient, have_begun, report_added


def grouped_mlp_into(totals: Sequence[Gradient], backend: str, *arguments: Tensor) -> Tensor:
    """Run ``graphmoe::grouped_mlp``; its backward adds the gradients of its two weights to ``totals``.

    ``totals`` are those of ``w_gate_up`` and ``w_down``; autograd gets none for them.
    """
    return _Delivering.apply(totals, backend, *arguments)


class _Delivering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, totals: Sequence[Gradient], backend: str, *arguments: Tensor) -> Tensor:
        y_TD, h_RH = torch.ops.graphmoe.grouped_mlp(*arguments, backend)
        ctx.save_for_backward(*arguments, h_RH)
        ctx.totals, ctx.backend = totals, backend
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, w_gate_up, w_down, weight_TK, *plan, h_RH = ctx.saved_tensors
        dy_TD = dy_TD.contiguous()
        dx_TD, dweight_TK, dh_RH, a_RF = torch.ops.graphmoe.grouped_mlp_dgrad(
            dy_TD, h_RH, w_gate_up, w_down, weight_TK, *plan, ctx.backend
        )
        totals = [gradient.total for gradient in ctx.totals]
        add = have_begun(ctx.totals)
        torch.ops.graphmoe.grouped_mlp_wgrad_into(dy_TD, x_TD, dh_RH, a_RF, *plan, *totals, ctx.backend, add)
        report_added(ctx.totals)
        return None, None, dx_TD, None, None, dweight_TK, None, None, None
