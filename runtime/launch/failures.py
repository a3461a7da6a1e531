"""First error of a job, and dumps of torch's flight recorder of NCCL or RCCL collectives.

Each worker writes its error to a file in torch elastic's format, and the launcher reports the earliest. The
recorder dumps after a collective's timeout, and on request by a pipe. Gloo has none.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from graphmoe.config.masking import masked
from graphmoe.config.schema import ConfigError
from graphmoe.runtime.launch.stamps import STAMPS

_OURS = "graphmoe"
_BROKEN_CONNECTION = re.compile(
    r"gloo/transport|[Cc]onnection (closed|reset) by peer|NCCL error|ncclRemoteError"
)
# of torch.distributed, by name: this module does not import torch
_OF_CONNECTIONS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
NAME = "flight_recorder.rank"
_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",)
_PIPES = "flight_recorder."
_ENTRIES = 2000
_DUMP_S = 5.0  # torch polls its pipe once a second
_TICK_S = 0.1  # file times may lag behind the clock
_MOST = 8


class RunFailed(RuntimeError):
    """Failure to start or continue a run; the message needs no traceback."""

    status = 1  # exit status
    here = True  # False if the cause is another rank


class DeviceFault(RunFailed):
    """Repeatedly wrong results of a device, which the message names."""

    status = 3

    def __init__(self, message: str, *, here: bool = True) -> None:
        super().__init__(message)
        self.here = here


@dataclass(frozen=True)
class Failure:
    """Record of a worker that ended without finishing."""

    rank: int
    host: str
    message: str
    time: float  # seconds since the epoch
    status: int  # exit status, or minus the signal
    attempt: str  # by ``attempt_of``
    log: str | None = None
    wrong_config: bool = False
    suffered: bool = False  # caused by another rank that ended or is missing

    @property
    def was_stopped(self) -> bool:
        # elastic asked it to end because another worker failed
        return self.status in (-signal.SIGTERM, 128 + signal.SIGTERM)

    @property
    def was_killed(self) -> bool:
        # elastic kills 30 s after asking to end
        return self.status == -signal.SIGKILL and self.log is None

    @property
    def text(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.message}"

    def raised(self, log_dir: Path, began: float) -> Exception:
        """Return the error that ends the launcher, which started at ``began`` (``time.time()``)."""
        log = Path(self.log or log_dir / f"rank{self.rank}.log")
        lines = [self.text, *([f"log of rank {self.rank}: {log}"] if log.exists() else [])]
        text = "\n  ".join([*lines, *dump_lines(dumps_since(began, log.parent))])
        failed = DeviceFault if self.status == DeviceFault.status else RunFailed
        return ConfigError(text) if self.wrong_config else failed(text)


def write_failure(error: BaseException, status: int, log_dir: Path | None) -> None:
    """Write an error to elastic's error file and the shared log folder."""
    known = isinstance(error, (ConfigError, RunFailed, KeyboardInterrupt))
    message = str(error) if known else f"{type(error).__name__}: {error}"
    now, wrong_config = time.time(), isinstance(error, ConfigError)
    rank, log = int(os.environ.get("RANK", "0")), None
    if log_dir is not None:
        log = str(log_dir / f"rank{rank}.log")
    attempt = attempt_of(os.environ)
    suffered = not wrong_config and (_is_of_others(error) or not getattr(error, "here", True))
    failure = Failure(rank, platform.node(), message, now, status, attempt, log, wrong_config, suffered)
    trace = message if known else "".join(traceback.format_exception(error))
    asked = os.environ.get("TORCHELASTIC_ERROR_FILE")
    leave_failure(failure, trace, {log_dir} if log_dir else set(), {Path(asked)} if asked else set())


def leave_failure(
    failure: Failure, trace: str, log_dirs: Set[Path], more_files: Set[Path] = frozenset()
) -> None:
    """Write a failure in torch elastic's format to log folders and other files."""
    failure = replace(failure, message=masked(failure.message))
    extra = {"py_callstack": masked(trace), "timestamp": str(int(failure.time))}
    document = {"message": {"message": failure.message, "extraInfo": extra}, _OURS: asdict(failure)}
    for path in {*more_files, *(error_file(folder, failure.rank) for folder in log_dirs)}:
        with suppress(OSError):  # a full disk may be the error
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def error_file(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank{rank}.error.json"


def attempt_of(environment: Mapping[str, str]) -> str:
    """Return job and restart count, from elastic's variables."""
    return "/".join(environment.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))


