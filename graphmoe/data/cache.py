"""The cache of tokenised corpora: whole entries only, one builder at a time, safe against kills."""

from __future__ import annotations

import contextlib
import fcntl
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
            _remove_left_overs(folder, name)
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
    temporary = entry.with_name(f"{entry.name}.tmp-{socket.gethostname()}-{os.getpid()}")
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


def _remove_left_overs(folder: Path, name: str) -> None:
    """Remove the folders of killed builders of this host."""
    prefix = f"{name}.tmp-{socket.gethostname()}-"
    for left_over in folder.glob(f"{name}.tmp-*"):
        pid = left_over.name.removeprefix(prefix)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            log.info("removing %s, left by a process that has ended", left_over)
            shutil.rmtree(left_over, ignore_errors=True)
