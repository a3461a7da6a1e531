"""Slots: memory that buckets of distant layers use in turn, in the order of the backward.

A bucket is in use from the backward of its last layer to that of its first. Others may have its slot if a
whole layer is between theirs and its own: a compile unit writes to all buckets of a layer at once, and a
bucket's reduction overlaps with the layer after it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from graphmoe.config.schema import DpShard
from graphmoe.plan.buckets import Bucket, BufferLayout
from graphmoe.plan.layout import layout_of

if TYPE_CHECKING:
    from torch import Tensor

GAP = 2  # layers from the first of one bucket down to the last of the next in its slot


class Use(NamedTuple):
    """A bucket's use of a slot."""

    first: int
    last: int
    """Indices of the first and the last layer with its parameters."""
    length: int
    """In elements."""
    alone: bool = False
    """True if nothing else may have its slot."""


class Slots(NamedTuple):
    """Assignment of buckets to slots."""

    of_buckets: tuple[int, ...]
    lengths: tuple[int, ...]
    """Of slots, in elements."""

    def is_shared(self, bucket: int) -> bool:
        return self.of_buckets.count(self.of_buckets[bucket]) > 1

    def weight_length(self, places: int) -> int:
        """Return the number of elements of weight slots; each shared slot has ``places`` copies."""
        counts = Counter(self.of_buckets)
        return sum(n * (places if counts[slot] > 1 else 1) for slot, n in enumerate(self.lengths))


def slots_of(uses: Sequence[Use]) -> Slots:
    """Assign each use to a free slot, the best fitting, or to a new one if none is free."""
    chosen, lengths, free_below = [0] * len(uses), list[int](), list[int]()
    for number in sorted(range(len(uses)), key=lambda i: (-uses[i].last, -uses[i].first, i)):
        use = uses[number]
        free = [slot for slot, below in enumerate(free_below) if use.last <= below and not use.alone]
        if not free:
            chosen[number] = len(lengths)
            lengths.append(use.length)
            free_below.append(-1 if use.alone else use.first - GAP)
            continue
        # the shortest that is long enough, else the one that must grow least
        slot = min(free, key=lambda slot: (lengths[slot] < use.length, abs(lengths[slot] - use.length)))
        lengths[slot] = max(lengths[slot], use.length)
        chosen[number], free_below[slot] = slot, use.first - GAP
    return Slots(tuple(chosen), tuple(lengths))


def weight_places(dp_shard: DpShard, *, in_turns: bool) -> int:
    """Return the number of slots of weights for each slot of gradients; 0 if weights are not sharded.

    ``in_turns``: a forward and a backward take turns, in different layers.
    """
    return (1 + in_turns) * (dp_shard is DpShard.fsdp2)


Buffer = tuple[BufferLayout, Mapping[str, "Tensor"]]
"""Layout of a buffer, and its parameters in order."""


def gradient_slots(buffers: Iterable[Buffer], names: Iterable[str]) -> Slots:
    """Return the slots of all buckets of the buffers, in order; ``names`` of all parameters, in order.

    A bucket with a parameter that several segments read has a slot of its own, as it gets several gradients
    in a micro-batch.
    """
    layers = layers_of(names)
    found = ((bucket, [*each], [*each.values()]) for layout, each in buffers for bucket in layout.buckets)
    return slots_of([_use(*given, layers) for given in found])


def _use(bucket: Bucket, names: Sequence[str], weights: Sequence["Tensor"], layers: Mapping[str, int]) -> Use:
    at = [layers[names[i]] for i in bucket.members]
    is_shared = any(layout_of(weights[i]).is_shared for i in bucket.members)
    return Use(min(at), max(at), bucket.whole.stop - bucket.whole.start, is_shared)


def layers_of(names: Iterable[str]) -> dict[str, int]:
    """Return each parameter's layer, numbered in the order of ``names``; embedding and head count as one."""
    holders = {name: ".".join(name.split(".")[: 1 + name.startswith(("layers.", "mtp."))]) for name in names}
    indices = {holder: index for index, holder in enumerate(dict.fromkeys(holders.values()))}
    return {name: indices[holder] for name, holder in holders.items()}
