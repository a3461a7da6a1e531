"""Shows every operation of a step to the logs of collectives and of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from graphmoe.runtime.torch_compat import in_backward
from graphmoe.training.dry_run.collectives import CollectiveLog
from graphmoe.training.dry_run.inside import bytes_inside
from graphmoe.training.dry_run.memory import MemoryLog
from graphmoe.training.dry_run.segments import Running


class StepWatch(TorchDispatchMode):
    """Says of each operation whether the forward, the backward or the update runs it."""

    def __init__(
        self,
        collectives: CollectiveLog,
        memory: MemoryLog,
        running: Running | None = None,
        *,
        has_data: bool = False,
    ) -> None:
        """``has_data``: the tensors are real."""
        super().__init__()
        self.phase = "update"
        """Whose operations come next; that a backward has begun autograd tells."""
        self._collectives, self._memory, self._has_data = collectives, memory, has_data
        self._running = running or Running()

    @contextmanager
    def within(self, phase: str, segment: str) -> Iterator[None]:
        """The block is of another phase, and of another segment."""
        before = self.phase, self._running.segment
        self.phase, self._running.segment = phase, segment
        yield
        self.phase, self._running.segment = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not (self._has_data or func._schema.returns) and func.namespace == "aten":
            return None  # changes its arguments, which have no data: torch's fused AdamW has no fake
        result = func(*args, **(kwargs or {}))
        if in_backward():
            self.phase = "backward"
        self._collectives.saw(func, args, result, self.phase)
        self._memory.saw(result, self.phase, self._running.segment)
        if inside := bytes_inside(func, args):
            self._memory.borrowed(inside, self.phase)
        return result
