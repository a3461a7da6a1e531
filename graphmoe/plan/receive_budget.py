"""How many rows a rank makes room for where no host counts those that other ranks send.

The worst case is that every token of all ranks goes to one, which no large run can afford. So room is made
for ``moe.receive_budget`` times what a balanced routing sends; a step in which more arrives is void and runs
again with more room (docs/expert_parallel.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from graphmoe.config.schema import ModelConfig, MoEConfig, RunConfig
from graphmoe.plan.layout import Layout

WORST_CASE = "worst_case"
"""The value of ``moe.receive_budget`` that makes room for all that can arrive."""
BLOCK_STEP = 128
"""A block of rows that copy engines move has a multiple of so many."""


class Load(NamedTuple):
    """What arrives at a rank, or room for it."""

    rows: int
    """Tokens; each comes once, however many of its experts are here."""
    slots: int
    """Their slots of experts that are here: rows of the experts' products."""


def routed_tokens(config: RunConfig, layout: Layout) -> int:
    """Tokens that each rank routes at once."""
    assert config.data.seq_len is not None
    return config.train.micro_batch_size * config.data.seq_len // (layout.tp * layout.cp)


def worst_load(model: ModelConfig, layout: Layout, tokens: int) -> Load:
    """All tokens of all ranks of ep_etp, each with all its slots here as far as there are experts."""
    rows = layout.size("ep_etp") * tokens
    return Load(rows, rows * min(model.top_k, model.num_experts // layout.ep))


def balanced_load(model: ModelConfig, layout: Layout, tokens: int) -> Load:
    """What arrives where each token's experts are drawn alike from all; ``tokens`` are those of one rank.

    A token comes here with the probability that not all its ``top_k`` experts are others, which is
    hypergeometric.
    """
    here, slots = model.num_experts // layout.ep, tokens * model.top_k * layout.etp
    elsewhere = math.comb(model.num_experts - here, model.top_k) / math.comb(model.num_experts, model.top_k)
    return Load(math.ceil(layout.size("ep_etp") * tokens * (1 - elsewhere)), slots)


def room_bytes(room: Load, model: ModelConfig, layout: Layout, element_bytes: int, *, fused: bool) -> int:
    """Bytes of a rank's tensors that are as large as there is room, while a step runs.

    For each MoE layer what its forward keeps: of a row the plan of its slots, and where the experts are
    ``fused`` the token and the weights; of a slot gate and up, and in separate steps the token, the weight,
    and the activation in three stages. Once, what one layer needs meanwhile: a row's sum,
    both gradients and its place in the region of symm; a slot's output, activation and gradients.
    ``recompute`` is not looked at: it may keep less.
    """
    width, inner = model.hidden_size * element_bytes, model.expert_ffn_size // layout.etp * element_bytes
    layers = model.num_layers - model.num_dense_layers + model.mtp_depth
    of_row, of_slot = 8 * model.top_k, 2 * inner
    if fused:
        of_row += width + 4 * model.top_k
    else:
        of_slot += width + 4 + 3 * inner
    kept = room.rows * of_row + room.slots * of_slot
    passing = room.rows * (4 * width + 8 * model.top_k) + room.slots * (2 * width + 5 * inner)
    return layers * kept + passing


def capacity(moe: MoEConfig, model: ModelConfig, layout: Layout, tokens: int, factor: float = 1.0) -> Load:
    """Room for ``factor`` times the receive budget; never more than the worst case."""
    worst = worst_load(model, layout, tokens)
    if moe.receive_budget == WORST_CASE:
        return worst
    balanced, budget = balanced_load(model, layout, tokens), moe.receive_budget * factor
    rows = min(math.ceil(balanced.rows * budget), worst.rows)
    return Load(rows, min(math.ceil(balanced.slots * budget), rows * (worst.slots // worst.rows)))


def blocks_of(balanced: Load, room: Load, ranks: int) -> tuple[int, int]:
    """Rows that copy engines move for each pair of ranks, and the rows that there is to be room for then.

    A block has the rows of a balanced routing, rounded up. A pair with fewer sends garbage behind them; one
    with more has a kernel pull the rest, for which there is as much room as ``room`` has beyond balance.
    """
    block = -(-balanced.rows // (ranks * BLOCK_STEP)) * BLOCK_STEP
    return block, ranks * block + max(room.rows - balanced.rows, 0)
