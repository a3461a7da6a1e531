"""Exchange of gradients while the backward still runs, and of weights while the forward does.

Both go bucket by bucket, and every rank queues its collectives in the same order. No device sync anywhere.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from graphmoe.ops.gradients import Gradient
from graphmoe.optim.flat_buffers import Family, in_forward_order
from graphmoe.plan.buckets import Bucket
from graphmoe.runtime.compile.units import owner_of
from graphmoe.runtime.launch.stamps import wait_for
from graphmoe.segments import Executor, Segment, profiler_range


class GradientReduction:
    """Sum of each step's gradients over the ranks, bucket by bucket, into the shards of their owners.

    The sum of a bucket starts once its gradients are complete: when as many were added as in the whole step
    before. A parameter has several, of micro-batches and of places that share it. In the first
    step nobody knows how many there will be, and all sums start at its end.

    Should the number change, no sum is wrong. With fewer, the bucket and those behind it in the
    queue are summed at the end of the step. One more than expected may come after the start: then the bucket
    is summed again at the end. The ranks of a group must agree on that, as they do where they run the same
    program.
    """

    def __init__(self, families: Sequence[Family], gradients: Mapping[str, Gradient]) -> None:
        """Listen from now on to ``gradients``, by parameter name."""
        self._queue: list[_BucketSum] = []
        for family, bucket in reversed(in_forward_order(families)):
            members = [gradients[family.names[i]] for i in bucket.members]
            self._queue.append(_BucketSum(family, bucket, members, self._start_complete))
        self._num_started = 0
        """Buckets of the queue that were started in this step."""

    def finish(self) -> None:
        """Start what is left after the last backward, and let the current stream wait for all sums."""
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
    """Sum of one bucket over the ranks of its family."""

    def __init__(
        self, family: Family, bucket: Bucket, gradients: Sequence[Gradient], on_complete: Callable[[], None]
    ) -> None:
        self._family, self._bucket = family, bucket
        self._gradients, self._on_complete = gradients, on_complete
        self._come = 0
        self._expected: int | None = None
        """Gradients added to all parameters in a step; None before the first is over."""
        self.incomplete = False
        """True where something was added after the start."""
        self._work: dist.Work | None = None
        for gradient in gradients:
            gradient.on_added = self._count

    @property
    def complete(self) -> bool:
        return self._come == self._expected

    def start(self) -> None:
        """Start the sum of what has come so far."""
        self._wait()
        with profiler_range("gradients", "sum"):
            for gradient in self._gradients:
                gradient.fill()
            self._work = self._family.reduce(self._bucket)

    def finish(self) -> None:
        """Let the current stream wait for the sum, and be ready for the next step."""
        self._wait()
        self._expected, self._come, self.incomplete = self._come, 0, False

    def _count(self) -> None:
        self._come += 1
        self.incomplete = self._work is not None
        if self.complete:
            self._on_complete()

    def _wait(self) -> None:
        if self._work is not None:
            wait_for(self._work.wait)
            self._work = None


class WeightGather:
    """Gathering of weights that other ranks have updated, bucket by bucket in the order of the forward."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._queue = in_forward_order(families)
        self._bucket_of = {
            id(family.weights[i]): number
            for number, (family, bucket) in enumerate(self._queue)
            for i in bucket.members
        }
        self._underway: dict[int, dist.Work] = {}
        """Collectives that the current stream has not waited for yet, by place in the queue."""
        self._held: dict[nn.Module, tuple[Tensor, ...]] = {}
        """Parameters of a module."""

    def start(self) -> None:
        """Queue all collectives. The update that made the weights comes before them on the current stream."""
        self.wait()
        with profiler_range("weights", "gather"):
            self._underway = {i: family.gather(bucket) for i, (family, bucket) in enumerate(self._queue)}

    def wait(self, weights: Iterable[Tensor] | None = None) -> None:
        """Let the current stream wait for these parameters of the model, or for all."""
        if not self._underway:
            return
        numbers: Iterable[int | None] = [*self._underway]
        if weights is not None:
            numbers = (self._bucket_of.get(id(weight)) for weight in weights)
        for number in numbers:
            if number is not None and number in self._underway:
                wait_for(self._underway.pop(number).wait)

    def execute(
        self,
        execute: Executor,
        segments: Sequence[Segment],
        tensors: dict[str, Tensor],
        keep: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        """Run segments once the weights that their modules hold are there; others may still arrive.

        The wait is of the current stream on the device: it stands outside compiled units and captured graphs
        of units, and inside the graph of a captured step.
        """
        for segment in segments:
            owner = owner_of(segment.run)
            if owner is not None:
                if owner not in self._held:
                    self._held[owner] = tuple(owner.parameters())
                self.wait(self._held[owner])
        return execute(segments, tensors, keep)
