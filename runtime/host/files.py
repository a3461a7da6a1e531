"""Files written by several processes or that must survive a crash; checksums; per-process folders.

Without flock (Lustre mounted without it, NFS without lockd) a second file names the process that holds a
lock. The lock is stale once that process has ended, which only its own host can check.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from graphmoe.config.schema import ConfigError
from graphmoe.config.untrusted import open_at_once

log = logging.getLogger(__name__)

HELD = ".held"  # suffix of the file that replaces a lock without flock
POLL_S = 0.1
ALIVE = "alive"  # locked by the folder's process
YOUNG_S = 10.0  # a younger folder may not be locked yet
FOREIGN_AGE_S = 7 * 24 * 3600.0  # then an unlocked folder of another host counts as dead
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_held: set[FileLock] = set()


def replace_text(path: Path, text: str, *, durably: bool = False) -> None:
    """Replace a file atomically; ``durably``: a power cut leaves the old or the new text."""
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


def link_in(folder: Path, passed_over: Collection[str]) -> Path | None:
    """Return a link in a folder; folders named ``passed_over`` directly in it may contain links."""
    for root, folders, files in os.walk(folder):
        for path in (Path(root, name) for name in (*folders, *files)):
            if path.is_symlink():
                return path
        if root == str(folder):
            folders[:] = [name for name in folders if name not in passed_over]
    return None


def sync_folder(folder: Path) -> None:
    """Fsync a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


class LineFile:
    """Append-only file of whole lines; warns of lines that cannot be written."""

    def __init__(self, path: Path, tell: Callable[[str], object] = log.warning) -> None:
        self._path, self._tell = path, tell
        self._descriptor: int | None = None
        self._lost = 0

    def append(self, lines: Sequence[str]) -> None:
        try:
            # a write to the kernel, not a buffer: a kill loses nothing
            self._write("".join(f"{line}\n" for line in lines).encode("utf-8", errors="backslashreplace"))
        except OSError as error:
            if not self._lost:
                why = error.strerror or error
                self._tell(f"{self._path} takes no more lines ({why}): they are lost, and the run goes on")
            self._lost += len(lines)
            return
        self._tell_lost("takes lines again; lost are {}")

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._tell_lost("lacks the last lines, {} of them")

    def _tell_lost(self, what: str) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            self._tell(f"{self._path} {what.format(lost)}")

    def _write(self, content: bytes) -> None:
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
            os.ftruncate(self._descriptor, end)  # half a line would corrupt the next one
            raise


@dataclass(frozen=True)
class FileSum:
    sha256: str
    num_bytes: int


def sha256_of(path: Path, stops: Callable[[], bool] = lambda: False) -> str:
    """SHA-256 of a file in hexadecimal; of a prefix if ``stops`` becomes true while reading."""
    digest = hashlib.sha256()
    with open(path, "rb", opener=open_at_once) as file:
        while not stops() and (block := file.read(4 << 20)):
            digest.update(block)
    return digest.hexdigest()


def sum_of(path: Path) -> FileSum:
    return FileSum(sha256_of(path), path.stat().st_size)


def difference(path: Path, written: FileSum, *, contents: bool = True) -> str | None:
    """Describe how a file differs from its checksum; None if it matches."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a FIFO would block until it has a writer
            return f"{path.name}: not a regular file"
        if found.st_size != written.num_bytes:
            return f"{path.name}: {found.st_size} bytes, written with {written.num_bytes}"
        if contents and (sha256 := sha256_of(path)) != written.sha256:
            return f"{path.name}: sha256 {sha256[:12]}..., written with {written.sha256[:12]}..."
    except OSError as error:
        return f"{path.name}: cannot be read ({error})"
    return None


@contextmanager
def dispensable(file: Path | str) -> Iterator[None]:
    """Turn OSErrors of a block that writes ``file`` into a warning."""
    try:
        yield
    except OSError as error:
        log.warning("%s is not written (%s); the run continues", file, error.strerror or error)


class FileLock:
    """Lock held by this process and not by its children; made by ``acquire``."""

    def __init__(self, descriptor: int | None, held: Path | None = None) -> None:
        self._descriptor, self._file = descriptor, held
        _held.add(self)
        _release_in_children()

    @classmethod
    def acquire(cls, path: Path, *, wait: bool = False) -> FileLock | None:
        """Return the lock; None if it is taken. *Raises* ConfigError if another host may hold it."""
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
        """Close this process's file; the lock is released once no process has it open."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._file = None
        _held.discard(self)


def is_locked(path: Path) -> bool:
    """Return whether a process is known to hold the lock."""
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
    draft = _beside(held)
    try:
        # written first, then linked: the lock file is never seen half written
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
    # Two processes may find the same dead holder: one that moved the other's new file restores it
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
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        # ticks since boot, which changes of the clock do not affect
        started = f"{stat.rpartition(')')[2].split()[19]} of {boot}"
    except OSError:
        started = None
    try:
        # containers may share a host name but not process ids
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        processes = ""
    return {"host": socket.gethostname(), "pid": pid, "processes": processes, "started": started}


@functools.cache
def _say_once(folder: Path, why: str) -> None:
    log.warning(
        "%s has no file locks (%s): files that end in %s name host and process of the owners instead",
        folder,
        why,
        HELD,
    )


@functools.cache
def _release_in_children() -> None:
    def end_all(end: Callable[[FileLock], None]) -> None:
        for lock in list(_held):
            end(lock)

    # a forked child shares the locks and would keep them after this process has ended
    os.register_at_fork(after_in_child=lambda: end_all(FileLock.forget))
    atexit.register(end_all, FileLock.release)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new temporary folder, removed after the block. *Raises* OSError."""
    folder, lock = make_temporary_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release()


def make_temporary_folder(prefix: str) -> tuple[Path, FileLock | None]:
    """Make a temporary folder and its lock; the caller removes the folder, then releases the lock."""
    parent = Path(tempfile.gettempdir())
    remove_dead(parent, prefix)
    return make_process_folder(parent, prefix)


def make_process_folder(parent: Path, prefix: str = "") -> tuple[Path, FileLock | None]:
    """Make a folder named after this process, with the lock that marks it. *Raises* OSError."""
    folder = parent / f"{prefix}{process_name()}"
    folder.mkdir(mode=0o700)  # files here may be executed, so no other user may write here
    try:
        return folder, FileLock.acquire(folder / ALIVE)
    except OSError:  # without file locks the process id decides
        return folder, None


def process_name() -> str:
    """Return a new unique name: <host>-<pid>-<random>."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_dead(parent: Path, prefix: str = "") -> list[Path]:
    """Remove this user's folders whose processes have ended; return them."""
    dead = [folder for folder in parent.glob(f"{prefix}*-*-*") if is_dead(folder, prefix)]
    for folder in dead:
        log.debug("removing %s, left by a process that has ended", folder)
        shutil.rmtree(folder, ignore_errors=True)
    return dead


def is_dead(folder: Path, prefix: str = "") -> bool:
    """Return whether the process of a folder has ended."""
    host, pid, _ = folder.name.removeprefix(prefix).rsplit("-", 2)
    try:
        is_mine = folder.stat().st_uid == os.getuid()
    except OSError:
        return False
    if not pid.isdigit() or not is_mine or age_s(folder) < YOUNG_S or is_locked(folder / ALIVE):
        return False
    if host == socket.gethostname():
        return not psutil.pid_exists(int(pid))
    return age_s(folder) > FOREIGN_AGE_S


def age_s(path: Path) -> float:
    """Return seconds since a file's last change; 0 if it is missing."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
