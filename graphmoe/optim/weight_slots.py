"""Weights in slots that several buckets share, gathered from their shards before each use (ZeRO-3).

A compile unit, or an uncompiled layer, gathers what it reads, if its slots hold other weights. What followed
it last time is gathered ahead, if that is a neighbouring layer, whose slots are others than its own
(`graphmoe.plan.slots`). Ranks of a group must run the same program. No device sync.
"""

import functools
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from graphmoe.ops.gradients import Gradient, Use, with_gathered_weights
from graphmoe.optim.flat_buffers import Family, SharedSlots
from graphmoe.plan.buckets import Bucket
from graphmoe.runtime.compile.units import owner_of
from graphmoe.runtime.launch.stamps import wait_for
from graphmoe.segments import Executor, Segment, profiler_range


class WeightSlots:
    """Gathers the buckets that share slots."""

    def __init__(
        self,
        shared: SharedSlots,
        gradients: Mapping[str, Gradient],
        layers: Mapping[str, int],
        num_places: int,
    ) -> None:
        """``layers``: index of each parameter's layer, by name; ``num_places`` as in `share_memory`."""
        self._gradients: dict[int, Gradient] = {}  # by parameter
        self._owners: dict[nn.Module, list[Gradient]] = {}
        self._slots: list[_Slot] = []
        self._layer: dict[Use, int] = {}  # that was entered last
        self._following: dict[tuple[Use, int], int] = {}
        self._buckets: dict[tuple[Use, int], dict[_Gathered, None]] = {}  # that each layer reads
        for pairs in shared:
            slots = [_Slot() for _ in range(num_places)]
            self._slots += slots
            for family, bucket in pairs:
                places = [_Gathered(slot, family, bucket, place) for place, slot in enumerate(slots)]
                calls = dict[int, functools.partial[None]]()
                for i in bucket.members:
                    gradient, layer = gradients[family.names[i]], layers[family.names[i]]
                    calls.setdefault(layer, functools.partial(self._gather, places, layer))
                    gradient.gathers = calls[layer]
                    if num_places > 1:
                        gradient.weight_in_backward = family.weight_in(bucket, -1, i)
                    self._gradients[id(family.weights[i])] = gradient

    def settle(self) -> None:
        """Make the current stream wait for all gathers, so that shards may change."""
        for slot in self._slots:
            slot.settle()

    def changed(self) -> None:
        """Forget what is gathered, since the shards have changed."""
        for slot in self._slots:
            slot.holder = slot.work = None  # a step begins so: its graph cannot wait for what is outside

    def execute(
        self,
        execute: Executor,
        segments: Sequence[Segment],
        tensors: dict[str, Tensor],
        keep: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        """Run uncompiled segments with their modules' weights."""
        found: list[Gradient] = []
        for owner in [owner for segment in segments if (owner := owner_of(segment.run))]:
            if owner not in self._owners:
                each = [self._gradients.get(id(weight)) for weight in owner.parameters()]
                self._owners[owner] = [gradient for gradient in each if gradient is not None]
            found += self._owners[owner]
        return with_gathered_weights(found, lambda: execute(segments, tensors, keep))

    def _gather(self, places: Sequence["_Gathered"], layer: int, use: Use) -> None:
        if (before := self._layer.get(use)) != layer:
            self._layer[use] = layer
            if before is not None:
                self._following[use, before] = layer
        bucket = places[-1 if use == "backward" else 0]
        self._buckets.setdefault((use, layer), {})[bucket] = None
        bucket.start()
        bucket.slot.settle()
        ahead = self._following.get((use, layer))
        if ahead is not None and abs(ahead - layer) == 1:
            for other in self._buckets[use, ahead]:
                other.start()


class _Slot:
    def __init__(self) -> None:
        self.holder: _Gathered | None = None
        self.work: dist.Work | None = None

    def settle(self) -> None:
        # kept: a stream that has waited is not the only one that reads
        if self.work is not None:
            wait_for(self.work.wait)


class _Gathered:
    """A bucket's weights in one of its slots."""

    def __init__(self, slot: _Slot, family: Family, bucket: Bucket, place: int) -> None:
        self.slot, self._family, self._bucket, self._place = slot, family, bucket, place

    def start(self) -> None:
        if self.slot.holder is not self:
            self.slot.settle()
            with profiler_range("weights", "gather"):
                self.slot.work = self._family.gather(self._bucket, self._place)
            self.slot.holder = self
