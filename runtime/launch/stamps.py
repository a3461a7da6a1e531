"""Heartbeats of a worker: its current phase and that phase's time limit.

A heartbeat is a write to a memory-mapped file that the node's launcher reads: microseconds. The limit follows
from the longest step so far, except in first steps, which compile and autotune.
"""

import faulthandler
import json
import math
import mmap
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from graphmoe.config.masking import masked
from graphmoe.runtime.host.files import replace_text

STAMPS = "GRAPHMOE_STAMPS"
BEFORE_TRAINING_S = 12 * 3600.0  # one rank may tokenize a corpus; the others wait ``ranks.PATIENCE``
SLOW_S = 1800.0  # to compile or write a checkpoint, while other ranks may wait in a collective
TIMES_LONGEST = 3.0  # work counts as hung after this factor times the longest of its kind
SUFFIX, STACK, LOG_DIR = ".stamp", ".stack", ".log_dir"
T = TypeVar("T")
_SIZE = 512
_DUMP = signal.SIGUSR1


@dataclass(frozen=True)
class Stamp:
    """Newest heartbeat of a rank."""

    rank: int
    pid: int
    count: int
    step: int  # current or last one; 0 before the first
    phase: str
    limit_s: float  # a longer time without a heartbeat counts as hung


class _Writer:
    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self.count, self.folder = rank, 0, folder
        path = folder / f"{rank}{SUFFIX}"
        new = folder / f"{rank}.new"  # renamed when complete
        new.write_bytes(bytes(_SIZE))
        new.replace(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._stack = (folder / f"{rank}{STACK}").open("wb")
        faulthandler.register(_DUMP, file=self._stack, all_threads=True)

    def put(self, phase: str, limit_s: float, step: int) -> None:
        self.count += 1
        text = json.dumps([os.getpid(), self.count, step, limit_s, masked(phase)[:200]])
        self._map[:] = text.encode("ascii")[:_SIZE].ljust(_SIZE)


_writer: _Writer | None = None


def begin_stamps() -> None:
    """Start heartbeats if the launcher watches. Main thread only."""
    global _writer
    folder = os.environ.get(STAMPS)
    if folder is not None and Path(folder).is_dir():
        _writer = _Writer(Path(folder), int(os.environ["RANK"]))
        _writer.put("the start", BEFORE_TRAINING_S, 0)


def put_stamp(phase: str, limit_s: float, step: int) -> None:
    """Write a heartbeat; no effect without a watch."""
    if _writer is not None:
        _writer.put(phase, limit_s, step)


def wait_for(answer: Callable[[], T]) -> T:
    """Return ``answer()``, which waits for other ranks or the device; marks the wait in hang reports."""
    return answer()


def name_log_dir(log_dir: Path) -> None:
    """Tell this node's launcher the workers' log folder."""
    if _writer is not None:
        replace_text(_writer.folder / f"{_writer.rank}{LOG_DIR}", str(log_dir))


def read_stamp(path: Path) -> Stamp | None:
    """Return the newest heartbeat in a file; None if it is incomplete."""
    try:
        pid, count, step, limit_s, phase = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return Stamp(int(path.name.removesuffix(SUFFIX)), pid, count, step, phase, limit_s)


def ask_for_stacks(pid: int) -> None:
    """Make a worker write its stacks, even with the GIL held. *Raises* ProcessLookupError."""
    os.kill(pid, _DUMP)


class Heartbeat:
    """Heartbeats at each step, validation and checkpoint. No device sync."""

    def __init__(self, hang_timeout_s: int | None, first_steps: int) -> None:
        """``first_steps``: number of steps that compile, autotune or capture."""
        self._timeout_s = math.inf if hang_timeout_s is None else float(hang_timeout_s)
        self._first_steps, self._begun, self._step = first_steps, 0, 0
        self._longest: dict[str, float] = {}
        self._kind, self._since = "", 0.0
        self._has_read = False  # metrics of a step that did not compile, so its time is known

    def step(self, number: int) -> None:
        self._end()
        self._begun, self._step = self._begun + 1, number
        self._begin("step", f"step {number}", known=self._has_read)

    def has_read(self) -> None:
        """Note that the host waited for the device, so the longest step may now set the limit."""
        self._has_read = self._begun > self._first_steps

    def restart(self, what: str) -> None:
        """Mark the start of slow work; the steps after it get the limits of first steps, which compile."""
        self.slow(what)
        self._begun, self._has_read = 0, False

    def validation(self) -> None:
        """Mark the start of a validation; the first one has the limit of slow work."""
        self._end()
        self._begin("validation", f"the validation after step {self._step}", "validation" in self._longest)

    def slow(self, what: str) -> None:
        """Mark the start of work whose duration is not measured, such as disk writes."""
        self._end()
        self._begin("slow", what, known=False)

    def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        what = "the end of the run" if error is None else f"what follows {type(error).__name__}: {error}"
        # an error must propagate soon
        self._begin("end", what, known=error is not None)

    def _begin(self, kind: str, words: str, known: bool) -> None:
        self._kind, self._since = kind, time.monotonic()
        longest = self._longest.get(kind, 0.0)
        limit_s = max(self._timeout_s, TIMES_LONGEST * longest) if known else SLOW_S
        put_stamp(words, limit_s, self._step)

    def _end(self) -> None:
        # not of steps that compile
        if self._kind != "step" or self._begun > self._first_steps:
            took = time.monotonic() - self._since
            self._longest[self._kind] = max(took, self._longest.get(self._kind, 0.0))
