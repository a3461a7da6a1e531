"""Files that several processes write, or that must survive a crash or a full disk; folders of one process.

A lock on a file is freed by the kernel when its holder dies. Some file systems have no flock (Lustre mounted
without it, NFS without lockd). There a second file names the holder, and it counts for nothing once that
process is gone; only the holder's own host can tell.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from graphmoe.config.schema import ConfigError

log = logging.getLogger(__name__)

HELD = ".held"
"""Suffix of the file that stands for a lock where flock does not work."""
POLL_S = 0.1
ALIVE = "alive"
"""File in such a folder that its process holds locked."""
YOUNG_S = 10.0
"""Age below which a folder is not yet called dead: its process may not have locked it."""
FOREIGN_AGE_S = 7 * 24 * 3600.0
"""Age at which a folder of another host is dead, if its file is not locked."""
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_held: set[FileLock] = set()


def replace_text(path: Path, text: str, *, durably: bool = False) -> None:
    """Replace a file, whole at any moment; an error leaves nothing that takes room.

    durably: return once the text is on the disk, so that a power cut leaves the old text or the new one.
    """
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            if durably:
                stream.flush()
                os.fsync(stream.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    if durably:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the folder's list of names on the disk, so that a rename in it survives a power cut.

    A file system that cannot do so for folders (EINVAL) does it in its own time.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


class LineFile:
    """Whole lines at the end of a file; lines that its disk does not take are lost, with a warning."""

    def __init__(self, path: Path, tell: Callable[[str], object] = log.warning) -> None:
        self._path, self._tell = path, tell
        self._descriptor: int | None = None
        self._lost = 0

    def append(self, lines: Sequence[str]) -> None:
        """Hand lines to the operating system, so that a kill loses none."""
        try:
            self._write("".join(f"{line}\n" for line in lines).encode("utf-8", errors="backslashreplace"))
        except OSError as error:
            if not self._lost:
                why = error.strerror or error
                self._tell(f"{self._path} takes no more lines ({why}): they are lost, and the run goes on")
            self._lost += len(lines)
            return
        lost, self._lost = self._lost, 0
        if lost:
            self._tell(f"{self._path} takes lines again; lost are {lost}")

    def close(self) -> None:
        """Close the file, and tell how many lines its end lacks."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        lost, self._lost = self._lost, 0
        if lost:
            self._tell(f"{self._path} lacks the last lines, {lost} of them")

    def _write(self, content: bytes) -> None:
        """Write all of it or, as far as the disk lets us, nothing: half a line would spoil the next one."""
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        if end and os.pread(self._descriptor, 1, end - 1) != b"\n":
            content = b"\n" + content
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:
            os.ftruncate(self._descriptor, end)
            raise


@contextmanager
def dispensable(file: Path | str) -> Iterator[None]:
    """Let the block write a file; where the disk does not take it, the log says so and the run goes on."""
    try:
        yield
    except OSError as error:
        log.warning("%s is not written (%s); the run goes on", file, error.strerror or error)


class FileLock:
    """A lock held by this process and by no child of it; ``acquire`` makes one."""

    def __init__(self, descriptor: int | None, held: Path | None = None) -> None:
        self._descriptor, self._file = descriptor, held
        _held.add(self)
        _release_in_children()

    @classmethod
    def acquire(cls, path: Path, *, wait: bool = False) -> FileLock | None:
        """Return the lock, or None while somebody else has it; ``wait`` blocks until it is free.

        *Raises* ConfigError where flock does not work and the holder is, or was, on another host.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            if error.errno not in _NO_FLOCK:
                raise
            _say_once(path.parent, error.strerror)
        else:
            return cls(descriptor)
        held = path.with_name(path.name + HELD)
        while not _make(held):
            if not wait:
                return None
            time.sleep(POLL_S)
        return cls(None, held)

    def release(self) -> None:
        """Close our end; the lock is free once no process has it open."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Close our end in a forked child, which leaves its parent's file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._file = None
        _held.discard(self)


def is_locked(path: Path) -> bool:
    """Tell whether a process holds the lock on a file, which may not be there; not where nothing can tell."""
    if not path.exists():
        return False
    try:
        lock = FileLock.acquire(path)
    except (OSError, ConfigError):
        return False
    if lock is not None:
        lock.release()
    return lock is None


def _make(held: Path) -> bool:
    """Make the file, whole at once, that names us as the holder; False while another process holds it."""
    draft = _beside(held)
    try:
        draft.write_text(json.dumps(_holder(os.getpid())), encoding="utf-8")
        while True:
            try:
                os.link(draft, held)
                return True
            except FileExistsError:
                if not _is_free(held):
                    return False
    finally:
        draft.unlink(missing_ok=True)


def _is_free(held: Path) -> bool:
    """Tell whether nobody holds the file now; remove that of a dead process. *Raises* ConfigError."""
    try:
        text = held.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return True
    try:
        holder = json.loads(text)
        host, pid = str(holder["host"]), int(holder["pid"])
    except (ValueError, TypeError, KeyError):  # not ours
        host, pid, holder = "a host that it does not name", 0, {}
    ours = _holder(pid)
    if any(holder.get(name) != ours[name] for name in ("host", "processes")):
        raise ConfigError(
            f"{held} says that process {pid} on {host} writes here, and this file system has no locks that "
            f"could tell whether it still does; if it has ended, remove the file: rm {held}"
        )
    if ours["started"] is not None and holder.get("started") == ours["started"]:
        return False
    # Two may find the same dead holder: who moves away the other's new file puts it back
    aside = _beside(held)
    with contextlib.suppress(FileNotFoundError):
        held.rename(aside)
        if aside.read_text(encoding="utf-8", errors="replace") != text:
            with contextlib.suppress(FileExistsError):
                os.link(aside, held)
        aside.unlink()
    return True


def _beside(held: Path) -> Path:
    return held.with_name(f"{held.name}.{secrets.token_hex(4)}")


def _holder(pid: int) -> dict[str, str | int | None]:
    """A process as a file names it; ``started`` is None for one that is gone.

    Containers may share the host's name and not its process ids. The time is in ticks since the boot, which
    no change of the clock moves.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        started = f"{stat.rpartition(')')[2].split()[19]} of {boot}"
    except OSError:
        started = None
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        processes = ""
    return {"host": socket.gethostname(), "pid": pid, "processes": processes, "started": started}


@functools.cache
def _say_once(folder: Path, why: str) -> None:
    log.warning("%s has no file locks (%s): a file *%s names host and process instead", folder, why, HELD)


@functools.cache
def _release_in_children() -> None:
    """A forked child shares the locks and would hold them on after our death."""

    def forget_all() -> None:
        for lock in list(_held):
            lock.forget()

    def release_all() -> None:
        for lock in list(_held):
            lock.release()

    os.register_at_fork(after_in_child=forget_all)
    atexit.register(release_all)


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
        log.debug("removing %s, left by a process that has ended", folder)
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
