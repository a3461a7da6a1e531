"""Layout of parameters in flat buffers, by buckets; `graphmoe.optim.flat_buffers` holds the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# elements, 128 bytes in bf16: alignment of every parameter and shard; gaps are filled with zeros
ALIGNMENT = 64


def decays(weight: Tensor) -> bool:
    """Return whether weight decay applies: to matrices and experts, not to norms and biases."""
    return weight.dim() > 1


class Bucket(NamedTuple):
    """Consecutive parameters that share one gradient reduction and one weight gather."""

    members: tuple[int, ...]
    whole: slice
    own: slice
    """This rank's range in unsharded buffers."""
    shard: slice
    """The same range in this rank's shard buffers."""


@dataclass(frozen=True)
class BufferLayout:
    """Offsets, in elements, of parameters in flat buffers, and of one rank's shards of them."""

    starts: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    size: int
    decayed: int
    """Length of the shards' front part, to which weight decay applies."""

    @classmethod
    def of(
        cls, weights: Sequence[Tensor], num_ranks: int, index: int, bucket_elements: float
    ) -> BufferLayout:
        """Return the layout for rank ``index``; buckets hold at most ``bucket_elements`` or one parameter."""
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
    groups: list[list[int]] = []
    room = 0.0
    # from the end, so that the first group, which every step waits for, is the small one
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
