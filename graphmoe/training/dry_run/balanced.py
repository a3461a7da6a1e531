"""The dispatcher of a dry run: ``alltoall`` where no device has counts, so balanced ones are assumed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh


class BalancedAllToAll(AllToAll):
    """Sends as many rows to each rank, as if each token's experts were on as many ranks as can be.

    That is the most that a balanced routing sends. Rows of ``rows_of_each`` are for each rank of ``ep_etp``,
    ``expert_rows`` are those of all experts of this rank.
    """

    def __init__(self, mesh: Mesh, num_experts: int, num_tokens: int, top_k: int) -> None:
        """``num_tokens`` are those that each rank routes at once."""
        super().__init__(mesh, num_experts)
        layout = mesh.layout
        blocks = min(top_k, layout.ep)
        self.rows_of_each = -(-num_tokens * blocks // layout.ep)
        self.expert_rows = num_tokens * top_k * layout.etp

    def _on_host(self, counts: Tensor) -> Any:
        rows: Any = self.rows_of_each
        for length in reversed(counts.shape):
            rows = [rows] * length
        return rows
