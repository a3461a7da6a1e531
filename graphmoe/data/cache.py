"""Cache of tokenised corpora: one process builds an entry at a time; killed builds leave no entry."""

import contextlib
import glob
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from graphmoe.config.schema import ConfigError, cache_root
from graphmoe.config.untrusted import FileError, read_json, typed
from graphmoe.runtime.host.files import FileLock, FileSum, difference, is_locked, replace_text, sum_of

log = logging.getLogger(__name__)

FORMAT = 2  # part of every key; increment it when entry contents change
META = "meta.json"
SMALL_BYTES = 64 << 20  # largest file whose sha256 is checked on every open
_TMP = ".tmp-"
_OTHER_HOST_S = 24 * 3600.0  # seconds without a write after which another host's draft is stale
_OTHER = "set data.cache_dir=... or the variable GRAPHMOE_CACHE"


def cache_folder(configured: str | None) -> Path:
    """Return the cache's root, created if missing. *Raises* ConfigError."""
    folder = cache_root(configured)
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the cache {folder}: {error}; {_OTHER}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the cache folder {folder} is not writable; {_OTHER}")
    return folder


def cache_key(*parts: Any) -> str:
    """Return a short hash of ``parts``, plain values, and of the entry format."""
    text = json.dumps([FORMAT, *parts], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class _Document(TypedDict):
    files: dict[str, FileSum]
    meta: Any


def cached(
    folder: Path, name: str, build: Callable[[Path], dict[str, Any]], kind: type[Any] = dict
) -> tuple[Path, Any]:
    """Return an entry's path and metadata; ``build(path)`` fills a missing or damaged entry.

    ``build`` returns the metadata, of type ``kind``. Other processes wait for its end. *Raises* ConfigError.
    """
    entry = folder / name
    meta = _read_entry(entry, kind)
    if meta is not None:
        return entry, meta
    try:
        with _lock(folder / f"{name}.lock"):
            meta = _read_entry(entry, kind, log.debug)
            if meta is None:
                remove_left_overs(folder, name)
                remove_left_overs(folder)
                _build(entry, build)
                meta = _read_entry(entry, kind)
    except OSError as error:
        raise ConfigError(
            f"cannot make the cache entry {entry}: {error}; free space there or set data.cache_dir=..."
        ) from error
    if meta is None:
        raise ConfigError(f"{entry} does not read back as written; set data.cache_dir=... to a sound disk")
    return entry, meta


def sums_of(entry: Path) -> dict[str, str]:
    """Return the sha256 of each file of a complete entry. *Raises* ConfigError."""
    return {name: found.sha256 for name, found in read_json(entry / META, _Document)["files"].items()}


def _read_entry(entry: Path, kind: type[Any], say: Callable[..., None] = log.warning) -> Any:
    if not os.path.isfile(entry / META):
        return None
    try:
        document = read_json(entry / META, _Document)
        meta = typed(document["meta"], kind, f"{entry / META}: meta")
        # larger files are checked later, by graphmoe.data.contents.ContentCheck
        problem = _damage(entry, document["files"])
    except (FileError, OSError) as error:
        problem = str(error)
    if problem is None:
        return meta
    say("cache entry %s is damaged (%s); it is built again", entry, problem)
    return None


def _damage(entry: Path, files: dict[str, FileSum]) -> str | None:
    there = {path.name for path in entry.iterdir() if path.name != META}
    if differing := sorted(there ^ files.keys()):
        return f"{differing[0]!r} is {'not listed' if differing[0] in there else 'gone'}"
    found = (
        difference(entry / name, written, contents=written.num_bytes <= SMALL_BYTES)
        for name, written in files.items()
    )
    return next(filter(None, found), None)


def _build(entry: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    temporary = draft_of(entry)
    temporary.mkdir()
    try:
        meta = build(temporary)
        files = {path.name: asdict(sum_of(path)) for path in sorted(temporary.iterdir())}
        replace_text(temporary / META, json.dumps({"files": files, "meta": meta}, indent=1), durably=True)
        if entry.exists():  # and damaged
            shutil.rmtree(entry)
        # renamed when complete, so a killed builder leaves no entry
        temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    lock = FileLock.acquire(path)
    if lock is None:
        log.info("another process prepares %s; waiting", path.stem)
        lock = FileLock.acquire(path, wait=True)
    assert lock is not None
    try:
        yield
    finally:
        lock.release()


def draft_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{_TMP}{socket.gethostname()}-{os.getpid()}")


def remove_left_overs(folder: Path, name: str | None = None) -> None:
    """Remove unfinished entries of killed processes: all, or ``name``'s, which only this process builds."""
    for left_over in folder.glob(f"{'*' if name is None else glob.escape(name)}{_TMP}*"):
        of, _, maker = left_over.name.rpartition(_TMP)
        host, _, pid = maker.rpartition("-")
        if host == socket.gethostname():
            # a draft with our own process id is of an earlier process, as in a restarted container
            ended = (of == name and pid == str(os.getpid())) or not Path(f"/proc/{pid}").exists()
        else:
            ended = time.time() - _last_write(left_over) > _OTHER_HOST_S
        if ended and pid.isdigit() and (of == name or not is_locked(folder / f"{of}.lock")):
            log.info("removing %s, left by a process that has ended", left_over)
            shutil.rmtree(left_over, ignore_errors=True)


def _last_write(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    return time.time()  # it is being removed
