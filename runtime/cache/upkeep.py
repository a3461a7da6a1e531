"""Maintenance of a compile cache: list, verify, prune."""

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from graphmoe.runtime.cache.blobs import DRAFT, ORPHAN_AGE_S, Blob, DamagedBlob
from graphmoe.runtime.cache.entries import Document, Entry, unit_of
from graphmoe.runtime.cache.store import CompileCache
from graphmoe.runtime.host.files import age_s, remove_dead


class Held(NamedTuple):
    """Entry with its size; ``shared_bytes`` are in other entries too."""

    entry: Entry
    num_bytes: int
    shared_bytes: int


def holdings(cache: CompileCache) -> Iterator[Held]:
    """Yield entries, most recently used first."""
    sizes = {blob.digest: blob.num_bytes for blob in cache.blobs}
    entries = sorted(cache.entries, key=lambda entry: entry.last_used, reverse=True)
    users = _users(entries)
    for entry in entries:
        found = {digest: sizes.get(digest, 0) for digest in entry.files.values()}
        shared = sum(size for digest, size in found.items() if users[digest] > 1)
        yield Held(entry, sum(found.values()), shared)


def total_bytes(cache: CompileCache) -> int:
    damaged = sum(_size(path) for path in (_folder(cache) / "damaged").glob("*"))
    return sum(blob.num_bytes for blob in cache.blobs) + damaged


def verify(cache: CompileCache) -> dict[str, Any]:
    """Check all stored files and entries; move damaged files away.

    Returns the number of files, hashes of damaged ones, and files missing from entries, which drop them.
    """
    blobs = list(cache.blobs)
    with ThreadPoolExecutor() as threads:
        whole = list(threads.map(lambda blob: _is_whole(cache, blob), blobs))
    damaged = [blob.digest for blob, ok in zip(blobs, whole, strict=True) if not ok]
    for digest in damaged:
        cache.blobs.set_aside(digest)
    lacking: dict[str, list[str]] = {}
    for entry in cache.entries:
        gone = [path for path, digest in entry.files.items() if not cache.blobs.has(digest)]
        if gone:
            lacking[entry.key], broken = gone, {unit_of(path) for path in gone}
            files = {path: digest for path, digest in entry.files.items() if unit_of(path) not in broken}
            document = Document(entry.facts, files, entry.notes, entry.created)
            cache.entries.write(entry.key, document, entry.documents)
    return {"files": len(blobs), "damaged": damaged, "lacking": lacking}


def prune(cache: CompileCache, max_bytes: int | None) -> tuple[dict[str, Any], list[Entry]]:
    """Remove least recently used entries until the rest fits the limit.

    Unused files are removed first. Returns a report of plain values and the removed entries.
    """
    before, damaged = total_bytes(cache), _folder(cache) / "damaged"
    num_damaged, gone = len([*damaged.glob("*")]), list[Entry]()
    shutil.rmtree(damaged, ignore_errors=True)
    work_folders = [folder.name for folder in remove_dead(_folder(cache) / "work")]
    for draft in (_folder(cache) / "blobs").glob(f"??/*{DRAFT}"):  # of killed writers
        if age_s(draft) > ORPHAN_AGE_S:
            draft.unlink(missing_ok=True)
    blobs = {blob.digest: blob for blob in cache.blobs}
    entries = list(cache.entries)
    users = _users(entries)
    num_files = waiting = 0
    for blob in [blob for digest, blob in blobs.items() if not users[digest]]:
        # a job may be about to add a young file to an entry
        if time.time() - blob.written > ORPHAN_AGE_S:
            num_files += cache.blobs.remove(blobs.pop(blob.digest))
        else:
            waiting += blob.num_bytes
    held = sum(blob.num_bytes for blob in blobs.values())
    for old in sorted(entries, key=lambda entry: entry.last_used):
        if max_bytes is None or held <= max_bytes:
            break
        cache.entries.remove(old.key)
        gone.append(old)
        digests = set(old.files.values())
        users.subtract(digests)
        for blob in [blobs.pop(digest) for digest in digests & blobs.keys() if not users[digest]]:
            held -= blob.num_bytes
            num_files += cache.blobs.remove(blob)
    document = {
        "bytes_before": before,
        "bytes_after": total_bytes(cache),
        "entries": [entry.key for entry in gone],
        "files": num_files,
        "waiting_bytes": waiting,
        "damaged": num_damaged,
        "work_folders": work_folders,
    }
    return document, gone


def _folder(cache: CompileCache) -> Path:
    assert cache.folder is not None
    return cache.folder


def _users(entries: list[Entry]) -> Counter[str]:
    return Counter(digest for entry in entries for digest in set(entry.files.values()))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # removed meanwhile
        return 0


def _is_whole(cache: CompileCache, blob: Blob) -> bool:
    try:
        cache.blobs.get(blob.digest)
    except DamagedBlob:
        return False
    except OSError:  # removed meanwhile, or unreadable for this user
        pass
    return True
