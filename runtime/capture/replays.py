"""Replays from one pool of memory, in the order in which their graphs were made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from torch import Tensor

from graphmoe.runtime.capture.capture import Span
from graphmoe.runtime.capture.graphs import GraphMaker
from graphmoe.segments import profiler_range

R = TypeVar("R", bound="Replay")


class Pool:
    """Memory that graphs share for one micro-batch at a time, and the rule of which may replay next.

    ``GraphMaker`` demands that nothing older replays between a graph and the last that reads its results.
    Here results are read until the micro-batch is over. So what replays is always newer than everything that
    has replayed for the micro-batch and has results; where there is no such graph yet, another is made.
    """

    def __init__(self, maker: GraphMaker, key: Hashable, addresses: set[int]) -> None:
        self.maker, self.key = maker, key
        self.addresses = addresses
        """Addresses of results, which stay where they are."""
        self.has_gap = False
        """True where a backward of this micro-batch ran without a graph. A graph that were made behind it
        would be older than the one that takes its place next time."""
        self.num_left = 0
        """Number of backwards of this micro-batch whose W is still to run from a graph."""
        self.num_made = 0
        self._newest = -1
        """Number of the newest graph with results that has replayed for this micro-batch."""

    def begin(self) -> None:
        """Begin a micro-batch: the results of the last one are not read any more."""
        self._newest, self.has_gap, self.num_left = -1, False, 0

    def is_behind(self, replay: Replay) -> bool:
        """Return whether a graph is too old to replay now."""
        return replay.number <= self._newest

    def find(self, replays: Sequence[R], given: Sequence[Tensor] = ()) -> R | None:
        """Return the oldest of these graphs that may replay now on the given tensors."""
        fit = (replay for replay in replays if not self.is_behind(replay) and replay.moved(given) is None)
        return next(fit, None)

    def replayed(self, number: int) -> None:
        """Note that a graph with results has replayed."""
        self._newest = number


class Replay:
    """A graph of a function of static tensors; the tensors of ``stays`` must lie where they were."""

    def __init__(
        self,
        span: Span,
        pool: Pool,
        run: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] | None,
        static: Sequence[Tensor] = (),
        stays: Sequence[bool] = (),
        *,
        part: str,
    ) -> None:
        """Without ``run`` only the copies into static tensors are launched.

        ``part`` names the part of the unit, for ranges of profiles.
        """
        self._unit, self._part = span.unit, part
        self.static, self._stays, self._pool = static, stays, pool
        self.number = pool.num_made
        pool.num_made += 1
        self._graph = span.make(pool.maker, lambda: run(self.static), pool=pool.key) if run else None
        self._is_new = True

    def moved(self, given: Sequence[Tensor]) -> int | None:
        """Return the index of a tensor that must stay and lies elsewhere; None if all are in place."""
        checked = zip(self._stays, self.static, given, strict=True)
        moved = (
            i
            for i, (stays, static, tensor) in enumerate(checked)
            if stays and static.data_ptr() != tensor.data_ptr()
        )
        return next(moved, None)

    def __call__(self, given: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        with profiler_range(self._unit, self._part):
            for static, tensor in zip(self.static, given, strict=True):
                if static.data_ptr() != tensor.data_ptr():
                    static.copy_(tensor.detach())
            results = self._graph.replay() if self._graph else ()
        if results:
            self._pool.replayed(self.number)
        if self._is_new:
            self._pool.addresses.update(result.data_ptr() for result in results)
            self._is_new = False
        return results
