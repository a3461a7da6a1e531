"""The segments moe_dispatch and moe_combine, where tokens go to other ranks.

Suffixes: B batch, S sequence, T = B * S tokens, D hidden, K top-k slots, N rows of what is received.
"""

from __future__ import annotations

from torch import Tensor, nn

from graphmoe.model.moe import combine
from graphmoe.ops.dispatch import PLANNED, RECEIVED, Dispatcher, plan_received


class Arrival(nn.Module):
    """Sends tokens to the ranks of their experts and takes what others send."""

    def __init__(self, dispatcher: Dispatcher, num_experts: int) -> None:
        """``num_experts`` are those of this rank."""
        super().__init__()
        self.dispatcher, self.num_experts = dispatcher, num_experts

    @property
    def writes(self) -> tuple[str, ...]:
        """What the experts read, and the load where the dispatcher makes room without a count."""
        return RECEIVED if self.dispatcher.capacity is None else (*PLANNED, "load")

    def forward(
        self, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan: Tensor
    ) -> tuple[Tensor, ...]:
        """The tensors of ``writes``, then the dispatcher's handle."""
        arrived = self.dispatcher.dispatch(h_TD, weight_TK, expert_TK, *plan)
        capacity = self.dispatcher.capacity
        if capacity is None:
            return arrived
        h_ND, weight_NK, number_NK, room, *handle = arrived
        return h_ND, weight_NK, *plan_received(number_NK, room, self.num_experts, capacity), *handle


class Return(nn.Module):
    """Brings back what the experts made of a token, and adds routed, shared and residual."""

    def __init__(self, dispatcher: Dispatcher, has_shared: bool) -> None:
        super().__init__()
        self.dispatcher, self.has_shared = dispatcher, has_shared

    def forward(self, x_BSD: Tensor, routed_ND: Tensor, *tensors: Tensor) -> Tensor:
        """-> [B, S, D]; after the plan and the handle, the sum of the shared experts is the last tensor."""
        *plan_and_handle, last = tensors
        shared = (last,) if self.has_shared else ()
        routed_TD = self.dispatcher.combine(routed_ND, *(plan_and_handle if self.has_shared else tensors))
        return combine(x_BSD, routed_TD, *shared)
