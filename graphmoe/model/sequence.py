"""Which positions of a sequence a rank of cp holds.

Neighbouring positions, where attention exchanges heads; first and last of 2 * cp chunks, and so on inwards
("zigzag"), where keys and values go round, so that causal attention is equal work for all. The ranks of tp
share what their rank of cp holds, in its order. Suffix: S sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphmoe.ops.collectives import index_along
from graphmoe.plan.layout import Layout


def own_positions(whole: Tensor, layout: Layout, dim: int) -> Tensor:
    """What this rank of cp holds of a tensor over whole sequences, ``dim`` being that of positions.

    The same on all ranks of tp, and the tensor itself where cp is 1. No device sync.
    """
    if layout.cp == 1:
        return whole
    place = index_along("cp", whole)
    chunks = 2 * layout.cp if layout.ring else layout.cp
    if whole.shape[dim] % chunks:
        raise ValueError(f"{whole.shape[dim]} positions cannot be cut into {chunks} equal chunks")
    places = torch.stack([place, chunks - 1 - place]) if layout.ring else place.unsqueeze(0)
    return whole.unflatten(dim, (chunks, -1)).index_select(dim, places).flatten(dim, dim + 1)
