"""Detection of hung workers: reports the position in the code, ends the job (docs/launch.md).

If one hangs, the others wait for it and exceed their limits at about the same time. The report names the
worker that does not wait, else the one furthest behind.
"""

import os
import platform
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from graphmoe.runtime.host.files import ALIVE, temporary_folder
from graphmoe.runtime.launch import stamps
from graphmoe.runtime.launch.failures import Failure, ask_for_dumps, leave_failure

_LONGEST_LOOK_S = 1.0  # more is not counted: if the launcher was suspended, the workers were too
_STACKS_S = 3.0
_MOST_OTHERS = 8
_FRAME = re.compile(r'  File "([^"]+)", line (\d+) in (.+)')
# files of torch whose functions wait for other ranks, or for the device, which may wait for them
_WAITING = re.compile(r"torch/(distributed|cuda)/")
_WAIT = stamps.wait_for.__code__.co_filename, stamps.wait_for.__name__


@dataclass
class _Watched:
    stamp: stamps.Stamp
    late_s: float = 0.0  # since the heartbeat
    stopped_s: float = 0.0  # since its process was stopped (SIGSTOP)
    stacks: str = ""  # of faulthandler; empty without an answer

    def hangs(self, timeout_s: float) -> bool:
        return self.late_s > self.stamp.limit_s or self.stopped_s > timeout_s

    @property
    def waits(self) -> bool:
        frames = _FRAME.findall(self.stacks)
        return any(_WAITING.search(path) or (path, name) == _WAIT for path, _, name in frames)

    @property
    def place(self) -> str:
        if self.stopped_s:
            return "its process is stopped (SIGSTOP)"
        newest_first = _FRAME.findall(self.stacks.strip().split("\n\n")[-1])  # of the main thread
        frames = [frame for frame in newest_first if (frame[0], frame[2]) != _WAIT]
        if not frames:
            return "its position is unknown"
        ours = [each for each in frames if not re.search("site-packages|/lib/python", each[0])]
        named = dict.fromkeys([frames[0], *ours[:1]])
        how = "it waits for other ranks or the device" if self.waits else "it is"
        return f"{how} at {', called at '.join(f'{path}:{line} ({name})' for path, line, name in named)}"


class HangWatch:
    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        self._watched: dict[int, _Watched] = {}
        self._looked = time.monotonic()
        self.log_dir: Path | None = None

    def look(self, attempt: str, log_dir: Path) -> None:
        """If a worker hangs, report it and kill all workers of this node. Call it every second."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        for path in self._folder.glob(f"*{stamps.SUFFIX}"):
            if stamp := stamps.read_stamp(path):
                self._note(stamp, passed)
        ranks = sorted(self._watched.values(), key=lambda watched: watched.stamp.rank)
        if self.log_dir is None:
            named = [path.read_text(encoding="utf-8") for path in self._folder.glob(f"*{stamps.LOG_DIR}")]
            self.log_dir = Path(named[0]) if named else None
        if not any(watched.hangs(self._timeout_s) for watched in ranks):
            return
        # if a worker has ended, elastic ends the others
        if all(_status(watched.stamp.pid) is not None for watched in ranks):
            self._end(ranks, attempt, log_dir)

    def _note(self, stamp: stamps.Stamp, passed: float) -> None:
        known = self._watched.get(stamp.rank)
        if known is None or known.stamp != stamp:
            self._watched[stamp.rank] = _Watched(stamp)
            return
        known.late_s += passed
        stopped = known.late_s > _LONGEST_LOOK_S and _status(stamp.pid) == psutil.STATUS_STOPPED
        known.stopped_s = known.stopped_s + passed if stopped else 0.0

    def _end(self, ranks: Sequence[_Watched], attempt: str, log_dir: Path) -> None:
        their_logs = self.log_dir or log_dir
        self._ask_for_stacks(ranks)
        ask_for_dumps(self._folder, [each.stamp.rank for each in ranks], their_logs)
        first, *others = sorted(ranks, key=lambda each: (each.waits, each.stamp.step, -each.late_s))
        for each in ranks:
            log = their_logs / f"rank{each.stamp.rank}.log"
            message = f"no progress for {each.late_s:.0f} s in {each.stamp.phase}: {each.place}"
            with suppress(OSError), log.open("a", encoding="utf-8") as file:
                text = f"ERROR {message}\n{each.stacks}".rstrip()
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            if each is first:
                message = "\n  ".join([message, *_lines(others)])
            failure = Failure(
                each.stamp.rank,
                platform.node(),
                message,
                time.time() - each.late_s,
                -signal.SIGKILL,
                attempt,
                str(log),
                suffered=each is not first or each.waits,
            )
            leave_failure(failure, each.stacks, {log_dir, their_logs})
        for each in ranks:
            with suppress(ProcessLookupError):
                os.killpg(each.stamp.pid, signal.SIGKILL)  # elastic gives each worker a group of its own
        for path in self._folder.iterdir():
            if not path.name.startswith(ALIVE):  # or the lock's own files
                path.unlink()
        self._watched.clear()

    def _ask_for_stacks(self, ranks: Sequence[_Watched]) -> None:
        files = [self._folder / f"{each.stamp.rank}{stamps.STACK}" for each in ranks]
        for each in ranks:
            with suppress(ProcessLookupError):
                stamps.ask_for_stacks(each.stamp.pid)
        # a worker that is stopped or blocked in the kernel does not answer
        end, before = time.monotonic() + _STACKS_S, None
        while time.monotonic() < end:
            time.sleep(0.2)
            sizes = [file.stat().st_size for file in files]
            if sizes == before and all(sizes):
                break
            before = sizes
        for each, file in zip(ranks, files, strict=True):
            each.stacks = file.read_text("utf-8", errors="replace")


@contextmanager
def watching(timeout_s: float | None) -> Iterator[tuple[HangWatch | None, dict[str, str]]]:
    """Yield a hang watch, and environment variables for workers; None and {} without a timeout."""
    if timeout_s is None:
        yield None, {}
        return
    with temporary_folder("graphmoe-stamps-") as folder:
        yield HangWatch(folder, timeout_s), {stamps.STAMPS: str(folder)}


def _lines(others: Sequence[_Watched]) -> list[str]:
    found = [f"rank {p.stamp.rank} is in {p.stamp.phase}: {p.place}" for p in others[:_MOST_OTHERS]]
    more = len(others) - len(found)
    return [*found, f"and {more} more"] if more else found


def _status(pid: int) -> str | None:
    try:
        status = str(psutil.Process(pid).status())
    except psutil.Error:
        return None
    return None if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else status
