"""The dispatcher ``symm``: ranks of one node read each other's memory, and no host counts rows.

The operations are those of `graphmoe.ops.symm`. Nothing waits for the host, so a graph can hold all of it.

Suffixes: T tokens, K slots, P ranks of ``ep_etp``, N rows that there is room for, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import graphmoe.ops.symm  # noqa: F401  # registers the operations
from graphmoe.ops.collectives import index_along
from graphmoe.plan.experts import Load


@dataclass(frozen=True)
class Symm:
    """Each token is read once by each rank that holds one of its experts; the sums are read back."""

    handle: ClassVar[tuple[str, ...]] = ("arrivals",)
    """Rows from each rank to each rank, int32 [P, P], the same on all of them."""

    chunk: ClassVar[None] = None
    capacity: Load
    num_experts: int
    """Of each rank."""
    etp: int
    block: int = 0
    """Rows for each pair of ranks that copy engines move; what is beyond is pulled by a kernel."""

    def dispatch(
        self, h_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, *plan: Tensor
    ) -> tuple[Tensor, ...]:
        """As ``Dispatcher.dispatch``. No device sync."""
        h_ND, weight_NK, number_NK, arrivals_PP = torch.ops.graphmoe.symm_dispatch(
            h_TD, weight_TK, expert_TK, *plan, self.capacity.rows, self.num_experts, self.etp, self.block
        )
        alone = len(arrivals_PP) == 1
        here = arrivals_PP.new_zeros(1) if alone else index_along("ep_etp", arrivals_PP).view(1)
        arrived_P = arrivals_PP.index_select(1, here).squeeze(1)
        room = len(arrived_P) * self.block + (arrived_P - self.block).clamp_min(0).sum()
        return h_ND, weight_NK, number_NK, room.int(), arrivals_PP

    def combine(self, sum_ND: Tensor, *plan_and_handle: Tensor) -> Tensor:
        """As ``Dispatcher.combine``. No device sync."""
        return torch.ops.graphmoe.symm_combine(sum_ND, *plan_and_handle, self.block)
