"""Torch's flight recorder: dumps of each rank's last NCCL or RCCL collectives.

Torch dumps after a collective's timeout, and on request by a pipe. Gloo has no recorder.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from graphmoe.runtime.launch.stamps import STAMPS

NAME = "flight_recorder.rank"
_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",)
_PIPES = "flight_recorder."
_ENTRIES = 2000
# torch polls its pipe once a second
_DUMP_S = 5.0
_TICK_S = 0.1  # file times may lag behind the clock
_MOST = 8


def set_flight_recorder(log_dir: Path | None) -> None:
    """Set torch's variables in this worker, unless the user has set them.

    Call it before the process group is made, and again once the log folder is known: torch reads the path at
    its first dump.
    """
    wanted = {_BUFFER: str(_ENTRIES), _ON_TIMEOUT: "1"}
    if log_dir is not None:
        wanted[_FILE] = str(log_dir.absolute() / NAME)
    if stamps := os.environ.get(STAMPS):
        wanted[_PIPE] = str(Path(stamps) / _PIPES)
    for names, value in wanted.items():
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


def ask_for_dumps(stamps: Path, ranks: Iterable[int], log_dir: Path) -> None:
    """Make workers dump, and wait some seconds for it."""
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


def dumps_since(began: float, log_dir: Path, environment: Mapping[str, str] = os.environ) -> dict[int, Path]:
    """Dumps of all nodes since ``began`` (``time.time()``), by rank."""
    named = next((environment[name] for name in _FILE if name in environment), None)
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
