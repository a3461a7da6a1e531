"""SIGTERM and SIGINT: the first asks the loop to stop, the second ends the process at once."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Inside a ``with`` block, ``received`` names the first signal that asked to stop, if any."""

    received: str | None = None

    def __enter__(self) -> StopSignal:
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number).name
