"""Folders that running jobs compile to: made, recognised as dead, removed, and shown to torch."""

from __future__ import annotations

import contextlib
import errno
import grp
import logging
import os
import pwd
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from graphmoe.config.schema import ConfigError
from graphmoe.runtime.cache.blobs import age_s, make_folder, write_whole
from graphmoe.runtime.cache.entries import INDUCTOR, TRITON, process_name
from graphmoe.runtime.host.file_lock import FileLock

log = logging.getLogger(__name__)

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": INDUCTOR, "TRITON_CACHE_DIR": TRITON}
"""Where torch and Triton look for their caches, and the folder of ours that it should be."""
OURS = "GRAPHMOE_WORK_FOLDER"
"""Says which work folder a variable points to that the user has not set."""
TEMPORARY = "graphmoe-work-"
"""Begins the name of a work folder among other temporary files."""
ALIVE = "alive"
"""File that the process of a work folder holds locked."""
TAG_FILE = "CACHEDIR.TAG"
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Compiled code of graphmoe, docs/cache.md.\n"
"""Says that the folder is a cache (bford.info/cachedir). Backups leave it out, the tool prunes no other."""
MIN_FREE_BYTES = 256 * 2**20
"""A disk with less room counts as full: a cold compilation would not fit."""
YOUNG_S = 10.0
"""Age below which a work folder is not yet called dead: its process may not have locked it."""
FOREIGN_AGE_S = 7 * 24 * 3600.0
"""Age at which one of another host is dead, if its file is not locked."""


def check_trusted(folder: Path, *, shared: bool) -> None:
    """Refuse a cache that others may write to, for what lies there is run; as sshd does with its files.

    The folder, all above it and links on the way to it belong to this user or root, and no group and nobody
    else may write there; so does all inside, where others may enter. ``shared`` allows groups, and other
    owners. Above it, a folder in which nobody may remove what is another's (/tmp) is fine.

    *Raises* ConfigError.
    """
    place = folder.resolve()
    for path in (*reversed(folder.absolute().parents), folder, *reversed(place.parents)):
        _check_trusted(path, folder, shared, is_above=path != folder or path.is_symlink())
    _check_trusted(place, folder, shared)
    if not place.is_dir() or not place.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        return
    for root, folders, files in os.walk(place):  # which passes over what goes meanwhile
        for inside in (Path(root, name) for name in (*folders, *files)):
            _check_trusted(inside, folder, shared)
            if inside.is_symlink():
                target = inside.resolve()
                for path in (*target.parents, target):
                    _check_trusted(path, folder, shared, is_above=path != target)


def _check_trusted(path: Path, cache: Path, shared: bool, *, is_above: bool = False) -> None:
    try:
        status = path.lstat()
    except OSError:
        return
    mode = 0 if stat.S_ISLNK(status.st_mode) else stat.S_IMODE(status.st_mode)  # a link has its target's
    is_sticky = is_above and bool(mode & stat.S_ISVTX)
    by_group = mode & stat.S_IWGRP and not shared and not _is_own_group(status.st_gid)
    is_open = (by_group or mode & stat.S_IWOTH) and not is_sticky
    if is_open or not (shared or status.st_uid in (0, os.getuid())):
        trust = "" if mode & stat.S_IWOTH else ", compile.cache_shared=true if you trust its group"
        raise ConfigError(
            f"compile.cache_dir={cache} holds code and bytecode that are run, and {path} belongs to "
            f"{_owner(status)} with mode {mode:04o}, so that others may write there; use chmod -R go-w "
            f"{path}, another compile.cache_dir or GRAPHMOE_CACHE{trust}, or compile.cache=false"
        )


