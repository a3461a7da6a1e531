"""Recorder: when the steps of one rank ran, and how long it waited for messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from graphmoe.plan.pipeline.actions import Step
from graphmoe.plan.pipeline.timeline import Span, Track


class StepRecorder(Protocol):
    """Is told what a rank does when."""

    def start(self) -> None:
        """A step begins."""

    def span(self, track: Track, step: Step) -> AbstractContextManager[None]:
        """Around a step of the table, or the wait for a message that it reads."""


class Recorder:
    """Records one step at a time: by events on a GPU, by the host's clock on a CPU.

    A wait, track ``comm``, is the time that the stream (on a CPU the host) stood still for a message. Records
    nothing that a graph could capture.
    """

    def __init__(self, device: torch.device, barrier: Callable[[], object] | None = None) -> None:
        """``barrier`` returns when all ranks have called it; it brings their zeros together."""
        self._on_gpu = device.type == "cuda"
        self._device, self._barrier = device, barrier
        self._origin: torch.cuda.Event | int = 0
        self._marks: list[tuple[Track, Step, torch.cuda.Event | int, torch.cuda.Event | int]] = []
        self.began_ns = 0
        """``time.time_ns()`` at zero of the step's spans."""

    def start(self) -> None:
        """Forget the step before; zero is now. Waits for the device, then for the barrier.

        So zero is the same moment on all ranks up to the time in which they leave the barrier (some 0.1 ms
        for gloo), and ``began_ns`` belongs to it up to the launch of an event (some 0.01 ms). On one host
        ``began_ns`` is the better common clock, between hosts it is as far off as their clocks are.
        """
        self._marks.clear()
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        if self._barrier:
            self._barrier()
        self.began_ns = time.time_ns()
        self._origin = self._now()

    @contextmanager
    def span(self, track: Track, step: Step) -> Iterator[None]:
        """Records the block. No device sync."""
        begin = self._now()
        yield
        self._marks.append((track, step, begin, self._now()))

    def spans(self, rank: int, origin_ns: int | None = None) -> list[Span]:
        """The spans since `start`, in microseconds from its zero, or from a time of ``time.time_ns()``.

        Waits for the device.
        """
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        moved = 0.0 if origin_ns is None else (self.began_ns - origin_ns) / 1e3
        return [
            Span(rank, track, step, moved + self._us(begin), moved + self._us(end))
            for track, step, begin, end in self._marks
        ]

    def _now(self) -> torch.cuda.Event | int:
        if not self._on_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _us(self, mark: torch.cuda.Event | int) -> float:
        origin = self._origin
        if isinstance(mark, int) or isinstance(origin, int):
            assert isinstance(mark, int) and isinstance(origin, int)
            return (mark - origin) / 1e3
        return origin.elapsed_time(mark) * 1e3
