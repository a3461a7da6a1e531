"""Compile cache: output of torch and Triton, stored by content for later jobs (docs/compile.md); its upkeep.

Each job compiles in its own work folder, which starts with verified files of earlier jobs. *Facts* are all
that compiled code depends on. Nothing is locked during compilation; a process may die at any time.
"""

import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from graphmoe.runtime.cache.blobs import (
    DRAFT,
    ORPHAN_AGE_S,
    Blob,
    Blobs,
    DamagedBlob,
    make_folder,
    read_document,
    write_whole,
)
from graphmoe.runtime.cache.entries import Document, Entries, Entry, unit_of
from graphmoe.runtime.cache.folders import TEMPORARY, make_cache
from graphmoe.runtime.cache.key import Facts, differences, key_of, may_share
from graphmoe.runtime.cache.work import WorkFolder
from graphmoe.runtime.host.files import age_s, make_process_folder, make_temporary_folder, remove_dead

log = logging.getLogger(__name__)


class CompileCache:
    """Cache in one folder; processes may share it."""

    def __init__(self, folder: Path | None, *, shared: bool = False) -> None:
        """Without a folder nothing is stored or found. ``shared``: a new folder is group-writable."""
        self._shared = shared
        self.folder = folder.absolute() if folder is not None else None
        nowhere = self.folder or Path(os.devnull)  # below which there are no files
        self.blobs, self.entries = Blobs(nowhere), Entries(nowhere)

    def open(self, facts: Facts, places: Sequence[str] = ()) -> WorkFolder:
        """Return a work folder with verified files of these facts, else of the nearest with equal base facts.

        ``places``: folders of traced graphs, copied only if the facts are equal. If the cache is damaged,
        read-only or full, the work folder is temporary. *Raises* OSError if that fails too.
        """
        ours: dict[str, Any] = json.loads(json.dumps(dict(facts)))  # as in a document
        entry = self.entries.read(key_of(ours))
        others = [] if entry else [other for other in self.entries if other.files]
        source = entry or _nearest(ours, [other for other in others if may_share(ours, other.facts)])
        work = self._filled(ours, source, places if entry else None)
        near = _nearest(ours, others)
        work.differences = differences(ours, near.facts) if near else []
        if entry:
            self.entries.touch(entry.key)
        return work

    def remember(self, name: str, facts: Facts, answer: Any) -> Any:
        """Store a plain value for a name and facts unless one is stored; return the stored one."""
        if self.folder is None:
            return answer
        path, document = self._answer(name, facts), {"name": name, "facts": dict(facts), "answer": answer}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(document, indent=1).encode(), first=True)
        except OSError as error:
            log.warning("compile cache: the measured result for %s cannot be saved: %s", name, error)
        holds = self.recall(name, facts)
        return answer if holds is None else holds

    def recall(self, name: str, facts: Facts) -> Any | None:
        path = self._answer(name, facts)
        return read_document(path, lambda found: found["answer"], path.parent.with_name("damaged"))

    def _answer(self, name: str, facts: Facts) -> Path:
        key = key_of({"name": name, "facts": dict(facts)})
        return (self.folder or Path(os.devnull)) / "choices" / f"{key}.json"

    def _filled(
        self, facts: dict[str, Any], source: Entry | None, places: Sequence[str] | None
    ) -> WorkFolder:
        stored, work = (self.blobs, self.entries, key_of(facts), facts), None
        if self.folder is not None:
            try:
                make_cache(self.folder, shared=self._shared)
                remove_dead(self.folder / "work")
                make_folder(self.folder / "work")
                work = WorkFolder(*stored, *make_process_folder(self.folder / "work"), keeps=True)
                work.fill(source, places)
                return work
            except OSError as error:
                if work is not None:
                    work.close()
                problem = f"{self.folder} cannot be written ({error.strerror or error})"
                log.warning("compile cache: %s; compiled code is not saved", problem)
        work = WorkFolder(*stored, *make_temporary_folder(TEMPORARY), keeps=False)
        try:
            work.fill(source, places)
        except OSError as error:
            log.warning("compile cache: nothing can be read from it: %s", error)
            work.clear()
        return work


def _nearest(facts: Facts, entries: Sequence[Entry]) -> Entry | None:
    return min(entries, key=lambda each: (len(differences(facts, each.facts)), -each.last_used), default=None)


class Held(NamedTuple):
    entry: Entry
    num_bytes: int
    shared_bytes: int  # in other entries too


def holdings(cache: CompileCache) -> Iterator[Held]:
    """Yield the entries with their sizes, most recently used first."""
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
    """Check all stored files, move damaged ones away, drop missing ones from entries; return a report."""
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
    """Remove unused files, then least recently used entries until the rest fits; return report, entries."""
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
