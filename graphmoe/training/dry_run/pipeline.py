"""Tells the watch of a step what a rank of a pipeline is at: forward, backward, or a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from graphmoe.plan.pipeline.actions import Kind, Step, parts
from graphmoe.plan.pipeline.timeline import Track
from graphmoe.plan.pipeline.transfers import Channel, Message
from graphmoe.runtime.pipeline.channels import Arrival, Channels, Specs
from graphmoe.training.dry_run.watch import StepWatch

MESSAGES = "messages"
"""Stands for a segment in what is said of memory."""


class WatchedSteps:
    """`graphmoe.runtime.pipeline.recorder.StepRecorder` that says whether a step is forward or backward.

    The two of a pair run one after the other; that the second has begun autograd tells.
    """

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch

    def start(self) -> None:
        """Nothing is to be forgotten."""

    @contextmanager
    def span(self, track: Track, step: Step) -> Iterator[None]:
        self._watch.phase = _phase(parts(step)[0].kind)
        yield


class WatchedChannels(Channels):
    """Channels whose messages are of the forward or of the backward by what they carry."""

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
