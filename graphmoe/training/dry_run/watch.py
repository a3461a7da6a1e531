"""Watch over a dry step: each operation goes to the logs of collectives and of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphmoe.plan.pipeline.actions import Kind, Step, parts
from graphmoe.plan.pipeline.simulate import Track
from graphmoe.plan.pipeline.transfers import Channel, Message
from graphmoe.runtime.pipeline.channels import Arrival, Channels, Specs
from graphmoe.runtime.torch_compat import in_backward
from graphmoe.training.dry_run.collectives import CollectiveLog
from graphmoe.training.dry_run.memory import MemoryLog, bytes_inside
from graphmoe.training.dry_run.segments import CurrentSegment


class StepWatch(TorchDispatchMode):
    """Dispatch mode that logs each operation with its phase: forward, backward or update."""

    def __init__(
        self,
        collectives: CollectiveLog,
        memory: MemoryLog,
        current: CurrentSegment | None = None,
        *,
        has_data: bool = False,
    ) -> None:
        """``has_data``: the tensors are real."""
        super().__init__()
        self.phase = "update"
        """Phase of the next operations, until autograd begins a backward."""
        self._collectives, self._memory, self._has_data = collectives, memory, has_data
        self._current = current or CurrentSegment()

    @contextmanager
    def within(self, phase: str, segment: str) -> Iterator[None]:
        """Count the block for another phase and segment."""
        before = self.phase, self._current.segment
        self.phase, self._current.segment = phase, segment
        yield
        self.phase, self._current.segment = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not (self._has_data or func._schema.returns) and func.namespace == "aten":
            return None  # changes its arguments, which have no data: torch's fused AdamW has no fake
        result = func(*args, **(kwargs or {}))
        if in_backward():
            self.phase = "backward"
        self._collectives.saw(func, args, result, self.phase)
        self._memory.saw(result, self.phase, self._current.segment)
        if inside := bytes_inside(func, args):
            self._memory.borrowed(inside, self.phase)
        return result


MESSAGES = "messages"
"""Stands for a segment in what is said of memory."""


class WatchedSteps:
    """`graphmoe.runtime.pipeline.recorder.StepRecorder` that sets the watch's phase.

    The two of a pair run one after the other; that the second has begun autograd tells.
    """

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch

    def start(self) -> None:
        """Do nothing: there is nothing to forget."""

    @contextmanager
    def span(self, track: Track, step: Step) -> Iterator[None]:
        self._watch.phase = _phase(parts(step)[0].kind)
        yield


class WatchedChannels(Channels):
    """Channels whose messages count for the forward or the backward by their content."""

    def __init__(
        self,
        watch: StepWatch,
        channels: Iterable[Channel],
        pipelines: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        super().__init__(channels, pipelines, device)
        self._watch = watch

    def send(self, message: Message, tensors: Iterable[Tensor]) -> None:
        with self._watch.within(_phase(message.content.kind), MESSAGES):
            super().send(message, tensors)

    def receive(self, message: Message, specs: Specs) -> Arrival:
        with self._watch.within(_phase(message.content.kind), MESSAGES):
            return super().receive(message, specs)


def _phase(kind: Kind) -> str:
    return "forward" if kind == "F" else "backward"
