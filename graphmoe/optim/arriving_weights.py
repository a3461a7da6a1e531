"""An executor that starts while weights are still on their way from other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from graphmoe.runtime.compile.units import owner_of
from graphmoe.segments import Executor, Segment


class ArrivingWeights:
    """Called like ``graphmoe.segments.run_segments``; waits for what the segments' modules hold, no more.

    The wait is of the current stream on the device: it stands outside compiled units and captured graphs of
    units, and inside the graph of a captured step.
    """

    def __init__(self, execute: Executor, wait: Callable[[Iterable[Tensor]], None]) -> None:
        """``wait`` returns when the current stream may read these parameters."""
        self._execute, self._wait = execute, wait
        self._held: dict[nn.Module, tuple[Tensor, ...]] = {}

    def __call__(
        self, segments: Sequence[Segment], tensors: dict[str, Tensor], keep: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        for segment in segments:
            owner = owner_of(segment.run)
            if owner is not None:
                self._wait(self._parameters(owner))
        return self._execute(segments, tensors, keep)

    def _parameters(self, owner: nn.Module) -> tuple[Tensor, ...]:
        if owner not in self._held:
            self._held[owner] = tuple(owner.parameters())
        return self._held[owner]
