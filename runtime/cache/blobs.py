"""Contents by their hash: the name of a file in the compile cache proves that its content is intact."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from graphmoe.config.untrusted import open_at_once

log = logging.getLogger(__name__)

T = TypeVar("T")
DRAFT = ".draft"
"""Suffix of a file that is being written."""
ORPHAN_AGE_S = 3600.0
"""Seconds for which a file that no entry names may belong to an entry that is about to be written."""


class DamagedBlob(Exception):
    """A blob whose content does not have the hash that its name says."""


@dataclass(frozen=True)
class Blob:
    """A stored content, as the file system lists its file."""

    digest: str
    num_bytes: int
    written: float
    """Unix time at which the content was last stored."""


class Blobs:
    """``blobs/3f/3fa9...`` in the folder of a cache. Readers need no lock: a rename makes each visible."""

    def __init__(self, cache: Path) -> None:
        self._folder, self._damaged = cache / "blobs", cache / "damaged"

    def path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest

    def put(self, content: bytes) -> str:
        """Store the content if it is not there; returns its sha256. *Raises* OSError.

        Nothing waits for the disk: what a power cut tears fails its check at the next read.
        """
        digest = hashlib.sha256(content).hexdigest()
        path = self.path(digest)
        with contextlib.suppress(OSError):
            if path.stat().st_size == len(content):  # else torn, and found before anyone read it
                os.utime(path)  # somebody is about to name it
                return digest
        write_whole(path, content)
        return digest

    def get(self, digest: str) -> bytes:
        """Return the content. *Raises* DamagedBlob, or OSError such as FileNotFoundError."""
        content = read_or_damaged(self.path(digest))
        if hashlib.sha256(content).hexdigest() != digest:
            raise DamagedBlob(digest)
        return content

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def set_aside(self, digest: str) -> None:
        """Move a blob to ``damaged/``; nothing where it is gone or the folder is read-only."""
        set_aside(self.path(digest), self._damaged)

    def remove(self, blob: Blob) -> bool:
        """Remove a blob that nobody has stored again since it was listed; returns whether it went."""
        path = self.path(blob.digest)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= blob.written:
                path.unlink()
                return True
        return False

    def __iter__(self) -> Iterator[Blob]:
        for path in self._folder.glob("??/*"):
            if path.suffix != DRAFT:
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    yield Blob(path.name, status.st_size, status.st_mtime)


def read_or_damaged(path: Path) -> bytes:
    """Return the file's content. *Raises* DamagedBlob where the disk cannot read it, OSError otherwise."""
    try:
        with open(path, "rb", opener=open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DamagedBlob(path.name)
            return file.read()
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedBlob(path.name) from error
        raise


def write_whole(path: Path, content: bytes, *, first: bool = False) -> None:
    """Write the file so that nobody sees a part of it. *Raises* OSError, and then leaves nothing.

    ``first`` leaves a file that is there. Of two such writers at the same moment the first one's holds; on a
    file system without links the last one's.
    """
    make_folder(path.parent)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}{DRAFT}")
    try:
        draft.write_bytes(content)
        if path.parent.stat().st_mode & stat.S_IWGRP:  # compile.cache_shared, whatever the umask
            draft.chmod(0o660)
        if first:
            with contextlib.suppress(OSError):
                os.link(draft, path)
        if first and path.exists():
            draft.unlink()
        else:
            draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder of the cache if it is not there, with the mode of its parent."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode))


def set_aside(path: Path, folder: Path) -> None:
    """Move a file into a folder, under a name of its own, if that can be done."""
    try:
        make_folder(folder)
        path.rename(folder / f"{path.name}.{secrets.token_hex(4)}")
    except OSError:
        pass


def read_document(path: Path, read: Callable[[Any], T], damaged: Path) -> T | None:
    """Return what ``read`` makes of a JSON file; None where it is gone, or damaged and so set aside."""
    try:
        return read(json.loads(read_or_damaged(path)))
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, DamagedBlob) as error:
        log.warning("compile cache: %s is damaged (%s); it is set aside", path, error)
        set_aside(path, damaged)
        return None