def _is_own_group(gid: int) -> bool:
    """Whether a group is the user's private one, of which nobody else is (Debian, Fedora)."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}


def _owner(status: os.stat_result) -> str:
    try:
        return pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return f"user {status.st_uid}"


def make_cache(folder: Path, *, shared: bool = False) -> None:
    """Make the cache's folder, for this user or his group, if it is not there.

    *Raises* OSError, also for a disk that is nearly full.
    """
    if not folder.is_dir():
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            folder.chmod(0o2770 if shared else 0o700)
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, f"{free / 2**20:.0f} MiB are free")
    if not (folder / TAG_FILE).exists():
        write_whole(folder / TAG_FILE, TAG.encode())


def make_work_folder(parent: Path, prefix: str = "") -> tuple[Path, FileLock | None]:
    """A new folder of this process, and the lock that says so. *Raises* OSError."""
    make_folder(parent)
    folder = parent / f"{prefix}{process_name()}"
    folder.mkdir(mode=0o700)  # what lies here is run, so nobody else may write here
    return folder, _lock(folder)


def make_temporary_folder() -> tuple[Path, FileLock | None]:
    """The same in the system's folder for temporary files. *Raises* OSError."""
    remove_dead(Path(tempfile.gettempdir()), TEMPORARY)
    return make_work_folder(Path(tempfile.gettempdir()), TEMPORARY)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder for the block; where its process is killed, a later one removes it. *Raises* OSError."""
    parent = Path(tempfile.gettempdir())
    remove_dead(parent, prefix)
    folder, lock = make_work_folder(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release()


def remove_dead(parent: Path, prefix: str = "") -> list[Path]:
    """Remove this user's folders whose processes have ended; returns them."""
    dead = [folder for folder in parent.glob(f"{prefix}*-*-*") if is_dead(folder, prefix)]
    for folder in dead:
        log.info("removing %s, left by a process that has ended", folder)
        shutil.rmtree(folder, ignore_errors=True)
    return dead


def is_dead(folder: Path, prefix: str = "") -> bool:
    """Whether the process of a work folder has ended; one of another host has if nothing tells for long."""
    host, pid, _ = folder.name.removeprefix(prefix).rsplit("-", 2)
    if not pid.isdigit() or not _is_mine(folder) or age_s(folder) < YOUNG_S or _is_locked(folder):
        return False
    if host == socket.gethostname():
        return not psutil.pid_exists(int(pid))
    return age_s(folder) > FOREIGN_AGE_S


def point_torch_at(work: Path) -> list[str]:
    """Let torch and Triton keep their caches in a work folder, each unless the user has set another place.

    Returns the variables that were set.
    """
    names = [name for name in VARIABLES if not is_users(name)]
    for name in names:
        os.environ[name] = str(work / VARIABLES[name])
    os.environ[OURS] = str(work)
    return names


def point_torch_away(work: Path) -> None:
    """Take back what `point_torch_at` has set, where it still holds."""
    for name, part in VARIABLES.items():
        if os.environ.get(name) == str(work / part):
            del os.environ[name]
    if os.environ.get(OURS) == str(work):
        del os.environ[OURS]


def is_users(name: str) -> bool:
    """Whether the user has set one of `VARIABLES`: not we, nor torch, which sets its own default."""
    value = os.environ.get(name)
    if not value:
        return False
    if OURS in os.environ and Path(value).is_relative_to(os.environ[OURS]):
        return False
    path = Path(value)
    return not (path.parent == Path(tempfile.gettempdir()) and path.name.startswith("torchinductor_"))


def _is_mine(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.getuid()
    except OSError:
        return False


def _lock(folder: Path) -> FileLock | None:
    try:
        return FileLock.take(folder / ALIVE)
    except OSError:  # a file system without locks: the process id must do
        return None


def _is_locked(folder: Path) -> bool:
    if not (folder / ALIVE).exists():
        return False
    try:
        lock = FileLock.take(folder / ALIVE)
    except (OSError, ConfigError):  # no locks, and no process of this host: its age must do
        return False
    if lock is not None:
        lock.release()
    return lock is None
