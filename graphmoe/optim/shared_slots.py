"""Gradients in slots that several buckets share, reduced after each micro-batch to fp32 shards (ZeRO-2).

A bucket is reduced once all of its parameters have a gradient, or, if another bucket needs its slot earlier,
with those that it has: sums of parts are equal. The reduction is in place. Whoever writes to the slot next
waits for it, and adds the result to the shard. Ranks of a group must run the same program. No device sync.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from graphmoe.ops import IN_USE
from graphmoe.ops.gradients import Gradient
from graphmoe.ops.waits import waiting
from graphmoe.optim.flat_buffers import Family, SharedSlots, in_forward_order
from graphmoe.plan.buckets import Bucket
from graphmoe.runtime.launch.stamps import wait_for
from graphmoe.segments import profiler_range


class SlotReduction:
    """Reduces the buckets that share slots."""

    def __init__(self, shared: SharedSlots, gradients: Mapping[str, Gradient]) -> None:
        made: dict[tuple[int, int], _SlotBucket] = {}
        for pairs in shared:
            slot = _Slot()
            for family, bucket in pairs:
                members = [gradients[family.names[i]] for i in bucket.members]
                made[id(family), bucket.whole.start] = _SlotBucket(slot, family, bucket, members)
        order = reversed(in_forward_order([*{id(f): f for pairs in shared for f, _ in pairs}.values()]))
        keys = [(id(family), bucket.whole.start) for family, bucket in order]
        self._queue = [made[key] for key in keys if key in made]

    def finish(self) -> None:
        """Reduce what remains after the last backward; the current stream waits for all reductions."""
        for bucket in self._queue:
            bucket.finish()


class _Slot:
    def __init__(self) -> None:
        self.holder: _SlotBucket | None = None


class _SlotBucket:
    def __init__(self, slot: _Slot, family: Family, bucket: Bucket, gradients: Sequence[Gradient]) -> None:
        self._slot, self._family, self._bucket, self._gradients = slot, family, bucket, gradients
        self._shard = family.grad_shard[bucket.shard]
        self._gaps = _gaps(family, bucket)
        self._open: set[int] = set()  # gradients that are being written
        self._work: tuple[dist.Work, Tensor] | None = None  # reduction not yet added to the shard
        self._has_sum = False  # True if the shard holds a sum of this step
        for number, gradient in enumerate(gradients):
            gradient.before_write = functools.partial(self._write, number)
            gradient.on_added = functools.partial(self._written, number)

    def finish(self) -> None:
        if self._work is None and (self._has_begun or not self._has_sum):
            self._hold()
            self._start()
        self._collect()
        self._has_sum = False

    @property
    def _has_begun(self) -> bool:
        return any(gradient.begun for gradient in self._gradients)

    def _write(self, number: int) -> None:
        if number in self._open:
            _settle()  # an earlier micro-batch's gradients of replicas
        self._hold()
        self._open.add(number)

    def _written(self, number: int) -> None:
        self._open.discard(number)
        if not self._open and all(gradient.begun for gradient in self._gradients):
            self._start()

    def _hold(self) -> None:
        holder = self._slot.holder
        if holder is self:
            self._collect()
            return
        if holder is not None:
            holder._leave()
        for gap in self._gaps:
            gap.zero_()
        self._slot.holder = self

    def _leave(self) -> None:
        if self._open:
            _settle()
        assert not self._open, "a compile unit writes to two buckets of one slot"
        if self._has_begun and self._work is None:
            self._start()
        self._collect()

    def _start(self) -> None:
        with profiler_range("gradients", "sum"):
            for gradient in self._gradients:
                gradient.fill()
                gradient.begun = False
            self._work = self._family.reduce_in_place(self._bucket, self._collect)

    def _collect(self) -> None:
        if self._work is None:
            return
        (work, part), self._work = self._work, None
        with waiting():
            wait_for(work.wait)
        if self._has_sum:
            self._shard.add_(part)
        else:
            self._shard.copy_(part)
        self._has_sum = True


def _settle() -> None:
    if IN_USE.exchange:
        IN_USE.exchange.settle()


def _gaps(family: Family, bucket: Bucket) -> list[Tensor]:
    """Return the parts of a bucket between its parameters and after them, which are summed as zeros."""
    whole, end, found = family.gradient(bucket), 0, list[Tensor]()
    for i in sorted(bucket.members, key=family.layout.starts.__getitem__):
        start = family.layout.starts[i] - bucket.whole.start
        found.append(whole[end:start])
        end = start + family.weights[i].numel()
    return [gap for gap in (*found, whole[end:]) if gap.numel()]
