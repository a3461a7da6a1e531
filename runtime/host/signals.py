"""Signals that ask a run to stop (docs/launch.md).

During training the first one stops the run after the current step; before, it ends the process. A second
SIGTERM or SIGINT ends the process at once; a second preemption notice is ignored.
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
# a lost terminal, and preemption notices of Slurm and other schedulers
NOTICES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ELASTIC = "TORCHELASTIC_RUN_ID"  # set in each worker by torch elastic, torchrun's or graphmoe's own
FOLDER_HELD = "GRAPHMOE_FOLDER_HELD"  # folder that the first node's launcher has claimed
LAUNCHED_AT = "GRAPHMOE_LAUNCHED_AT"  # start of the command or sweep job, seconds since the epoch
LAUNCHER_PID = "GRAPHMOE_LAUNCHER_PID"  # in workers of graphmoe's launcher, which reports signals and errors
SWEEP_JOB = "GRAPHMOE_SWEEP_JOB"  # number of the worker's sweep job
# a launcher forwards a signal that its workers may have received too: within this time it counts once
_ECHO_S = 2.0
_PR_SET_PDEATHSIG = 1


class Interrupted(KeyboardInterrupt):
    """Raised by a signal that arrives before the first step."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: ended before the first step")
        self.status = 128 + number


class StopSignal:
    """Context that records in ``received`` the first signal that asked to stop."""

    received: str | None = None
    _is_last_call = False

    def __enter__(self) -> Self:
        self.received = _heard.raised  # torch and others may have dropped the Interrupted
        here = threading.current_thread() is threading.main_thread()  # Python handles signals only there
        self._previous = {number: signal.signal(number, self._handle) for number in heard() if here}
        return self

    def asked(self, name: str) -> None:
        """Report the first signal, unless the launcher reports it."""
        if LAUNCHER_PID not in os.environ:
            say(f"{name} received: the run stops after this step; a second signal ends it at once")

    def ending(self, name: str) -> None:
        """Do nothing; a subclass may act here before a second signal ends the process."""

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
def ends_at_signals(moment: str = " before the first step") -> Iterator[None]:
    """Raise Interrupted at the first signal, exit at the second. No effect outside the main thread."""
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
            say(f"{_heard.raised} received{moment}: ending")
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
    """Make signals end this process with one line of output."""
    for number in heard():
        signal.signal(number, _exit)
    if _is_launched():  # the launcher handles notices
        for number in NOTICES:
            signal.signal(number, signal.SIG_IGN)


def heard() -> list[signal.Signals]:
    """Return the signals that this process handles."""
    # a notice ignored at the start stays ignored (nohup)
    notices = [] if _is_launched() else NOTICES
    return [*SIGNALS, *(number for number in notices if signal.getsignal(number) is not signal.SIG_IGN)]


def awaited(number: int) -> bool:
    """Return whether other code handles the signal, as submitit does SIGUSR2."""
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
    """Make the kernel kill this worker when its launcher exits (Linux)."""
    if ELASTIC not in os.environ or not sys.platform.startswith("linux"):
        return
    end_with_parent(signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None and os.getppid() != int(launcher):
        os._exit(1)  # the launcher exited before the call above


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Make the kernel send a signal when the parent thread exits (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent() -> None:
    """End this ``multiprocessing`` process when its parent exits."""
    import multiprocessing

    # not prctl: the kernel's parent of a process of the fork server is that server
    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class _Heard:
    _at = -_ECHO_S
    raised: str | None = None
    blocks = 0  # of `ends_at_signals`, nested

    def is_echo(self) -> bool:
        now = time.monotonic()
        if ELASTIC in os.environ and now - self._at < _ECHO_S:
            return True
        self._at = now
        return False


_heard = _Heard()


def say(line: str) -> None:
    """Write one line to stderr. Safe in signal handlers."""
    # not Python's streams: a handler may run in the middle of a write
    with suppress(OSError):  # the reader of stderr may be gone
        os.write(2, f"{line}\n".encode())
