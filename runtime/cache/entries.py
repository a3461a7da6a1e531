"""Entries of the compile cache, which list by name and hash the files that belong to some facts.

An entry is the union of its documents. A job that publishes writes a new document, which takes in those that
the job has read, and then removes these. A document never changes, so no job removes one that it has not
read, and two that publish at once lose nothing.
"""

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from graphmoe.runtime.cache.blobs import read_document, write_whole
from graphmoe.runtime.host.files import age_s, process_name

log = logging.getLogger(__name__)

INDUCTOR, TRITON, GRAPHS = "inductor", "triton", "graphs"
"""Folders of a work folder: those of torch and Triton, and the traced graphs of `runtime/compile/kept.py`."""
USED = "used"
"""File whose time says when a job last opened the entry."""
READS = 10
"""Tries to read an entry that others rewrite meanwhile."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Document:
    """One process's part of an entry."""

    facts: dict[str, Any]
    files: dict[str, str]
    """Path below the work folder -> sha256."""
    notes: dict[str, Any]
    created: float
    """Unix time."""


@dataclass(frozen=True)
class Entry(Document):
    """The union of an entry's documents; notes and time are the newest."""

    key: str
    last_used: float
    documents: tuple[Path, ...]
    """Newest first."""


class Entries:
    """``entries/<key>/<name>.json`` in the folder of a cache."""

    def __init__(self, cache: Path) -> None:
        self._folder, self._damaged = cache / "entries", cache / "damaged"

    def folder(self, key: str) -> Path:
        return self._folder / key

    def read(self, key: str) -> Entry | None:
        """Return the entry, or None where it has no whole document. A file that is none is set aside."""
        for _ in range(READS):
            found = {p: read_document(p, _checked, self._damaged) for p in self._documents(key)}
            if found and all(path.exists() for path, document in found.items() if document is None):
                break  # else another process has put it into a document of its own meanwhile
        whole = [(path, document) for path, document in found.items() if document is not None]
        if not whole:
            return None
        paths, newest_first = zip(*sorted(whole, key=lambda pair: -pair[1].created), strict=True)
        newest, used = newest_first[0], self.folder(key) / USED
        return Entry(
            newest.facts,
            union(document.files for document in newest_first),
            {name: value for document in newest_first[::-1] for name, value in document.notes.items()},
            newest.created,
            key,
            max(newest.created, time.time() - age_s(used) if used.exists() else 0.0),
            paths,
        )

    def __iter__(self) -> Iterator[Entry]:
        keys = sorted(path.name for path in self._folder.glob("*") if path.is_dir())
        return (entry for key in keys if (entry := self.read(key)) is not None)

    def write(self, key: str, document: Document, replaces: Iterable[Path]) -> None:
        """Write a document, then remove the documents that it includes. *Raises* OSError."""
        text = json.dumps(vars(document), indent=0)
        write_whole(self.folder(key) / f"{process_name()}.json", f"{text}\n".encode())
        for old in replaces:
            old.unlink(missing_ok=True)

    def touch(self, key: str) -> None:
        """Remember that the entry was used now, if the folder can be written."""
        with contextlib.suppress(OSError):
            (self.folder(key) / USED).touch()

    def remove(self, key: str) -> None:
        """Remove an entry's documents; others that are published meanwhile stay."""
        for path in self._documents(key):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.folder(key) / USED).unlink(missing_ok=True)
            self.folder(key).rmdir()

    def _documents(self, key: str) -> list[Path]:
        return sorted(self.folder(key).glob("*.json"))


def union(newest_first: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Join the files of several documents; files that belong together come from the newest that has them."""
    files: dict[str, str] = {}
    owners: dict[str, int] = {}
    for number, document in enumerate(newest_first):
        for path, digest in document.items():
            if owners.setdefault(unit_of(path), number) == number:
                files[path] = digest
    return files


def unit_of(path: str) -> str:
    """Return the name of a group that must be whole: a kernel's folder of Triton's, any other file by itself.

    Triton takes a kernel whose group file is there and fails where one of the group is not.
    """
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == TRITON and len(parts) > 2 else path


def _checked(found: Any) -> Document:
    """Return the document in a file. *Raises* ValueError, KeyError or TypeError where it holds none."""
    facts, files, notes = (dict(found[name]) for name in ("facts", "files", "notes"))
    document = Document(facts, files, notes, found["created"])
    if not isinstance(document.created, (int, float)):
        raise ValueError(f"created={document.created!r} is no time")
    for path, digest in document.files.items():
        parts = PurePosixPath(path).parts
        if (
            parts[:1] not in ((INDUCTOR,), (TRITON,), (GRAPHS,))
            or ".." in parts
            or not _DIGEST.fullmatch(digest)
        ):
            raise ValueError(f"{path!r}: {digest!r} is no file of a work folder with its sha256")
    return document
