"""Dispatch: the way of tokens to the ranks that hold their experts, and of the experts' sums back.

Suffixes: T tokens, K slots (top-k choices of a token), P ranks of ``ep_etp``, W = K * etp places of a token
in the plan, S rows sent, N rows received, D hidden.

Experts lie in blocks of E / ep neighbours, one block for each index of ``ep``. The etp ranks of a block each
hold 1 / etp of the width of all its experts: a token goes to all of them, and what they make of it is summed.
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
    """Rows of tokens for each rank of ``ep_etp``: a routing plan whose experts are ranks.

    A token goes to a rank once, however many of its slots are of experts there. int32 on the device.
    """

    send_counts_P: Tensor
    """Rows for each rank."""
    send_ends_P: Tensor
    """Inclusive prefix sum of the counts."""
    send_row_TW: Tensor
    """Row of each place of a token among the rows sent, -1 for places that are not used."""
    send_slot_R: Tensor
    """Token * W + place of each row, R = T * W; the rows behind the last end are dead."""


SEND_PLAN = ("send_counts", "send_ends", "send_row", "send_slot")
RECEIVED = ("received", "received_weight", "received_experts")
"""Tensors that experts read of a dispatcher whose sizes the host knows."""
PLANNED = ("received", "received_weight", "ends", "row", "slot")
"""Tensors that experts read of a dispatcher with a capacity: with a plan of the slots that have arrived."""


REPLICAS = ("places", "replicas")
"""Tensors of a plan of replicas, `graphmoe.ops.replicas`: places of slots, experts of all ranks' slots."""


class Dispatcher(Protocol):
    """Brings tokens to their experts and back, for all layers. Its calls are collectives of ``ep_etp``.

    One with a ``capacity`` is a frozen dataclass of numbers, so that units that call it can be told apart.
    """

    @property
    def capacity(self) -> Load | None:
        """Room for received tokens, the same in each call; None where sizes follow from their number."""

    @property
    def chunk(self) -> Load | None:
        """Load that experts work on at a time, and recompute in the backward; without a capacity only.

        None where all received tokens are one piece.
        """

    @property
    def handle(self) -> tuple[str, ...]:
        """Names of the last that ``dispatch`` returns, which ``combine`` reads."""

    def dispatch(
        self, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan: Tensor
    ) -> tuple[Tensor, ...]:
        """Tokens [N, D], slot weights [N, K], numbers of this rank's experts int32 [N, K], and the handle.

        Slots of experts elsewhere have the number -1, as have those of rows where no token lies. The
        gradients of tokens and weights come back; that of a weight from the ranks of its expert alone.
        ``plan`` is a `SendPlan`. With a capacity the fourth tensor is what N would have to be for all that
        was sent here, int32 []: if it is more than N, some of that is missing.
        """

    def combine(self, sum_ND: Tensor, *plan_and_handle: Tensor) -> Tensor:
        """The sum over ranks of what each made of a token -> [T, D].

        Its order is fixed, so two calls are bitwise equal; added in fp32.
        """


def send_plan(expert_TK: Tensor, num_experts: int, ep: int, etp: int) -> SendPlan:
    """The plan by which tokens go to the ranks of their experts. No device sync.

    Rows are in the order of ranks, and of tokens within a rank.
    """
    block_TK = expert_TK // (num_experts // ep)
    earlier_KK = torch.ones(2 * block_TK.shape[1:], dtype=torch.bool, device=block_TK.device).tril(-1)
    again_TK = ((block_TK[:, :, None] == block_TK[:, None, :]) & earlier_KK).any(dim=2)
    part_J = torch.arange(etp, dtype=torch.int32, device=block_TK.device)
    rank_TKJ = block_TK[:, :, None] * etp + part_J
    rank_TW = rank_TKJ.masked_fill(again_TK[:, :, None], -1).flatten(1)
    counts_P, ends_P, row_TW, slot_R = torch.ops.graphmoe.routing_plan(rank_TW, ep * etp)
    return SendPlan(counts_P, ends_P, row_TW, slot_R)


def plan_received(
    number_NK: Tensor, room: Tensor, num_experts: int, capacity: Load
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The plan of the received slots: end rows [L], row [N, K], slot [R], and the load. No device sync.

    ``num_experts`` are those of this rank. Slots beyond the R rows that there is room for have no row. The
    load, int32 [2], is a `Load` that may be more than the capacity: the rows that were sent here, and the
    slots of those that there was room for.
    """
    _, ends_L, row_NK, slot_R = torch.ops.graphmoe.routing_plan(number_NK, num_experts)
    load = torch.stack([room.int(), ends_L[-1]])
    rows = capacity.slots
    return ends_L.clamp(max=rows), row_NK.masked_fill(row_NK >= rows, -1), slot_R[:rows], load


def register_exchange(
    dispatch: CustomOpDef,
    dispatch_grad: CustomOpDef,
    combine: CustomOpDef,
    combine_grad: CustomOpDef,
    *,
    way_back: Callable[[Sequence[Any], Sequence[Tensor]], Sequence[Any]],
    way_there: Callable[[Sequence[Any]], Sequence[Any]],
    token_tensor: Callable[[Sequence[Any]], Tensor],
) -> None:
    """Register the gradients of a dispatcher's operations, and the fakes of those that return tokens.

    ``dispatch`` returns tokens and weights, then integers. Its gradient is that of its first two inputs,
    ``dispatch_grad(dreceived, dweight, *way_back(inputs, output))``; the gradient of the first input of
    ``combine`` is ``combine_grad(dy, *way_there(inputs))``. Both ways end with their numbers.
    ``token_tensor`` returns a tensor with a row for each token from the arguments of ``dispatch_grad`` behind
    both gradients, or of ``combine`` behind the sums.
    """

    def fake_dispatch_grad(dreceived_ND: Tensor, dweight_NK: Tensor, *way: Any) -> tuple[Tensor, Tensor]:
        tokens = token_tensor(way).shape[0]
        dh_TD = dreceived_ND.new_empty(tokens, dreceived_ND.shape[1])
        return dh_TD, dweight_NK.new_empty(tokens, dweight_NK.shape[1])

    def fake_combine(sum_ND: Tensor, *way: Any) -> Tensor:
        return sum_ND.new_empty(token_tensor(way).shape[0], sum_ND.shape[1])

    dispatch_grad.register_fake(fake_dispatch_grad)
    combine.register_fake(fake_combine)
    # One operation for both gradients, so that every rank sends them in the same order.
    register_gradient(dispatch, dispatch_grad, way_back, results=2)
    register_gradient(combine, combine_grad, lambda inputs, _: way_there(inputs))
