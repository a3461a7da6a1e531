"""Upkeep of a compile cache: list its entries, verify its files, and remove old ones."""

import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from graphmoe.runtime.cache.blobs import ORPHAN_AGE_S, Blob, DamagedBlob
from graphmoe.runtime.cache.bytecode import BYTECODE
from graphmoe.runtime.cache.entries import Document, Entry, unit_of
from graphmoe.runtime.cache.store import CompileCache
from graphmoe.runtime.host.files import age_s, remove_dead


@dataclass(frozen=True)
class Held:
    """An entry with its place on the disk; sizes in bytes."""

    entry: Entry
    num_bytes: int
    shared_bytes: int
    """Bytes of the files that other entries name too."""


@dataclass
class Verified:
    """Result of `verify`."""

    num_files: int = 0
    damaged: list[str] = field(default_factory=list)
    """Stored files, by hash, that were set aside."""
    lacking: dict[str, list[str]] = field(default_factory=dict)
    """Damaged or missing files by the key of their entry, which goes on without them."""


@dataclass
class Pruned:
    """Result of `prune`; sizes in bytes."""

    bytes_before: int = 0
    bytes_after: int = 0
    entries: list[Entry] = field(default_factory=list)
    num_files: int = 0
    """Stored files that no entry names."""
    waiting_bytes: int = 0
    """Bytes of files that no entry names yet and that are too young to go."""
    num_damaged: int = 0
    work_folders: list[str] = field(default_factory=list)
    """Folders of jobs that were killed."""
    bytecode_folders: list[str] = field(default_factory=list)
    """Folders of installed packages that were used long ago."""


def holdings(cache: CompileCache) -> list[Held]:
    """Return all entries, those used last first."""
    sizes = {blob.digest: blob.num_bytes for blob in cache.blobs}
    entries = sorted(cache.entries, key=lambda entry: entry.last_used, reverse=True)
    users = Counter(digest for entry in entries for digest in set(entry.files.values()))
    found = []
    for entry in entries:
        digests = set(entry.files.values())
        shared = sum(sizes.get(digest, 0) for digest in digests if users[digest] > 1)
        found.append(Held(entry, sum(sizes.get(digest, 0) for digest in digests), shared))
    return found


def total_bytes(cache: CompileCache) -> int:
    """Bytes of the stored files, of those that were set aside, and of bytecode."""
    damaged = sum(size for _, size in _damaged(cache))
    return sum(blob.num_bytes for blob in cache.blobs) + damaged + sum(bytecode_sizes(cache).values())


def bytecode_sizes(cache: CompileCache) -> dict[Path, int]:
    """Bytes of the bytecode of each set of installed packages."""
    assert cache.folder is not None
    folders = (cache.folder / BYTECODE).glob("*")
    return {folder: sum(_size(file) for file in folder.rglob("*.pyc")) for folder in folders}


def verify(cache: CompileCache) -> Verified:
    """Compare every stored file with its name, every entry with the files; sets damaged ones aside."""
    result = Verified()
    blobs = list(cache.blobs)
    with ThreadPoolExecutor() as threads:
        whole = list(threads.map(lambda blob: _is_whole(cache, blob), blobs))
    result.num_files = len(blobs)
    result.damaged = [blob.digest for blob, ok in zip(blobs, whole, strict=True) if not ok]
    for digest in result.damaged:
        cache.blobs.set_aside(digest)
    for entry in cache.entries:
        lacking = [path for path, digest in entry.files.items() if not cache.blobs.has(digest)]
        if lacking:
            result.lacking[entry.key] = lacking
            _go_on_without(cache, entry, lacking)
    return result


def prune(cache: CompileCache, max_bytes: int | None) -> Pruned:
    """Remove entries and bytecode, least recently used first, until the rest is no larger than the limit.

    Files that no job needs go first. A stored file that was never in an entry stays for an hour: a job may
    be about to name it.
    """
    assert cache.folder is not None
    result = Pruned(bytes_before=total_bytes(cache))
    result.num_damaged = _remove_damaged(cache)
    result.work_folders = [folder.name for folder in remove_dead(cache.folder / "work")]
    for draft in cache.blobs.old_drafts():
        draft.unlink(missing_ok=True)
    blobs = {blob.digest: blob for blob in cache.blobs}
    entries = list(cache.entries)
    users = Counter(digest for entry in entries for digest in set(entry.files.values()))
    for blob in [blob for digest, blob in blobs.items() if not users[digest]]:
        if time.time() - blob.written > ORPHAN_AGE_S:
            result.num_files += cache.blobs.remove(blobs.pop(blob.digest))
        else:
            result.waiting_bytes += blob.num_bytes
    bytecode = bytecode_sizes(cache)
    held = sum(blob.num_bytes for blob in blobs.values()) + sum(bytecode.values())
    candidates: list[Entry | Path] = [*entries, *bytecode]
    for old in sorted(candidates, key=_last_used):
        if max_bytes is None or held <= max_bytes:
            break
        if isinstance(old, Path):
            shutil.rmtree(old, ignore_errors=True)
            result.bytecode_folders.append(old.name)
            held -= bytecode[old]
            continue
        cache.entries.remove(old.key)
        result.entries.append(old)
        digests = set(old.files.values())
        users.subtract(digests)
        for blob in [blobs.pop(digest) for digest in digests & blobs.keys() if not users[digest]]:
            held -= blob.num_bytes
            result.num_files += cache.blobs.remove(blob)
    result.bytes_after = total_bytes(cache)
    return result


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # removed meanwhile
        return 0


def _last_used(what: Entry | Path) -> float:
    return time.time() - age_s(what) if isinstance(what, Path) else what.last_used


def _is_whole(cache: CompileCache, blob: Blob) -> bool:
    try:
        cache.blobs.get(blob.digest)
    except DamagedBlob:
        return False
    except OSError:  # removed meanwhile, or not ours to read
        return True
    return True


def _go_on_without(cache: CompileCache, entry: Entry, lacking: list[str]) -> None:
    """Write the entry anew without files that are gone."""
    broken = {unit_of(path) for path in lacking}
    files = {path: digest for path, digest in entry.files.items() if unit_of(path) not in broken}
    document = Document(entry.facts, files, entry.report, entry.notes, entry.created)
    cache.entries.write(entry.key, document, entry.documents)


def _damaged(cache: CompileCache) -> list[tuple[Path, int]]:
    assert cache.folder is not None
    return [(path, path.stat().st_size) for path in (cache.folder / "damaged").glob("*")]


def _remove_damaged(cache: CompileCache) -> int:
    assert cache.folder is not None
    count = len(_damaged(cache))
    shutil.rmtree(cache.folder / "damaged", ignore_errors=True)
    return count
