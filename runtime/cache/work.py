"""Work folder of one job: starts with files of earlier jobs; new ones are published to the compile cache."""

import atexit
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from graphmoe.runtime.cache.blobs import Blobs, DamagedBlob
from graphmoe.runtime.cache.entries import GRAPHS, PARTS, TRITON, Document, Entries, Entry, union, unit_of
from graphmoe.runtime.cache.folders import VARIABLES, is_users, point_torch_away
from graphmoe.runtime.host.files import FileLock

log = logging.getLogger(__name__)

# Prefix of the file that lists a Triton kernel's files by absolute path
GROUP_FILE = "__grp__"
CHILDREN = "child_paths"
_SKIPPED_FOLDERS = {"locks", "__pycache__"}
_SKIPPED_ENDS = (".lock", ".tmp", ".tmp.o")
# A job merges more documents of one entry even without new files
MANY_DOCUMENTS = 4


class WorkFolder:
    """Compile folder of a job's processes, made by ``CompileCache.open``."""

    def __init__(
        self,
        blobs: Blobs,
        entries: Entries,
        key: str,
        facts: dict[str, Any],
        path: Path,
        lock: FileLock | None,
        *,
        keeps: bool,
    ) -> None:
        self.path, self.key, self.facts = path, key, facts
        self.keeps = keeps  # `publish` writes; not to a read-only, full or missing cache
        self.found = False
        self.differences: list[str] = []  # if not found: to the nearest facts, possibly of another base
        self.shared_from: str | None = None
        self.num_files = self.num_bytes = 0  # copied here
        self.damaged: list[str] = []
        self._blobs, self._entries, self._lock, self._pid = blobs, entries, lock, os.getpid()
        self._files: dict[str, str] = {}  # of the entry, or of the one shared from, if they are here
        self._new: dict[str, str] = {}  # stored, but in no document yet
        self._seen: dict[str, tuple[int, int]] = {}  # known size and mtime of each file
        self._refused: set[tuple[str, str]] = set()
        self.clear()
        atexit.register(self.close)

    def fill(self, source: Entry | None, places: Sequence[str] | None) -> None:
        """Copy an entry's files here; ``places``: graph folders, None if facts differ. *Raises* OSError."""
        if source is None:
            return
        self.found = places is not None
        self.shared_from = None if self.found else source.key
        taken = [f"{part}/" for name, part in VARIABLES.items() if not is_users(name)]
        taken += [f"{GRAPHS}/{place}/" for place in places or ()]
        wanted = {path: digest for path, digest in source.files.items() if path.startswith((*taken,))}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            problems = list(threads.map(self._place, wanted, wanted.values()))
        for (path, digest), problem in zip(wanted.items(), problems, strict=True):
            if problem:
                words = path, source.key, problem
                log.warning("compile cache: file %s of entry %s %s; it is compiled again", *words)
                self.damaged.append(path)
                self._refused.add((path, digest))
                self._blobs.set_aside(digest)
        broken = {unit_of(path) for path in self.damaged}
        broken |= {unit_of(path) for path in wanted if not self._has_its_group(path)}
        for path, digest in wanted.items():
            place = self.path / path
            if unit_of(path) in broken:
                place.unlink(missing_ok=True)
            else:
                self._files[path], status = digest, place.stat()
                self._seen[path] = status.st_size, status.st_mtime_ns
        self.num_files, self.num_bytes = len(self._files), sum(size for size, _ in self._seen.values())

    def clear(self) -> None:
        self.found, self.shared_from = False, None
        for part in PARTS:
            shutil.rmtree(self.path / part, ignore_errors=True)
            (self.path / part).mkdir()

    def publish(self, notes: Mapping[str, Any] | None = None) -> int:
        """Store new files in the cache; return how many. No compilation may run. Warns of a full disk."""
        if not self.keeps:
            return 0
        try:
            return self._publish(dict(notes or {}))
        except OSError as error:
            log.warning("compile cache: compiled code is not saved: %s", error)
            return 0

    def close(self) -> None:
        """Remove the work folder. No effect in a forked child."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        point_torch_away(self.path)
        if self._lock is not None:
            self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)

    def _place(self, path: str, digest: str) -> str | None:
        try:
            content = self._blobs.get(digest)
        except DamagedBlob:
            return "is damaged"
        except OSError as error:
            return f"is missing ({error.strerror})"
        target = self.path / path
        if target.name.startswith(GROUP_FILE):
            moved = _moved_group(content, "", f"{self.path / TRITON}/")
            if moved is None:
                return "is not a group of kernels"
            content = moved
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return None

    def _has_its_group(self, path: str) -> bool:
        place = self.path / path
        if not place.name.startswith(GROUP_FILE) or not place.exists():
            return True
        return all(map(os.path.exists, json.loads(place.read_bytes())[CHILDREN].values()))

    def _publish(self, notes: dict[str, Any]) -> int:
        self._take_what_changed()
        entry = self._entries.read(self.key)
        joins = entry is not None and (bool(self._refused) or len(entry.documents) > MANY_DOCUMENTS)
        if not self._new and not joins and not (entry is None and self._files):
            return 0
        theirs = entry.files if entry else {}
        refused = {unit_of(path) for path, digest in self._refused if theirs.get(path) == digest}
        files = union([self._files, {p: d for p, d in theirs.items() if unit_of(p) not in refused}])
        document = Document(self.facts, files, {**(entry.notes if entry else {}), **notes}, time.time())
        self._entries.write(self.key, document, entry.documents if entry else ())
        self._restore()
        count = len(self._new)
        self._new.clear()
        self._refused.clear()
        return count

    def _take_what_changed(self) -> None:
        for name, path in _kept_files(self.path):
            try:
                status = path.stat()
                known = (status.st_size, status.st_mtime_ns)
                content = None if self._seen.get(name) == known else self._stored_form(path)
            except FileNotFoundError:  # replaced meanwhile
                continue
            if content is not None:
                digest = self._blobs.put(content)
                self._seen[name] = known
                if self._files.get(name) != digest:
                    self._files[name] = self._new[name] = digest

    def _restore(self) -> None:
        for name, digest in self._files.items():
            path = self.path / name
            content = None if self._blobs.has(digest) or not path.exists() else self._stored_form(path)
            if content is not None:
                self._blobs.put(content)

    def _stored_form(self, path: Path) -> bytes | None:
        content = path.read_bytes()
        is_group = path.name.startswith(GROUP_FILE)
        return _moved_group(content, f"{self.path / TRITON}/", "") if is_group else content


def _kept_files(work: Path) -> Iterator[tuple[str, Path]]:
    for part in PARTS:
        # unfinished files: .<pid>.<thread>.tmp (torch/_inductor/codecache.py), tmp.pid_<pid>_<uuid>/
        # (triton/runtime/cache.py)
        for folder, folders, names in os.walk(work / part):
            folders[:] = [
                name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("tmp.")
            ]
            for name in names:
                path = Path(folder, name)
                if name != "lock" and not name.endswith(_SKIPPED_ENDS) and not path.is_symlink():
                    yield path.relative_to(work).as_posix(), path


def _moved_group(content: bytes, old: str, new: str) -> bytes | None:
    try:
        group = json.loads(content)
        children = {name: str(child) for name, child in group[CHILDREN].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    # a stored group (old is empty) has no files to check
    if not all(child.startswith(old) and (not old or os.path.exists(child)) for child in children.values()):
        return None
    moved = {name: f"{new}{child.removeprefix(old)}" for name, child in children.items()}
    return json.dumps({**group, CHILDREN: moved}, sort_keys=True).encode()