def first_failure(of_agent: Mapping[int, Any], log_dir: Path, attempt: str) -> Failure | None:
    """Return the earliest failure of this node's workers (``of_agent``, by rank) or in the log folder."""
    found = [*of_workers(of_agent, attempt)]
    folders = {log_dir, *(Path(failure.log).parent for failure in found if failure.log)}
    left = [failure for folder in folders for failure in _left_in(folder)]
    found += [failure for failure in left if failure.attempt == attempt]
    # failures caused by other ranks are last
    return min(found, key=lambda each: (each.was_stopped, each.suffered, each.time), default=None)


def silent_ranks(ranks: Iterable[int], log_dir: Path, attempt: str) -> list[int]:
    """Return the ranks that left no error, such as those that the system killed."""
    left = {failure.rank for failure in _left_in(log_dir) if failure.attempt == attempt}
    return sorted({*ranks} - left)


def of_workers(of_agent: Mapping[int, Any], attempt: str) -> Iterator[Failure]:
    for rank, failure in of_agent.items():
        if _OURS in failure.error_file_data:
            yield Failure(**failure.error_file_data[_OURS])
            continue
        # elastic notices a killed worker up to a second late, after the errors that its peers got from it
        status, when = failure.exitcode, failure.timestamp - 1
        message = f"killed by {failure.signal_name()}" if status < 0 else f"ended with status {status}"
        if status == -signal.SIGKILL:
            message += ", as a system does that is short of memory"
        if status == -signal.SIGBUS:
            message += ": a mapped file became shorter (data.paths), or its disk or /dev/shm is full or fails"
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


def set_flight_recorder(log_dir: Path | None) -> None:
    """Set the recorder's variables: before the process group is made, again once the log folder is known."""
    wanted = {_BUFFER: str(_ENTRIES), _ON_TIMEOUT: "1"}
    if log_dir is not None:  # torch reads it at its first dump
        wanted[_FILE] = str(log_dir.absolute() / NAME)
    if stamps := os.environ.get(STAMPS):
        wanted[_PIPE] = str(Path(stamps) / _PIPES)
    for names, value in wanted.items():
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


def ask_for_dumps(stamps: Path, ranks: Iterable[int], log_dir: Path) -> None:
    """Make workers dump their flight recorders; wait some seconds for the files."""
    began, asked = time.time(), set[int]()
    for rank in ranks:
        with suppress(OSError):  # there is none, or nobody reads it
            pipe = os.open(stamps / f"{_PIPES}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1")
                asked.add(rank)
            finally:
                os.close(pipe)
    end, before = time.monotonic() + _DUMP_S, [0]
    while asked and time.monotonic() < end:
        time.sleep(0.2)
        found = dumps_since(began, log_dir)  # in a folder that all nodes share
        sizes = [found[rank].stat().st_size for rank in sorted(asked & found.keys())]
        if len(sizes) == len(asked) and sizes == before and all(sizes):
            return
        before = sizes


def dumps_since(began: float, log_dir: Path) -> dict[int, Path]:
    """Dumps of all nodes since ``began`` (``time.time()``), by rank."""
    named = next((os.environ[name] for name in _FILE if name in os.environ), None)
    prefix = Path(named) if named else log_dir / NAME
    found = {}
    with suppress(OSError):
        for path in prefix.parent.iterdir():
            rank = re.fullmatch(re.escape(prefix.name) + r"(\d+)", path.name)
            if rank and path.stat().st_mtime >= began - _TICK_S:
                found[int(rank[1])] = path
    return dict(sorted(found.items()))


def dump_lines(dumps: Mapping[int, Path]) -> list[str]:
    if not dumps:
        return []
    paths = [*dumps.values()]
    names = ", ".join(path.name for path in paths[:_MOST])
    more = f" and {len(paths) - _MOST} more" if len(paths) > _MOST else ""
    folder, prefix = paths[0].parent, re.sub(r"\d+$", "", paths[0].name)
    return [
        f"torch's flight recorder has the last collectives of each rank: {names}{more} in {folder}",
        f"to compare them: torchfrtrace {folder} --prefix {prefix}",
    ]
