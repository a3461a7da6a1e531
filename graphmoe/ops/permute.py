"""Routing plan and row movement: tokens to expert order and back, in plain PyTorch.

Suffixes: T tokens, K slots (top-k choices of a token), E experts, R routed rows (T * K), D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class RoutingPlan(NamedTuple):
    """Where each (token, slot) goes; int32 tensors on the device, nothing is known to the host."""

    expert_TK: Tensor
    """Expert of each (token, slot)."""
    counts_E: Tensor
    """Rows of each expert."""
    ends_E: Tensor
    """Inclusive prefix sum of the counts: the end row of each expert."""
    row_TK: Tensor
    """Row of each (token, slot) in expert order."""
    slot_R: Tensor
    """Inverse of row_TK: token * K + slot of each row."""
    live_rows: Tensor
    """Number of live rows, shape [1]."""


def routing_plan(expert_TK: Tensor, num_experts: int) -> RoutingPlan:
    """Plan that orders (token, slot) pairs by expert, and by token within an expert. No sync."""
    expert_R = expert_TK.reshape(-1)
    ones_R = torch.ones_like(expert_R)
    counts_E = expert_R.new_zeros(num_experts).scatter_add_(0, expert_R.long(), ones_R)
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    slot_R = expert_R.argsort(stable=True)
    rows_R = torch.arange(len(expert_R), device=expert_R.device, dtype=torch.int32)
    row_TK = torch.empty_like(expert_R).scatter_(0, slot_R, rows_R).view_as(expert_TK)
    return RoutingPlan(expert_TK, counts_E, ends_E, row_TK, slot_R.int(), ends_E[-1:])


def permute(x_TD: Tensor, slot_R: Tensor, row_TK: Tensor) -> Tensor:
    """Gather the token of each routed row -> [R, D]. No device sync.

    The gradient is `unpermute`, which sums in a fixed order; that of plain indexing adds rows with
    atomics on several CPU threads, so that two runs differ.
    """
    return _Permute.apply(x_TD, slot_R, row_TK)


def unpermute(y_RD: Tensor, slot_R: Tensor, row_TK: Tensor) -> Tensor:
    """Sum the K rows of each token -> [T, D]. No device sync; the gradient is `permute`.

    The order of a sum is fixed and depends on slots only, not on experts; bf16 rows are added in fp32.
    """
    return _Unpermute.apply(y_RD, slot_R, row_TK)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(x_TD: Tensor, slot_R: Tensor, row_TK: Tensor) -> Tensor:
        return x_TD[slot_R // row_TK.shape[1]]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None, None]:
        return unpermute(dy_RD, *ctx.saved_tensors), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(y_RD: Tensor, slot_R: Tensor, row_TK: Tensor) -> Tensor:
        return y_RD[row_TK].sum(dim=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor, None, None]:
        return permute(dx_TD, *ctx.saved_tensors), None, None
