"""Cache entries: paths and SHA-256 of files compiled for one set of facts (what compiled code depends on).

An entry is the union of its documents (JSON files). A job that publishes merges the documents it has read
into a new one, then deletes them. Documents are immutable, so concurrent jobs lose nothing.
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

# Parts of a work folder: torch's, Triton's, FlashAttention-4's, and our traced graphs
PARTS = INDUCTOR, TRITON, FLASH4, GRAPHS = "inductor", "triton", "flash4", "graphs"
# File whose time is the entry's last use
USED = "used"
READS = 10
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Document:
    """The files that one job published for an entry; stored as one JSON document."""

    facts: dict[str, Any]
    files: dict[str, str]  # path below the work folder -> SHA-256
    notes: dict[str, Any]
    created: float


@dataclass(frozen=True)
class Entry(Document):
    """Union of an entry's documents; notes and time are those of the newest."""

    key: str
    last_used: float
    documents: tuple[Path, ...]


class Entries:
    def __init__(self, cache: Path) -> None:
        self._folder, self._damaged = cache / "entries", cache / "damaged"

    def folder(self, key: str) -> Path:
        return self._folder / key

    def read(self, key: str) -> Entry | None:
        """Return the entry of a key; None if it has no intact document."""
        for _ in range(READS):
            found = {p: read_document(p, _checked, self._damaged) for p in self._documents(key)}
            if found and all(path.exists() for path, document in found.items() if document is None):
                break  # else another process has merged it into its own document
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
        """Write a document, then delete the documents that were merged into it. *Raises* OSError."""
        text = json.dumps(vars(document), indent=0)
        write_whole(self.folder(key) / f"{process_name()}.json", f"{text}\n".encode())
        for old in replaces:
            old.unlink(missing_ok=True)

    def touch(self, key: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder(key) / USED).touch()

    def remove(self, key: str) -> None:
        """Remove an entry's documents, except those published meanwhile."""
        for path in self._documents(key):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.folder(key) / USED).unlink(missing_ok=True)
            self.folder(key).rmdir()

    def _documents(self, key: str) -> list[Path]:
        return sorted(self.folder(key).glob("*.json"))


def union(newest_first: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Merge the documents' files. All files of a `unit_of` group come from the newest document with any."""
    files: dict[str, str] = {}
    owners: dict[str, int] = {}
    for number, document in enumerate(newest_first):
        for path, digest in document.items():
            if owners.setdefault(unit_of(path), number) == number:
                files[path] = digest
    return files


def unit_of(path: str) -> str:
    """Return the group of files that are only used together: a Triton kernel's folder, or the file alone."""
    # Triton uses a kernel if its group file exists, and fails if another file of the group does not
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == TRITON and len(parts) > 2 else path


def _checked(found: Any) -> Document:
    facts, files, notes = (dict(found[name]) for name in ("facts", "files", "notes"))
    document = Document(facts, files, notes, found["created"])
    if not isinstance(document.created, (int, float)):
        raise ValueError(f"created={document.created!r} is no time")
    for path, digest in document.files.items():
        parts = PurePosixPath(path).parts
        if not {*parts[:1]} & {*PARTS} or ".." in parts or not _DIGEST.fullmatch(digest):
            raise ValueError(f"{path!r}: {digest!r} is not a path in a work folder with its sha256")
    return document
