"""The cache of tokenised corpora: whole entries only, one builder at a time, safe against kills."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from graphmoe.cache_folders import cache_root
from graphmoe.config import ConfigError

log = logging.getLogger(__name__)

FORMAT = 1
"""Part of every key; raise it when the content of entries changes."""
META = "meta.json"
_TMP = ".tmp-"
_OTHER_HOST_S = 24 * 3600.0
"""Without a write for so long, what a process of another host began is left."""
_OTHER = "set data.cache_dir=... or the variable GRAPHMOE_CACHE"


def cache_folder(configured: str | None) -> Path:
    """The folder for tokenised corpora: data.cache_dir, $GRAPHMOE_CACHE or ~/.cache/graphmoe."""
    folder = cache_root(configured)
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the cache {folder}: {error}; {_OTHER}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the cache folder {folder} is not writable; {_OTHER}")
    return folder


def cache_key(*parts: Any) -> str:
    """A short hash of plain values, tied to the format of the entries."""
    text = json.dumps([FORMAT, *parts], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def cached(folder: Path, name: str, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """(path, meta) of the entry ``name``; ``build(path)`` fills a folder and returns meta if there is none.

    The entry is renamed into place when it is whole, so a killed builder leaves none. Other processes wait
    for a builder; should locks not work on a file system, each builds and the first one wins. *Raises*
    ConfigError when the entry cannot be written.
    """
    entry = folder / name
    meta = _read_entry(entry)
    if meta is not None:
        return entry, meta
    with _lock(folder / f"{name}.lock"):
        meta = _read_entry(entry)
        if meta is None:
            remove_left_overs(folder, name)
            remove_left_overs(folder)
            try:
                _build(entry, build)
            except OSError as error:
                raise ConfigError(
                    f"cannot make the cache entry {entry}: {error}; make room there or set data.cache_dir=..."
                ) from error
            meta = _read_entry(entry)
            assert meta is not None, f"the cache entry {entry} is not whole after it was built"
    return entry, meta


def _read_entry(entry: Path) -> dict[str, Any] | None:
    """The meta of a whole entry; None if there is no entry or its files are not as they were written."""
    if not (entry / META).is_file():
        return None
    try:
        document = json.loads((entry / META).read_text())
        sizes = {name: (entry / name).stat().st_size for name in document["sizes"]}
    except (ValueError, KeyError, OSError) as error:
        log.warning("cache entry %s is damaged (%s); it is built again", entry, error)
        return None
    if sizes != document["sizes"]:
        log.warning("cache entry %s is damaged (file sizes differ); it is built again", entry)
        return None
    return dict(document["meta"])


def _build(entry: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    """Build in a folder beside the entry, then rename it."""
    temporary = draft_of(entry)
    temporary.mkdir()
    try:
        meta = build(temporary)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        with open(temporary / META, "w") as file:
            json.dump({"sizes": sizes, "meta": meta}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if entry.exists() and _read_entry(entry) is None:
            shutil.rmtree(entry)
        _rename_unless_there(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_unless_there(temporary: Path, entry: Path) -> None:
    """Move the entry into place; one that another process made meanwhile is kept, being the same."""
    try:
        os.rename(temporary, entry)
    except OSError:
        if _read_entry(entry) is None:
            raise
        log.info("cache entry %s was built by another process meanwhile", entry)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the kernel releases when its holder dies."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process prepares %s; waiting", path.stem)
            started = time.monotonic()
            fcntl.flock(file, fcntl.LOCK_EX)
            log.info("waited %.1f s for %s", time.monotonic() - started, path.stem)
        except OSError as error:
            log.warning("%s takes no locks (%s); several processes may do the same work", path.parent, error)
        yield


def draft_of(path: Path) -> Path:
    """The folder of this process beside a path, for what goes to that path when it is whole."""
    return path.with_name(f"{path.name}{_TMP}{socket.gethostname()}-{os.getpid()}")


def remove_left_overs(folder: Path, name: str | None = None) -> None:
    """Remove the drafts of killed processes in a folder: of a name that we alone build, or of all names.

    One of our own process id is of a process before us then, as in a container that was started again.
    """
    for left_over in folder.glob(f"{'*' if name is None else glob.escape(name)}{_TMP}*"):
        of, _, maker = left_over.name.rpartition(_TMP)
        host, _, pid = maker.rpartition("-")
        if host == socket.gethostname():
            ended = (of == name and pid == str(os.getpid())) or not Path(f"/proc/{pid}").exists()
        else:
            ended = time.time() - _last_write(left_over) > _OTHER_HOST_S
        if ended and pid.isdigit() and (of == name or not _is_locked(folder / f"{of}.lock")):
            log.info("removing %s, left by a process that has ended", left_over)
            shutil.rmtree(left_over, ignore_errors=True)


def _last_write(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    return time.time()  # it is being removed


def _is_locked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass  # no locks here
    return False
