"""Streams of a GPU that is not there: what was queued on which, and behind what.

``graphmoe`` and ``runtime`` ask torch.cuda for streams; `use_streams` gives them these.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Stream:
    """Stream that runs its work in order; ``behind`` is all work that is done when the next begins."""

    name: str
    behind: frozenset[str] = frozenset()

    def wait_stream(self, other):
        self.behind |= other.behind


@dataclass
class Event:
    """Event with the work that was queued before it on the stream that recorded it."""

    gpu: Gpu
    behind: frozenset[str] = frozenset()

    def record(self):
        self.behind = self.gpu.current.behind

    def wait(self):
        self.gpu.current.behind |= self.behind


@dataclass
class Gpu:
    """Streams, and where each piece of work was queued."""

    current: Stream = field(default_factory=lambda: Stream("first"))
    on: dict[str, str] = field(default_factory=dict)
    behind: dict[str, frozenset[str]] = field(default_factory=dict)
    """Names of the work that is done before each piece of work begins."""

    def queue(self, work):
        assert work not in self.on, work
        self.on[work], self.behind[work] = self.current.name, self.current.behind
        self.current.behind |= {work}

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def use_streams(monkeypatch):
    """Let torch.cuda have the streams of a stand-in; those that are made are called second, third, ..."""
    gpu, names = Gpu(), iter(("second", "third", "fourth", "fifth"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(next(names)))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(gpu))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: gpu.current)
    monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
    return gpu
