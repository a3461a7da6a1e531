"""Folders of one process each: a later process removes what a killed one has left."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from graphmoe.runtime.host.files import FileLock, is_locked

log = logging.getLogger(__name__)

ALIVE = "alive"
"""File in such a folder that its process holds locked."""
YOUNG_S = 10.0
"""Age below which a folder is not yet called dead: its process may not have locked it."""
FOREIGN_AGE_S = 7 * 24 * 3600.0
"""Age at which a folder of another host is dead, if its file is not locked."""


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder among the system's temporary files. *Raises* OSError."""
    folder, lock = make_temporary_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release()


def make_temporary_folder(prefix: str) -> tuple[Path, FileLock | None]:
    """Make a folder among the system's temporary files that stays when the block ends. *Raises* OSError."""
    parent = Path(tempfile.gettempdir())
    remove_dead(parent, prefix)
    return make_process_folder(parent, prefix)


def make_process_folder(parent: Path, prefix: str = "") -> tuple[Path, FileLock | None]:
    """Make a folder of this process; return it with the lock that says so. *Raises* OSError."""
    folder = parent / f"{prefix}{process_name()}"
    folder.mkdir(mode=0o700)  # what lies here may be run, so nobody else may write here
    try:
        return folder, FileLock.acquire(folder / ALIVE)
    except OSError:  # a file system without locks: the process id must do
        return folder, None


def process_name() -> str:
    """Return <host>-<pid>-<random>, which nothing else is called."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_dead(parent: Path, prefix: str = "") -> list[Path]:
    """Remove this user's folders whose processes have ended; return them."""
    dead = [folder for folder in parent.glob(f"{prefix}*-*-*") if is_dead(folder, prefix)]
    for folder in dead:
        log.info("removing %s, left by a process that has ended", folder)
        shutil.rmtree(folder, ignore_errors=True)
    return dead


def is_dead(folder: Path, prefix: str = "") -> bool:
    """Tell whether the process of a folder has ended; on another host, after days in which nothing tells."""
    host, pid, _ = folder.name.removeprefix(prefix).rsplit("-", 2)
    if not pid.isdigit() or not _is_mine(folder) or age_s(folder) < YOUNG_S or is_locked(folder / ALIVE):
        return False
    if host == socket.gethostname():
        return not psutil.pid_exists(int(pid))
    return age_s(folder) > FOREIGN_AGE_S


def age_s(path: Path) -> float:
    """Return the seconds since the last change; 0 for a file that is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _is_mine(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.getuid()
    except OSError:
        return False
