"""Signals that ask a run to stop: docs/launch.md has which.

While it trains, the first is remembered and the loop stops after its step. Before that there is nothing to
finish, and the first ends the process. A second SIGTERM or SIGINT ends it at once; a notice, which systems
send ahead of time and several times, does not. Workers of torch elastic hear one signal twice where their
launcher forwards what reached them too: within two seconds that counts once.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NOTICES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals of a terminal that is gone, and of Slurm and others whose time limit is near."""
ELASTIC = "TORCHELASTIC_RUN_ID"
"""Torch elastic, torchrun's or graphmoe's own, sets it in each worker."""
FOLDER_HELD = "GRAPHMOE_FOLDER_HELD"
"""The folder that the launching process of the first node has claimed for the run."""
LAUNCHED_AT = "GRAPHMOE_LAUNCHED_AT"
"""Start of the command, or of the job of a sweep: seconds since the epoch, from the launching process."""
LAUNCHER_PID = "GRAPHMOE_LAUNCHER_PID"
"""graphmoe's own launcher sets it in each worker, and tells the user of signals and errors itself."""
SWEEP_JOB = "GRAPHMOE_SWEEP_JOB"
"""Number of the job of a sweep that a worker is of."""
_ECHO_S = 2.0
_PR_SET_PDEATHSIG = 1


class Interrupted(KeyboardInterrupt):
    """A signal came before there was anything to finish."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: ended before the first step")
        self.status = 128 + number
        """Exit status of the process."""


class StopSignal:
    """Inside a ``with`` block, ``received`` names the first signal that asked to stop, if any.

    A subclass does something else at a signal, and before a second one ends the process.
    """

    received: str | None = None
    _is_last_call = False

    def __enter__(self) -> Self:
        self.received = raised()
        here = threading.current_thread() is threading.main_thread()  # elsewhere Python hears none
        self._previous = {number: signal.signal(number, self._handle) for number in heard() if here}
        return self

    def asked(self, name: str) -> None:
        """Tell the user of a signal, unless the launcher does."""
        if LAUNCHER_PID not in os.environ:
            say(f"{name} received: the run stops after this step; a second signal ends it at once")

    def ending(self, name: str) -> None:
        """Do what the end of the process needs."""

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if _heard.is_echo() or (number in NOTICES and self.received is not None):
            return
        name = signal.Signals(number).name
        if self._is_last_call:
            self.ending(name)
            os._exit(128 + number)
        self._is_last_call = number in SIGNALS
        self.received = self.received or name
        self.asked(name)


@contextmanager
def ends_at_signals() -> Iterator[None]:
    """The first signal raises Interrupted inside the block, a second ends the process at once.

    Does nothing outside the main thread, where Python hears no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if _heard.is_echo() or (number in NOTICES and _heard.raised is not None):
            return
        if _heard.raised is not None:
            os._exit(128 + number)
        _heard.raised = signal.Signals(number).name
        if LAUNCHER_PID not in os.environ:
            say(f"{_heard.raised} received before the first step: ending")
        raise Interrupted(number)

    previous = {number: signal.signal(number, handle) for number in heard() if not awaited(number)}
    _heard.blocks += 1
    try:
        yield
    finally:
        _heard.blocks -= 1
        if not _heard.blocks:
            _heard.raised = None
        for number, handler in previous.items():
            signal.signal(number, handler)


def exit_at_signals() -> None:
    """Have signals end this process with one line: while it starts and ends there is nothing to tidy up.

    Notices do nothing to a worker whose launcher hears them.
    """
    for number in heard():
        signal.signal(number, _exit)
    if _is_launched():
        for number in NOTICES:
            signal.signal(number, signal.SIG_IGN)


def heard() -> list[signal.Signals]:
    """Return the signals that this process stops at: no notices that it was started to ignore (nohup)."""
    notices = [] if _is_launched() else NOTICES
    return [*SIGNALS, *(number for number in notices if signal.getsignal(number) is not signal.SIG_IGN)]


def raised() -> str | None:
    """The signal for which `ends_at_signals` has raised in vain: torch, and others, may drop an exception."""
    return _heard.raised


def awaited(number: int) -> bool:
    """Tell whether something else in this process waits for a signal, as submitit does for SIGUSR2."""
    handler = signal.getsignal(number)
    ours = handler is signal.default_int_handler or getattr(handler, "__module__", None) == __name__
    return callable(handler) and not ours


def _exit(number: int, frame: FrameType | None) -> None:
    if _heard.is_echo():
        return
    if LAUNCHER_PID not in os.environ:
        say(f"{signal.Signals(number).name} received: ending")
    os._exit(128 + number)


def _is_launched() -> bool:
    return os.environ.get(LAUNCHER_PID, str(os.getpid())) != str(os.getpid())


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


def die_with_parent() -> None:
    """Have this process of ``multiprocessing`` end as soon as the one that asked for it is gone.

    A thread waits for that, and needs no system's help: the parent of a fork server's child is the server.
    """
    import multiprocessing

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class _Heard:
    """Signals so far, by which one is told from its echo."""

    _at = -_ECHO_S
    raised: str | None = None
    blocks = 0
    """Number of `ends_at_signals` blocks, one inside the other."""

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
