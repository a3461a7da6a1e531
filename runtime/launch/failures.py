"""First error of a job: each worker leaves its own in a file, and the launching process reports the first.

The files are those of torch elastic, so a torchrun of the user's own shows them too.
"""

import json
import os
import platform
import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphmoe.config.schema import ConfigError
from graphmoe.runtime.launch.flight_recorder import dump_lines, dumps_since

_OURS = "graphmoe"
_BROKEN_CONNECTION = re.compile(
    r"gloo/transport|[Cc]onnection (closed|reset) by peer|NCCL error|ncclRemoteError"
)
_OF_CONNECTIONS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
"""Errors of torch.distributed, by name: this module does not import torch."""


class RunFailed(RuntimeError):
    """A run cannot start or go on; the message says all that the user needs."""


@dataclass(frozen=True)
class Failure:
    """End of a worker that did not finish."""

    rank: int
    host: str
    message: str
    time: float
    """Seconds since the epoch."""
    status: int
    """Exit status; minus the signal that killed it."""
    attempt: str
    """Name by ``attempt_of``."""
    log: str | None = None
    """Log of the worker, which has the traceback."""
    wrong_config: bool = False
    suffered: bool = False
    """True for an error that a rank gets when another one has ended, or does not come."""

    @property
    def was_stopped(self) -> bool:
        """Tell whether it was asked to end, as elastic asks workers when another has failed."""
        return self.status in (-signal.SIGTERM, 128 + signal.SIGTERM)

    @property
    def was_killed(self) -> bool:
        """Tell whether it died without a word, as one that did not end when asked: elastic waits 30 s."""
        return self.status == -signal.SIGKILL and self.log is None

    @property
    def text(self) -> str:
        """Return one line for the user."""
        return f"rank {self.rank} on {self.host}: {self.message}"

    def raised(self, log_dir: Path, began: float) -> Exception:
        """The error of the launching process, which launched at ``began``, a time of ``time.time()``."""
        log = Path(self.log or log_dir / f"rank{self.rank}.log")
        lines = [self.text, *([f"log of rank {self.rank}: {log}"] if log.exists() else [])]
        text = "\n  ".join([*lines, *dump_lines(dumps_since(began, log.parent))])
        return ConfigError(text) if self.wrong_config else RunFailed(text)


def write_failure(error: BaseException, status: int, log_dir: Path | None) -> None:
    """Leave an error where elastic looks for it, and in the log folder, which all nodes share."""
    known = isinstance(error, (ConfigError, RunFailed, KeyboardInterrupt))
    message = str(error) if known else f"{type(error).__name__}: {error}"
    now, wrong_config = time.time(), isinstance(error, ConfigError)
    rank, log = int(os.environ.get("RANK", "0")), None
    if log_dir is not None:
        log = str(log_dir / f"rank{rank}.log")
    attempt = attempt_of(os.environ)
    suffered = not wrong_config and _is_of_others(error)
    failure = Failure(rank, platform.node(), message, now, status, attempt, log, wrong_config, suffered)
    trace = message if known else "".join(traceback.format_exception(error))
    asked = os.environ.get("TORCHELASTIC_ERROR_FILE")
    leave_failure(failure, trace, {log_dir} if log_dir else set(), {Path(asked)} if asked else set())


def leave_failure(
    failure: Failure, trace: str, log_dirs: Set[Path], more_files: Set[Path] = frozenset()
) -> None:
    """Write a failure to the rank's error file in log folders, and to other files, as elastic wants it."""
    extra = {"py_callstack": trace, "timestamp": str(int(failure.time))}
    document = {"message": {"message": failure.message, "extraInfo": extra}, _OURS: asdict(failure)}
    for path in {*more_files, *(error_file(folder, failure.rank) for folder in log_dirs)}:
        with suppress(OSError):  # a full disk may be the error
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def error_file(log_dir: Path, rank: int) -> Path:
    """Return the file in which a rank leaves its error."""
    return log_dir / f"rank{rank}.error.json"


def attempt_of(environment: Mapping[str, str]) -> str:
    """The job and its attempt, as elastic counts them for a worker; '/' without elastic."""
    return "/".join(environment.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))


def first_failure(of_agent: Mapping[int, Any], log_dir: Path, attempt: str) -> Failure | None:
    """The failure that came first, of this node's workers and of all that left a file beside theirs.

    ``of_agent`` are torch's ``ProcessFailure`` by rank. A worker that died without a word is known to be
    dead only at elastic's next look, so it counts a second earlier: others fail when it leaves them. Errors
    that look like that are named only if there are no others.
    """
    found = [*of_workers(of_agent, attempt)]
    folders = {log_dir, *(Path(failure.log).parent for failure in found if failure.log)}
    left = [failure for folder in folders for failure in _left_in(folder)]
    found += [failure for failure in left if failure.attempt == attempt]
    return min(found, key=lambda each: (each.was_stopped, each.suffered, each.time), default=None)


def silent_ranks(ranks: Iterable[int], log_dir: Path, attempt: str) -> list[int]:
    """Return the ranks of an ended attempt that left no error, as one that the system killed."""
    left = {failure.rank for failure in _left_in(log_dir) if failure.attempt == attempt}
    return sorted({*ranks} - left)


def of_workers(of_agent: Mapping[int, Any], attempt: str) -> Iterator[Failure]:
    """Yield the failures of a node's workers, from torch's ``ProcessFailure`` by rank."""
    for rank, failure in of_agent.items():
        if _OURS in failure.error_file_data:
            yield Failure(**failure.error_file_data[_OURS])
            continue
        status, when = failure.exitcode, failure.timestamp - 1
        message = f"killed by {failure.signal_name()}" if status < 0 else f"ended with status {status}"
        if status == -signal.SIGKILL:
            message += ", as a system does that is short of memory"
        aborted = status == -signal.SIGABRT  # as NCCL does to a process whose peers are gone
        yield Failure(rank, platform.node(), message, when, status, attempt, suffered=aborted)


def _is_of_others(error: BaseException | None) -> bool:
    while error is not None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & _OF_CONNECTIONS or _BROKEN_CONNECTION.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _left_in(log_dir: Path) -> Iterator[Failure]:
    for path in log_dir.glob("rank*.error.json"):
        try:
            yield Failure(**json.loads(path.read_text(encoding="utf-8"))[_OURS])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half written
