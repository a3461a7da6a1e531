"""Routing plan, permute (tokens to rows in expert order) and unpermute (sum of a token's rows).

A slot is a (token, k-th choice) pair, numbered t * K + k, its row the token's copy for that expert. Suffixes:
T tokens, K choices, E experts, R rows (T * K), D hidden. Passes replace these functions with
``torch.ops.graphmoe``, which also take unrouted slots (row -1), unused rows (R > T * K) and weights.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.ops import accumulator, has_kernel


class RoutingPlan(NamedTuple):
    """Rows sorted by expert, then token: int32 on the device."""

    counts_E: Tensor
    ends_E: Tensor  # inclusive prefix sum of the counts
    row_TK: Tensor
    slot_R: Tensor  # inverse of row_TK: token * K + slot


def routing_plan(expert_TK: Tensor, num_experts: int) -> RoutingPlan:
    """Return the slots' order by expert, then token: a slot's index in it is its row. No device sync."""
    expert_R = expert_TK.reshape(-1)
    ones_R = torch.ones_like(expert_R)
    counts_E = expert_R.new_zeros(num_experts).scatter_add_(0, expert_R.long(), ones_R)
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    slot_R = expert_R.argsort(stable=True)
    rows_R = torch.arange(len(expert_R), device=expert_R.device, dtype=torch.int32)
    row_TK = torch.empty_like(expert_R).scatter_(0, slot_R, rows_R).view_as(expert_TK)
    return RoutingPlan(counts_E, ends_E, row_TK, slot_R.int())


def permute(x_TD: Tensor, slot_R: Tensor, row_TK: Tensor) -> Tensor:
    """Gather the token of each routed row -> [R, D]. No device sync; the gradient is `unpermute`."""
    # Sums in a fixed order: plain indexing adds with atomics on CPU threads, so two runs would differ.
    return _Move.apply(x_TD, slot_R, row_TK, True)


def unpermute(y_RD: Tensor, slot_R: Tensor, row_TK: Tensor) -> Tensor:
    """Sum the K rows of each token in slot order -> [T, D]; bf16 is summed in fp32. Gradient: `permute`."""
    return _Move.apply(y_RD, slot_R, row_TK, False)


class _Move(torch.autograd.Function):
    gradient_of_forward = True

    @staticmethod
    def forward(x: Tensor, slot_R: Tensor, row_TK: Tensor, to_rows: bool) -> Tensor:
        return x[slot_R // row_TK.shape[1]] if to_rows else x[row_TK].sum(dim=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:3])
        ctx.to_rows = inputs[3]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Move.apply(gradient, *ctx.saved_tensors, not ctx.to_rows), None, None, None


@torch.library.custom_op("graphmoe::routing_plan", mutates_args=())
def _plan_op(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return counts_E, ends_E, row_TK, slot_R of a `RoutingPlan`, int32; ids out of range get row -1."""
    if expert_TK.is_cuda:
        from graphmoe.ops import permute_kernels

        return permute_kernels.routing_plan(expert_TK, num_experts)
    expert_R = expert_TK.reshape(-1).long()
    live_R = (expert_R >= 0) & (expert_R < num_experts)
    bucket_R = torch.where(live_R, expert_R, num_experts)
    # unrouted slots fill the dead rows at the end, in order, so that every entry is a slot
    slot_R = bucket_R.argsort(stable=True)
    rows_R = torch.arange(len(expert_R), device=expert_R.device)
    row_R = torch.empty_like(expert_R).scatter_(0, slot_R, rows_R)
    row_TK = torch.where(live_R, row_R, -1).int().view(expert_TK.shape)
    ones_R = torch.ones_like(bucket_R, dtype=torch.int32)
    counts_E = ones_R.new_zeros(num_experts + 1).scatter_add_(0, bucket_R, ones_R)[:num_experts].clone()
    return counts_E, counts_E.cumsum(0, dtype=torch.int32), row_TK, slot_R.int()


