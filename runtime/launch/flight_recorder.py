"""Torch's flight recorder: the last collectives of NCCL or RCCL on each rank, in a file where one hangs.

Torch dumps it by itself where a collective times out, and when it is asked by a pipe. Gloo has none.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from graphmoe.runtime.launch.stamps import STAMPS

NAME = "flight_recorder.rank"
"""Prefix of the names of dumps, before the rank."""
_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",)
_PIPES = "flight_recorder."
_ENTRIES = 2000
_DUMP_S = 5.0
"""Torch looks at its pipe once a second."""
_TICK_S = 0.1
"""Times of files may lie so far before the clock's."""
_MOST = 8


def set_flight_recorder(log_dir: Path | None) -> None:
    """Set torch's variables in this worker; those that the user has set, by any of their names, stay.

    To be called before the process group is made, and again once the log folder is known, if it was not:
    torch reads where dumps go at the first of them.
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
    """Let workers of this node dump, and wait some seconds until they have; not of one without a pipe."""
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
    """Dumps that were written since a time of ``time.time()``, of all nodes, by rank and in that order."""
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
    """Return the lines of an error about dumps by rank; none where there is no dump."""
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
