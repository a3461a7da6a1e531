"""Folder that one job compiles to: it starts with files of earlier jobs, and new files are kept from it."""

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
from graphmoe.runtime.cache.entries import GRAPHS, INDUCTOR, TRITON, Document, Entries, Entry, union, unit_of
from graphmoe.runtime.cache.folders import VARIABLES, is_users, point_torch_at, point_torch_away
from graphmoe.runtime.cache.key import key_of
from graphmoe.runtime.host.files import FileLock

log = logging.getLogger(__name__)

GROUP_FILE = "__grp__"
"""Prefix of the file in which Triton lists the files of a kernel, by their absolute paths."""
CHILDREN = "child_paths"
_SKIPPED_FOLDERS = {"locks", "__pycache__"}
_SKIPPED_ENDS = (".lock", ".tmp")
MANY_DOCUMENTS = 4
"""Documents of one entry above which a job joins them though it has nothing new."""


class WorkFolder:
    """Folder that the processes of a job compile to. ``CompileCache.open`` makes it."""

    def __init__(
        self,
        blobs: Blobs,
        entries: Entries,
        facts: dict[str, Any],
        path: Path,
        lock: FileLock | None,
        *,
        keeps: bool,
    ) -> None:
        self.path, self.key, self.facts = path, key_of(facts), facts
        self.keeps = keeps
        """True where `publish` writes: not in a cache that is read-only, full or none."""
        self.found = False
        """True where there was an entry of these facts."""
        self.differences: list[str] = []
        """Without an entry: those to the facts that differ least, which may be of another base."""
        self.shared_from: str | None = None
        """Key of the other entry whose files lie here."""
        self.num_files = self.num_bytes = 0
        """Files that were put here."""
        self.damaged: list[str] = []
        """Files that were damaged or missing; torch makes them again."""
        self._blobs, self._entries, self._lock, self._pid = blobs, entries, lock, os.getpid()
        self._files: dict[str, str] = {}
        """Files of the entry, or of another that lent them, as far as they lie here."""
        self._new: dict[str, str] = {}
        """Files that are stored and not yet in a document."""
        self._seen: dict[str, tuple[int, int]] = {}
        """Size and time of each file as we know it."""
        self._refused: set[tuple[str, str]] = set()
        """Files of the entry that are not as they were, with their hashes."""
        self.clear()
        atexit.register(self.close)

    def fill(self, source: Entry | None, places: Sequence[str] | None) -> None:
        """Put an entry's files here, of graphs those in the folders ``places``. *Raises* OSError.

        ``places`` is None for an entry of other facts, which gives no graphs.
        """
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
                self._refuse(path, digest, source.key, problem)
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
        """Make the folder as it is where there is no entry."""
        self.found, self.shared_from = False, None
        for part in (INDUCTOR, TRITON, GRAPHS):
            shutil.rmtree(self.path / part, ignore_errors=True)
            (self.path / part).mkdir()

    def activate(self) -> None:
        """Let torch and Triton compile to here, each unless the user has set its folder; `close` ends it.

        Call it before the first compilation.
        """
        point_torch_at(self.path)

    def publish(self, notes: Mapping[str, Any] | None = None) -> int:
        """Keep what is new here; returns how many files that were. Call it while nothing compiles.

        ``notes`` are for the tool that lists entries (model, graphs). A full disk is a warning.
        """
        if not self.keeps:
            return 0
        try:
            return self._publish(dict(notes or {}))
        except OSError as error:
            log.warning("compile cache: what was compiled is not kept: %s", error)
            return 0

    def close(self) -> None:
        """Remove the work folder, as the end of the process does. A forked child leaves it alone."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        point_torch_away(self.path)
        if self._lock is not None:
            self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)

    def _place(self, path: str, digest: str) -> str | None:
        """Put one file here; returns its fault, if any. *Raises* OSError where it cannot be written."""
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
                return "is no group of kernels"
            content = moved
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return None

    def _has_its_group(self, path: str) -> bool:
        place = self.path / path
        if not place.name.startswith(GROUP_FILE) or not place.exists():
            return True
        return all(map(os.path.exists, json.loads(place.read_bytes())[CHILDREN].values()))

    def _refuse(self, path: str, digest: str, key: str, problem: str) -> None:
        log.warning("compile cache: %s of entry %s %s; it is compiled again", path, key, problem)
        self.damaged.append(path)
        self._refused.add((path, digest))
        self._blobs.set_aside(digest)

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
        """Return a file without the place of the work folder; None for a group that is not whole here."""
        content = path.read_bytes()
        is_group = path.name.startswith(GROUP_FILE)
        return _moved_group(content, f"{self.path / TRITON}/", "") if is_group else content


def _kept_files(work: Path) -> Iterator[tuple[str, Path]]:
    """Yield (path below the work folder, path) of files worth keeping: no locks, nothing half written.

    All compilation must be over. Names of unfinished files are those of torch/_inductor/codecache.py
    (``.<pid>.<thread>.tmp``) and triton/runtime/cache.py (``tmp.pid_<pid>_<uuid>/``).
    """
    for part in (INDUCTOR, TRITON, GRAPHS):
        for folder, folders, names in os.walk(work / part):
            folders[:] = [
                name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("tmp.")
            ]
            for name in names:
                path = Path(folder, name)
                if name != "lock" and not name.endswith(_SKIPPED_ENDS) and not path.is_symlink():
                    yield path.relative_to(work).as_posix(), path


def _moved_group(content: bytes, old: str, new: str) -> bytes | None:
    """Return a group file of Triton's with its children below another folder; None for any other file.

    Below ``old``, unless it is empty, all of them must be there.
    """
    try:
        group = json.loads(content)
        children = {name: str(child) for name, child in group[CHILDREN].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not all(child.startswith(old) and (not old or os.path.exists(child)) for child in children.values()):
        return None
    moved = {name: f"{new}{child.removeprefix(old)}" for name, child in children.items()}
    return json.dumps({**group, CHILDREN: moved}, sort_keys=True).encode()
