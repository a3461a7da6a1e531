"""Replays from one memory pool, in the order of creation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from torch import Tensor

from graphmoe.runtime.capture.capture import Span
from graphmoe.runtime.capture.graphs import GraphMaker
from graphmoe.segments import profiler_range

R = TypeVar("R", bound="Replay")


class Pool:
    """Memory that graphs share for one micro-batch, and the order in which they may replay."""

    def __init__(self, maker: GraphMaker, key: Hashable, addresses: set[int]) -> None:
        self.maker, self.key = maker, key
        self.addresses = addresses  # of results, which are fixed
        # True if a backward of this micro-batch ran without a graph. A graph made after it would be older
        # than the one that replaces it next time.
        self.has_gap = False
        self.num_left = 0  # backwards whose wgrad still has to replay
        self.num_made = 0
        self._newest = -1  # newest graph with results that replayed for this micro-batch

    def begin(self) -> None:
        self._newest, self.has_gap, self.num_left = -1, False, 0

    def is_behind(self, replay: Replay) -> bool:
        # Results are read until the micro-batch is over, so by the rule of GraphMaker no older graph may
        # replay.
        return replay.number <= self._newest

    def find(self, replays: Sequence[R], given: Sequence[Tensor] = ()) -> R | None:
        """Return the oldest graph that may replay now."""
        fit = (replay for replay in replays if not self.is_behind(replay) and replay.moved(given) is None)
        # None: the caller makes another graph
        return next(fit, None)

    def replayed(self, number: int) -> None:
        self._newest = number


class Replay:
    """A graph of static tensors; those flagged in ``stays`` keep their addresses."""

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
        """Without ``run`` only inputs are copied."""
        self._unit, self._part = span.unit, part
        self.static, self._stays, self._pool = static, stays, pool
        self.number = pool.num_made
        pool.num_made += 1
        self._graph = span.make(pool.maker, lambda: run(self.static), pool=pool.key) if run else None
        self._is_new = True

    def moved(self, given: Sequence[Tensor]) -> int | None:
        """Return the index of a tensor that moved, if any."""
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
