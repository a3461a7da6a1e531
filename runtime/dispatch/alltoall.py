"""Dispatcher ``alltoall``: torch.distributed on any backend. The reference for the others.

Each forward syncs once for the row counts, so nothing here is traced or captured.

Suffixes: T tokens, K slots, P ranks of ``ep_etp``, W send slots, S rows sent, N rows received, D hidden.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops.collectives import transfer
from graphmoe.ops.dispatch import SendPlan
from graphmoe.ops.waits import waiting
from graphmoe.plan.experts import Load
from graphmoe.runtime.launch.stamps import wait_for
from graphmoe.runtime.ranks import Mesh


class AllToAll:
    """Sends each token once to each rank of its experts, and sums the returned rows."""

    capacity = None
    handle: tuple[str, ...] = ("sent", "arrived")  # rows to and from each rank, int64 [P] on the host

    def __init__(self, mesh: Mesh, num_experts: int, chunk: Load | None = None) -> None:
        self.chunk = chunk
        self._group = mesh.group("ep_etp")
        self._etp = mesh.layout.etp
        self._experts = num_experts // mesh.layout.ep  # of each rank

    def dispatch(
        self, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan: Tensor
    ) -> tuple[Tensor, ...]:
        counts_P, ends_P, row_TW, slot_R = SendPlan(*plan)
        both_2P = torch.stack([counts_P, counts_P])
        if self._group is not None:
            with waiting():
                dist.all_to_all_single(both_2P[1], counts_P, group=self._group)
        sent, arrived = self._on_host(both_2P)
        slot_S = slot_R[: sum(sent)]
        packed = [torch.ops.graphmoe.permute(x, slot_S, row_TW, ends_P) for x in (h_TD, weight_TK)]
        ranks_P = torch.arange(len(sent), device=counts_P.device)
        rank_S = ranks_P.repeat_interleave(counts_P, output_size=len(slot_S))
        number_SK = expert_TK[slot_S // row_TW.shape[1]] - (rank_S // self._etp * self._experts).unsqueeze(1)
        elsewhere_SK = (number_SK < 0) | (number_SK >= self._experts)
        number_SK = number_SK.masked_fill(elsewhere_SK, -1).int()
        received = _Transfer.apply(sent, arrived, self._group, *packed, number_SK)
        return *received, torch.tensor(sent), torch.tensor(arrived)

    def combine(self, sum_ND: Tensor, *plan_and_handle: Tensor) -> Tensor:
        *plan, sent_P, arrived_P = plan_and_handle
        _, ends_P, row_TW, slot_R = SendPlan(*plan)
        sent, arrived = self._on_host(sent_P), self._on_host(arrived_P)
        (y_SD,) = _Transfer.apply(arrived, sent, self._group, sum_ND)
        return torch.ops.graphmoe.unpermute(y_SD, slot_R[: sum(sent)], row_TW, ends_P, None)

    def _on_host(self, counts: Tensor) -> Any:
        return wait_for(counts.tolist)


class _Transfer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sent: list[int], arrived: list[int], group: dist.ProcessGroup | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.way_back = arrived, sent, group
        ctx.has_gradient = [x.is_floating_point() for x in tensors]
        moved = tuple(transfer(x, sent, arrived, group) for x in tensors)
        ctx.mark_non_differentiable(*(x for x in moved if not x.is_floating_point()))
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # one node for all tensors, so that every rank sends gradients in the same order
        pairs = zip(gradients, ctx.has_gradient, strict=True)
        return None, None, None, *(transfer(dx, *ctx.way_back) if has else None for dx, has in pairs)
