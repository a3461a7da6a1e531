"""Signs of life of a worker: its current work, and the longest time that this may take.

Signs lie in a file in memory that the launching process of the node reads (``hangs.py``), so one costs a
worker microseconds and no message. A worker that nobody watches leaves none. A collective stalls all ranks
if one does not join it, so a limit is needed after which a rank counts as hung. Only experience gives the
limit: the longest step so far. Steps before that compile and measure kernels.
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

from graphmoe.runtime.host.files import replace_text

STAMPS = "GRAPHMOE_STAMPS"
"""The folder of the stamps of this node's workers; set by the launching process where it watches them."""
BEFORE_TRAINING_S = 12 * 3600.0
"""Until the first step one rank may tokenise a corpus; the others wait ``ranks.PATIENCE`` for it."""
SLOW_S = 1800.0
"""Seconds that compiling or writing a checkpoint may take, as collectives of others may wait for it."""
SUFFIX, STACK, LOG_DIR = ".stamp", ".stack", ".log_dir"
T = TypeVar("T")
_SIZE = 512
_DUMP = signal.SIGUSR1


@dataclass(frozen=True)
class Stamp:
    """The newest sign of life of a rank."""

    rank: int
    pid: int
    count: int
    """Number of its signs so far."""
    step: int
    """The step that it is in or has done; 0 before the first."""
    phase: str
    limit_s: float
    """Without another sign for so long, it hangs."""


class _Writer:
    """Writer of this worker's signs to its file, and at SIGUSR1 of its threads' stacks to another."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self.count, self.folder = rank, 0, folder
        path = folder / f"{rank}{SUFFIX}"
        new = folder / f"{rank}.new"  # readers see no file that is not whole
        new.write_bytes(bytes(_SIZE))
        new.replace(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._stack = (folder / f"{rank}{STACK}").open("wb")
        faulthandler.register(_DUMP, file=self._stack, all_threads=True)

    def put(self, phase: str, limit_s: float, step: int) -> None:
        self.count += 1
        text = json.dumps([os.getpid(), self.count, step, limit_s, phase[:200]])
        self._map[:] = text.encode("ascii")[:_SIZE].ljust(_SIZE)


_writer: _Writer | None = None


def begin_stamps() -> None:
    """Start to leave signs of life, where the launching process watches. Of the main thread."""
    global _writer
    folder = os.environ.get(STAMPS)
    if folder is not None and Path(folder).is_dir():
        _writer = _Writer(Path(folder), int(os.environ["RANK"]))
        _writer.put("the start", BEFORE_TRAINING_S, 0)


def put_stamp(phase: str, limit_s: float, step: int) -> None:
    """Say what this worker does from now on; a few microseconds, and nothing where nobody watches."""
    if _writer is not None:
        _writer.put(phase, limit_s, step)


def wait_for(answer: Callable[[], T]) -> T:
    """Return ``answer()``, which waits for other ranks or the device.

    A hang report recognises this function in a stack, wherever its caller lies. Functions below
    ``torch.distributed`` and ``torch.cuda`` that are written in Python need it not.
    """
    return answer()


def name_log_dir(log_dir: Path) -> None:
    """Tell the launching process of this node where the workers' logs are, on a disk that all nodes share."""
    if _writer is not None:
        replace_text(_writer.folder / f"{_writer.rank}{LOG_DIR}", str(log_dir))


def read_stamp(path: Path) -> Stamp | None:
    """The newest sign in a rank's file; None where there is none yet, or it is being written."""
    try:
        pid, count, step, limit_s, phase = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return Stamp(int(path.name.removesuffix(SUFFIX)), pid, count, step, phase, limit_s)


def ask_for_stacks(pid: int) -> None:
    """Let a worker write the stacks of its threads, even where it holds Python's lock.

    *Raises* ProcessLookupError where it is gone.
    """
    os.kill(pid, _DUMP)


TIMES_LONGEST = 3.0
"""Factor over the longest known time of a kind of work, after which it counts as hung."""


class Heartbeat:
    """Stamp at each step, validation and checkpoint of a run. No device sync.

    A device works behind the host, which waits for it where it reads metrics. So the host knows how long a
    step may take at most once it has read those of steps that did not compile.
    """

    def __init__(self, hang_timeout_s: int | None, first_steps: int) -> None:
        """``first_steps`` compile, measure or capture."""
        self._timeout_s = math.inf if hang_timeout_s is None else float(hang_timeout_s)
        self._first_steps, self._begun, self._step = first_steps, 0, 0
        self._longest: dict[str, float] = {}
        """Seconds, of each kind of work that is known."""
        self._kind, self._since = "", 0.0
        self._has_read = False

    def step(self, number: int) -> None:
        """Stamp the begin of a step."""
        self._end()
        self._begun, self._step = self._begun + 1, number
        self._begin("step", f"step {number}", known=self._has_read)

    def has_read(self) -> None:
        """Note that the host has waited for the device, in the step that was begun last."""
        self._has_read = self._begun > self._first_steps

    def restart(self, what: str) -> None:
        """Stamp the begin of steps that may compile, as the first ones did."""
        self.slow(what)
        self._begun, self._has_read = 0, False

    def validation(self) -> None:
        """Stamp the begin of a validation; nothing tells how long the first one takes."""
        self._end()
        self._begin("validation", f"the validation after step {self._step}", "validation" in self._longest)

    def slow(self, what: str) -> None:
        """Stamp the begin of work that waits for disks."""
        self._end()
        self._begin("slow", what, known=False)

    def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stamp the end of the loop; an error must not take long to get out."""
        self._end()
        what = "the end of the run" if error is None else f"what follows {type(error).__name__}: {error}"
        self._begin("end", what, known=error is not None)

    def _begin(self, kind: str, words: str, known: bool) -> None:
        self._kind, self._since = kind, time.monotonic()
        longest = self._longest.get(kind, 0.0)
        limit_s = max(self._timeout_s, TIMES_LONGEST * longest) if known else SLOW_S
        put_stamp(words, limit_s, self._step)

    def _end(self) -> None:
        """Remember how long the work took that was begun last, unless it compiled steps."""
        if self._kind != "step" or self._begun > self._first_steps:
            took = time.monotonic() - self._since
            self._longest[self._kind] = max(took, self._longest.get(self._kind, 0.0))
