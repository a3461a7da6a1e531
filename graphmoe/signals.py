"""SIGTERM and SIGINT: the first asks a process to stop, the second ends it at once.

While it trains, the first is remembered and the loop stops after its step. Before that there is nothing to
finish, and the first ends the process. Workers of torch elastic hear one signal twice where their
launcher forwards what reached them too: within two seconds that counts once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ELASTIC = "TORCHELASTIC_RUN_ID"
"""Torch elastic, torchrun's or graphmoe's own, sets it in each worker."""
LAUNCHER_PID = "GRAPHMOE_LAUNCHER_PID"
"""graphmoe's own launcher sets it in each worker, and tells the user of signals and errors itself."""
_ECHO_S = 2.0
_PR_SET_PDEATHSIG = 1


class Interrupted(KeyboardInterrupt):
    """A signal came before there was anything to finish."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: ended before the first step")
        self.status = 128 + number
        """What the process exits with."""


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
        if _heard.is_echo():
            return
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number).name
        if LAUNCHER_PID not in os.environ:
            say(f"{self.received} received: the run stops after this step; a second signal ends it at once")


@contextmanager
def ends_at_signals() -> Iterator[None]:
    """The first signal raises Interrupted inside the block, a second ends the process at once.

    Does nothing outside the main thread, where Python hears no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if _heard.is_echo():
            return
        if interrupted:
            os._exit(128 + number)
        interrupted = True
        if LAUNCHER_PID not in os.environ:
            say(f"{signal.Signals(number).name} received before the first step: ending")
        raise Interrupted(number)

    previous = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def die_with_launcher() -> None:
    """Have the system kill this worker as soon as the process that started it is gone (Linux)."""
    if ELASTIC not in os.environ or not sys.platform.startswith("linux"):
        return
    end_with_parent(signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None and os.getppid() != int(launcher):
        os._exit(1)  # it was gone before we asked


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Have the system send this process a signal as soon as the thread that started it is gone (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


class _Heard:
    """Tells a signal of a worker from its echo."""

    _at = -_ECHO_S

    def is_echo(self) -> bool:
        now = time.monotonic()
        if ELASTIC in os.environ and now - self._at < _ECHO_S:
            return True
        self._at = now
        return False


_heard = _Heard()


def say(line: str) -> None:
    """One line on stderr; a handler must not use Python's streams, which may be in the middle of a write."""
    with suppress(OSError):  # the reader of stderr may be gone
        os.write(2, f"{line}\n".encode())
