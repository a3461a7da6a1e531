"""Bytes of weights, gradients and optimizer state of a rank, exactly as flat buffers hold them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from graphmoe.model.sizes import Weight
from graphmoe.plan.buckets import BufferLayout
from graphmoe.plan.layout import Axis, Layout

FP32 = 4
KINDS = ("params", "grads", "main_params", "moments")


def state_of(
    weights: Sequence[Weight], layout: Layout, element_bytes: int, bucket_mb: float
) -> dict[str, int]:
    """Bytes by kind: whole weights and gradients, the shards of both, and shards of the rest."""
    families: dict[Any, list[Weight]] = {}
    for weight in weights:
        families.setdefault(ranks_of(layout, weight.summed_over), []).append(weight)
    found = dict.fromkeys(KINDS, 0)
    for members in families.values():
        ranks = layout.size(members[0].summed_over)
        size = BufferLayout.of(members, ranks, 0, bucket_mb * 1e6 / FP32).size
        shard = size // ranks
        is_rounded = element_bytes != FP32
        found["params"] += element_bytes * (size + (shard if ranks > 1 else 0))
        found["grads"] += FP32 * (size + (shard if ranks > 1 else 0))
        found["main_params"] += FP32 * shard if is_rounded else 0
        found["moments"] += 2 * FP32 * shard
    return found


@functools.lru_cache(maxsize=4096)
def ranks_of(layout: Layout, axis: Axis) -> object:
    """Equal for axes whose ranks share a process group: that of rank 0, which all others are like."""
    return None if layout.size(axis) == 1 else layout.first_group(axis)
