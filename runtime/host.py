"""Tuning of the host process."""

from __future__ import annotations

import gc
from types import TracebackType

from graphmoe.config import HostConfig


class GarbageCollection:
    """Collects garbage at fixed steps instead of whenever Python pleases, inside a ``with`` block.

    A collection in the middle of a step delays its kernel launches by milliseconds; at a fixed step
    every rank pays at the same time.
    """

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> GarbageCollection:
        if self.config.manual_gc:
            gc.collect()
            gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """Collect if this step is due."""
        if self.config.manual_gc and step % self.config.gc_interval == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.config.manual_gc and self._was_enabled:
            gc.enable()
