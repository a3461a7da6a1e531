"""Buckets of flat buffers: places of parameters in them, and the part that each rank owns.

`graphmoe.optim.flat_buffers` shows a picture and holds the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64
"""Elements, 128 bytes in bf16; every parameter and every shard of a bucket starts at a multiple of them, and
zeros fill the gaps."""


def decays(weight: Tensor) -> bool:
    """Tell whether weight decay applies: to matrices and experts, and not to norms and biases."""
    return weight.dim() > 1


class Bucket(NamedTuple):
    """Neighbouring parameters whose gradients are reduced, and whose weights are gathered, at once."""

    members: tuple[int, ...]
    """Places of the parameters in their family."""
    whole: slice
    """Range of the bucket in whole buffers."""
    own: slice
    """Range that this rank owns, in whole buffers."""
    shard: slice
    """Range that this rank owns, in its shards."""


@dataclass(frozen=True)
class BufferLayout:
    """Places of parameters in the buffers of one of ``num_ranks`` ranks, in elements."""

    starts: tuple[int, ...]
    """Start of each parameter in whole buffers."""
    buckets: tuple[Bucket, ...]
    size: int
    """Length of whole buffers."""
    decayed: int
    """Length of the front part of the shards, whose parameters decay; the others do not."""

    @classmethod
    def of(
        cls, weights: Sequence[Tensor], num_ranks: int, index: int, bucket_elements: float
    ) -> BufferLayout:
        """Lay whole parameters into buckets of at most ``bucket_elements``, or of one parameter."""
        starts, buckets, end, decayed = [0] * len(weights), list[Bucket](), 0, 0
        for decayed_ones in (True, False):
            members = [i for i, weight in enumerate(weights) if decays(weight) is decayed_ones]
            for group in _neighbours(members, weights, bucket_elements):
                start = end
                for i in group:
                    starts[i] = end
                    end += _aligned(weights[i].numel(), ALIGNMENT)
                length = _aligned(end - start, num_ranks * ALIGNMENT)
                part, end = length // num_ranks, start + length
                own = slice(start + index * part, start + (index + 1) * part)
                shard = slice(start // num_ranks, end // num_ranks)
                buckets.append(Bucket(tuple(group), slice(start, end), own, shard))
            if decayed_ones:
                decayed = end // num_ranks
        return cls(tuple(starts), tuple(buckets), end, decayed)


def _neighbours(members: Sequence[int], weights: Sequence[Tensor], limit: float) -> list[list[int]]:
    """Cut into groups from the end, so that the first one is small: every step waits for that group."""
    groups: list[list[int]] = []
    room = 0.0
    for i in reversed(members):
        length = _aligned(weights[i].numel(), ALIGNMENT)
        if not groups or length > room:
            groups.insert(0, [])
            room = limit
        groups[0].insert(0, i)
        room -= length
    return groups


def _aligned(length: int, to: int) -> int:
    return -(-length // to) * to