@torch.library.custom_op("graphmoe::permute", mutates_args=())
def _permute_op(
    x_TD: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor, weight_TK: Tensor | None = None
) -> Tensor:
    """Return the token of each routed row, times its weight if given -> [R, D]."""
    if has_kernel(x_TD):
        from graphmoe.ops import permute_kernels

        return permute_kernels.spread_rows(x_TD, row_TK, weight_TK, len(slot_R))
    if row_TK.numel() == 0:
        return x_TD.new_full((len(slot_R), x_TD.shape[1]), float("nan"))
    slot_R = slot_R.long().clamp(0, row_TK.numel() - 1)  # dead rows may hold anything
    y_RD = x_TD[slot_R // row_TK.shape[1]]
    if weight_TK is not None:
        y_RD = (y_RD * weight_TK.reshape(-1, 1)[slot_R].to(accumulator(y_RD))).to(y_RD.dtype)
    dead_R = torch.arange(len(slot_R), device=slot_R.device) >= ends_E[-1]
    return y_RD.masked_fill_(dead_R.unsqueeze(1), float("nan"))  # NaN makes a read of dead rows visible


@torch.library.custom_op("graphmoe::unpermute", mutates_args=())
def _unpermute_op(
    y_RD: Tensor, slot_R: Tensor, row_TK: Tensor, ends_E: Tensor, weight_TK: Tensor | None
) -> Tensor:
    """Return the sum over k, in order, of weight[t, k] * y[row[t, k]] -> [T, D] like y, added in fp32."""
    if has_kernel(y_RD):
        from graphmoe.ops import permute_kernels

        return permute_kernels.sum_rows(y_RD, row_TK, weight_TK)
    sum_TD = y_RD.new_zeros(len(row_TK), y_RD.shape[1], dtype=accumulator(y_RD))
    for k, row_T in enumerate(row_TK.unbind(1)):
        term_TD = y_RD[row_T.clamp(min=0)].to(sum_TD.dtype)
        if weight_TK is not None:
            term_TD = term_TD * weight_TK[:, k : k + 1].to(sum_TD.dtype)
        sum_TD = sum_TD + term_TD.masked_fill(row_T.unsqueeze(1) < 0, 0)
    return sum_TD.to(y_RD.dtype)


@torch.library.custom_op("graphmoe::unpermute_weight_grad", mutates_args=())
def _weight_grad_op(dx_TD: Tensor, y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Return the dot products of dx[t] and y[row[t, k]] -> [T, K] fp32 (fp64 for fp64); 0 for row -1."""
    if has_kernel(y_RD) and dx_TD.dtype == y_RD.dtype:
        from graphmoe.ops import permute_kernels

        return permute_kernels.dot_rows(dx_TD, y_RD, row_TK)
    dx_TD = dx_TD.to(accumulator(y_RD))
    products_T = [(dx_TD * y_RD[row_T.clamp(min=0)]).sum(1) for row_T in row_TK.unbind(1)]
    return torch.stack(products_T, 1).masked_fill(row_TK < 0, 0)


@_plan_op.register_fake
def _(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def empty(*shape: int) -> Tensor:
        return expert_TK.new_empty(shape, dtype=torch.int32)

    return empty(num_experts), empty(num_experts), empty(*expert_TK.shape), empty(expert_TK.numel())


_permute_op.register_fake(lambda x_TD, slot_R, *_: x_TD.new_empty(slot_R.shape[0], x_TD.shape[1]))
_unpermute_op.register_fake(lambda y_RD, slot_R, row_TK, *_: y_RD.new_empty(row_TK.shape[0], y_RD.shape[1]))
_weight_grad_op.register_fake(
    lambda x_TD, y_RD, row_TK: y_RD.new_empty(row_TK.shape, dtype=accumulator(y_RD))
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, *plan, weight_TK = inputs
    # Only the gradient of the weights reads the rows.
    ctx.save_for_backward(None if weight_TK is None else rows, *plan, weight_TK)


def _gradients_by(inverse: str) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, slot_R, row_TK, ends_E, weight_TK = ctx.saved_tensors
        drows = dweight_TK = None
        if ctx.needs_input_grad[0]:
            drows = getattr(torch.ops.graphmoe, inverse)(gradient, slot_R, row_TK, ends_E, weight_TK)
        if weight_TK is not None and ctx.needs_input_grad[4]:
            pair = (rows, gradient) if inverse == "unpermute" else (gradient, rows)
            dweight_TK = torch.ops.graphmoe.unpermute_weight_grad(*pair, row_TK).to(weight_TK.dtype)
        return drows, None, None, None, dweight_TK

    return backward


_permute_op.register_autograd(_gradients_by("unpermute"), setup_context=_save)
_unpermute_op.register_autograd(_gradients_by("permute"), setup_context=_save)
