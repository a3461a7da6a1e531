"""Dispatch of tokens to the ranks that own their experts, and combine of the outputs.

A row is one token as sent to one rank; a slot is a (token, k-th choice) pair. Suffixes: T tokens, K choices,
P ranks of ``ep_etp``, W = K * etp possible rows of a token, S rows sent, N rows received, D hidden.

Each index of ``ep`` owns E / ep consecutive experts. Each of its etp ranks holds 1 / etp of their width, so a
token is sent to all of them and their outputs are summed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.library import CustomOpDef

import graphmoe.ops.permute  # noqa: F401  # registers the operations
from graphmoe.ops import register_gradient
from graphmoe.plan.experts import Load


class SendPlan(NamedTuple):
    """Rows to send, by receiving rank, then token; at most one per token and rank. int32 on the device."""

    send_counts_P: Tensor  # rows for each rank
    send_ends_P: Tensor  # inclusive prefix sum of the counts
    send_row_TW: Tensor  # row of each position of a token among the rows sent, -1 if unused
    send_slot_R: Tensor  # token * W + position of each row, R = T * W; rows from the last end on are dead


SEND_PLAN = ("send_counts", "send_ends", "send_row", "send_slot")
RECEIVED = ("received", "received_weight", "received_experts")  # read by experts if the host knows the sizes
# read by experts of a dispatcher with a capacity: with a plan of the received slots
PLANNED = ("received", "received_weight", "ends", "row", "slot")


# of a plan of `graphmoe.ops.replicas`: positions of slots, experts of all ranks' slots
REPLICAS = ("places", "replicas")


class Dispatcher(Protocol):
    """Implementation of dispatch and combine, for all layers; both are collectives over ``ep_etp``.

    One with a ``capacity`` is a frozen dataclass of numbers, by which compiled units distinguish dispatchers.
    """

    @property
    def capacity(self) -> Load | None:
        """Rows and slots that a call can receive at most; None if sizes depend on the routing."""

    @property
    def chunk(self) -> Load | None:
        """Rows and slots that experts process or recompute at once; None for all. Only without capacity."""

    @property
    def handle(self) -> tuple[str, ...]:
        """Names of the last results of ``dispatch`` (the handle), which are arguments of ``combine``."""

    def dispatch(
        self, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan: Tensor
    ) -> tuple[Tensor, ...]:
        """Return received tokens [N, D], routing weights [N, K], local experts int32 [N, K], and the handle.

        Expert -1 marks choices of other ranks' experts, and unused rows. ``plan`` is a `SendPlan`. With a
        capacity the fourth result is the number of rows that arrived, int32 []; those beyond N were dropped.
        """

    def combine(self, sum_ND: Tensor, *plan_and_handle: Tensor) -> Tensor:
        """Return each token's sum over the outputs of all ranks [T, D], added in fp32 in a fixed order."""


def send_plan(expert_TK: Tensor, num_experts: int, ep: int, etp: int) -> SendPlan:
    """Return the tokens to send to each rank; rows are sorted by rank, then by token. No device sync."""
    block_TK = expert_TK // (num_experts // ep)
    earlier_KK = torch.ones(2 * block_TK.shape[1:], dtype=torch.bool, device=block_TK.device).tril(-1)
    again_TK = ((block_TK[:, :, None] == block_TK[:, None, :]) & earlier_KK).any(dim=2)
    part_J = torch.arange(etp, dtype=torch.int32, device=block_TK.device)
    rank_TKJ = block_TK[:, :, None] * etp + part_J
    rank_TW = rank_TKJ.masked_fill(again_TK[:, :, None], -1).flatten(1)
    counts_P, ends_P, row_TW, slot_R = torch.ops.graphmoe.routing_plan(rank_TW, ep * etp)
    return SendPlan(counts_P, ends_P, row_TW, slot_R)


def plan_received(
    number_NK: Tensor, needed: Tensor, num_experts: int, capacity: Load
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort slots by local expert; return expert ends [L], slots' indices [N, K], their inverse [R], load [2].

    An index is -1 for other ranks' experts and beyond capacity; the load is received rows and slots.
    """
    _, ends_L, row_NK, slot_R = torch.ops.graphmoe.routing_plan(number_NK, num_experts)
    load = torch.stack([needed.int(), ends_L[-1]])
    rows = capacity.slots
    return ends_L.clamp(max=rows), row_NK.masked_fill(row_NK >= rows, -1), slot_R[:rows], load


def register_exchange(
    dispatch: CustomOpDef, dispatch_grad: CustomOpDef, combine: CustomOpDef, combine_grad: CustomOpDef, *,
    way_back: Callable[[Sequence[Any], Sequence[Tensor]], Sequence[Any]],
    way_there: Callable[[Sequence[Any]], Sequence[Any]], token_tensor: Callable[[Sequence[Any]], Tensor],
) -> None:  # fmt: skip
    """Register gradients of dispatch and combine, and fake versions of the operations that return tokens.

    Gradients are ``dispatch_grad(dreceived, dweight, *way_back(inputs, output))`` and ``combine_grad(dy,
    *way_there(inputs))``. The ``way`` functions return a gradient's routing arguments. From such arguments,
    ``token_tensor`` picks a tensor with one row per token.
    """

    def fake_dispatch_grad(dreceived_ND: Tensor, dweight_NK: Tensor, *way: Any) -> tuple[Tensor, Tensor]:
        tokens = token_tensor(way).shape[0]
        dh_TD = dreceived_ND.new_empty(tokens, dreceived_ND.shape[1])
        return dh_TD, dweight_NK.new_empty(tokens, dweight_NK.shape[1])

    def fake_combine(sum_ND: Tensor, *way: Any) -> Tensor:
        return sum_ND.new_empty(token_tensor(way).shape[0], sum_ND.shape[1])

    dispatch_grad.register_fake(fake_dispatch_grad)
    combine.register_fake(fake_combine)
    # one operation for both gradients, so that all ranks communicate in the same order
    register_gradient(dispatch, dispatch_grad, way_back, results=2)
    register_gradient(combine, combine_grad, lambda inputs, _: way_there(inputs))
