"""Random routings to measure with: natural, or with one expert at 4 times the mean.

Suffixes: T tokens, K slots, E experts, R routed rows (T * K).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SKEW = 4
"""Rows of the largest expert over the mean, in a skewed routing."""


class Routing(NamedTuple):
    """The experts of each slot, and the plan that the operations take."""

    expert_TK: Tensor
    slot_R: Tensor
    row_TK: Tensor
    ends_E: Tensor

    @property
    def plan(self) -> tuple[Tensor, Tensor, Tensor]:
        """slot_R, row_TK and ends_E, as the operations take them."""
        return self.slot_R, self.row_TK, self.ends_E


def route(
    T: int, E: int, K: int, generator: torch.Generator, device: torch.device, *, skewed: bool = False
) -> tuple[Routing, Tensor]:
    """A routing, and its weights [T, K] fp32: the softmax of random logits at the chosen experts.

    Natural: the K largest. Skewed: expert 0 is chosen by exactly ``SKEW * T * K / E`` tokens (which must be
    whole and at most T), the other slots go to the largest of the rest.
    """
    from graphmoe.ops import permute  # noqa: F401  # registers the ops

    logits_TE = torch.randn(T, E, generator=generator, device=device)
    choice_TE = logits_TE.clone()
    if skewed:
        num_busy, rest = divmod(SKEW * T * K, E)
        assert rest == 0 and num_busy <= T, (T, E, K)
        order_T = torch.randperm(T, generator=generator, device=device)
        choice_TE[:, 0] = -torch.inf
        choice_TE[order_T[:num_busy], 0] = torch.inf
    expert_TK = choice_TE.topk(K, dim=-1).indices
    weight_TK = logits_TE.softmax(dim=-1).gather(1, expert_TK)
    expert_TK = expert_TK.int()
    _, ends_E, row_TK, slot_R = torch.ops.graphmoe.routing_plan(expert_TK, E)
    return Routing(expert_TK, slot_R, row_TK, ends_E), weight_TK
