"""Gradient reduction overlapped with the backward, weight gather overlapped with the forward.

One collective per bucket, in the same order on all ranks. No device sync.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from graphmoe.ops.gradients import Gradient
from graphmoe.ops.waits import waiting
from graphmoe.optim.flat_buffers import Family, SharedSlots, in_forward_order
from graphmoe.plan.buckets import Bucket
from graphmoe.runtime.compile.units import owner_of
from graphmoe.runtime.launch.stamps import wait_for
from graphmoe.segments import Executor, Segment, profiler_range


class GradientReduction:
    """Reduces a bucket once as many gradients were added as in the previous step.

    Ranks of a group must run the same program, to reduce in the same order.
    """

    def __init__(
        self, families: Sequence[Family], gradients: Mapping[str, Gradient], shared: SharedSlots = ()
    ) -> None:
        """``shared``: buckets that `shared_slots.SlotReduction` reduces instead."""
        others = {(id(family), bucket.whole.start) for slot in shared for family, bucket in slot}
        self._queue: list[_BucketSum] = []
        for family, bucket in reversed(in_forward_order(families)):
            if (id(family), bucket.whole.start) in others:
                continue
            members = [gradients[family.names[i]] for i in bucket.members]
            self._queue.append(_BucketSum(family, bucket, members, self._start_complete))
        self._num_started = 0

    def finish(self) -> None:
        """Reduce the remaining buckets after the last backward; the current stream waits for all buckets."""
        # Buckets with fewer gradients than last step, and those behind, start here; those with more restart.
        late = [bucket for bucket in self._queue[: self._num_started] if bucket.incomplete]
        for bucket in [*self._queue[self._num_started :], *late]:
            bucket.start()
        for bucket in self._queue:
            bucket.finish()
        self._num_started = 0

    def _start_complete(self) -> None:
        while self._num_started < len(self._queue) and self._queue[self._num_started].complete:
            self._queue[self._num_started].start()
            self._num_started += 1


class _BucketSum:
    def __init__(
        self, family: Family, bucket: Bucket, gradients: Sequence[Gradient], on_complete: Callable[[], None]
    ) -> None:
        self._family, self._bucket = family, bucket
        self._gradients, self._on_complete = gradients, on_complete
        self._come = 0
        self._expected: int | None = None  # gradients in the previous step; None in the first
        self.incomplete = False
        self._work: dist.Work | None = None
        for gradient in gradients:
            gradient.on_added = self._count

    @property
    def complete(self) -> bool:
        return self._come == self._expected

    def start(self) -> None:
        self._wait()
        with profiler_range("gradients", "sum"):
            for gradient in self._gradients:
                gradient.fill()
            self._work = self._family.reduce(self._bucket, self._wait)

    def finish(self) -> None:
        self._wait()
        self._expected, self._come, self.incomplete = self._come, 0, False

    def _count(self) -> None:
        self._come += 1
        self.incomplete = self._work is not None
        if self.complete:
            self._on_complete()

    def _wait(self) -> None:
        if self._work is not None:
            with waiting():
                wait_for(self._work.wait)
            self._work = None


class WeightGather:
    """All-gathers buckets of weights that other ranks updated, in forward order."""

    def __init__(self, families: Sequence[Family], shared: SharedSlots = ()) -> None:
        """``shared``: buckets that `weight_slots.WeightSlots` gathers instead."""
        others = {(id(family), bucket.whole.start) for slot in shared for family, bucket in slot}
        queue = in_forward_order(families)
        self._queue = [(f, bucket) for f, bucket in queue if (id(f), bucket.whole.start) not in others]
        self._bucket_of = {
            id(family.weights[i]): number
            for number, (family, bucket) in enumerate(self._queue)
            for i in bucket.members
        }
        self._underway: dict[int, dist.Work] = {}  # collectives not yet waited for, by queue index
        self._held: dict[nn.Module, tuple[Tensor, ...]] = {}

    def start(self) -> None:
        self.wait()
        with profiler_range("weights", "gather"):
            self._underway = {i: family.gather(bucket) for i, (family, bucket) in enumerate(self._queue)}

    def wait(self, weights: Iterable[Tensor] | None = None) -> None:
        """Make the current stream wait until these parameters, or all, are gathered."""
        if not self._underway:
            return
        numbers: Iterable[int | None] = [*self._underway]
        if weights is not None:
            numbers = (self._bucket_of.get(id(weight)) for weight in weights)
        for number in numbers:
            if number is not None and number in self._underway:
                with waiting():
                    wait_for(self._underway.pop(number).wait)

    def execute(
        self,
        execute: Executor,
        segments: Sequence[Segment],
        tensors: dict[str, Tensor],
        keep: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        """Run segments once their modules' weights are gathered."""
        for segment in segments:
            owner = owner_of(segment.run)
            if owner is not None:
                if owner not in self._held:
                    self._held[owner] = tuple(owner.parameters())
                # a stream wait, outside of captured units or inside a captured step
                self.wait(self._held[owner])
        return execute(segments, tensors, keep)
