"""Store of content-addressed files: a file's name is its SHA-256, which each read verifies."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from graphmoe.config.untrusted import open_at_once

log = logging.getLogger(__name__)

T = TypeVar("T")
# Suffix of a file being written
DRAFT = ".draft"
ORPHAN_AGE_S = 3600.0


class DamagedBlob(Exception):
    """Raised for content that does not match its hash."""


DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Blob:
    digest: str
    num_bytes: int
    written: float  # Unix time of the newest `put`


class Blobs:
    """Stored files ``blobs/3f/3fa9...``. They need no locks: each is renamed to its name once complete."""

    def __init__(self, cache: Path) -> None:
        self._folder, self._damaged = cache / "blobs", cache / "damaged"

    def path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest

    def put(self, content: bytes) -> str:
        """Store content unless already stored; return its SHA-256."""
        digest = hashlib.sha256(content).hexdigest()
        path = self.path(digest)
        with contextlib.suppress(OSError):
            if path.stat().st_size == len(content):  # else truncated, and not read yet
                os.utime(path)  # an entry is about to refer to it
                return digest
        # no fsync: the next read detects what a power cut truncated
        write_whole(path, content)
        return digest

    def get(self, digest: str) -> bytes:
        """Return verified content. *Raises* DamagedBlob or OSError."""
        content = read_or_damaged(self.path(digest))
        if hashlib.sha256(content).hexdigest() != digest:
            raise DamagedBlob(digest)
        return content

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def set_aside(self, digest: str) -> None:
        """Move a blob to ``damaged/``; no effect if it is missing or the folder is read-only."""
        set_aside(self.path(digest), self._damaged)

    def remove(self, blob: Blob) -> bool:
        """Remove a blob unless it was stored again after its listing; return whether it was removed."""
        path = self.path(blob.digest)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= blob.written:
                path.unlink()
                return True
        return False

    def __iter__(self) -> Iterator[Blob]:
        for path in self._folder.glob("??/*"):
            if DIGEST.fullmatch(path.name) and path.parent.name == path.name[:2]:
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    yield Blob(path.name, status.st_size, status.st_mtime)


def read_or_damaged(path: Path) -> bytes:
    """Read a file. *Raises* DamagedBlob if the disk cannot read it."""
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
    """Write a file atomically; with ``first`` only if it does not exist. *Raises* OSError."""
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
    """Create a folder with its parent's mode."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode))


def set_aside(path: Path, folder: Path) -> None:
    """Move a file to a folder, if possible."""
    try:
        make_folder(folder)
        path.rename(folder / f"{path.name}.{secrets.token_hex(4)}")
    except OSError:
        pass


def read_document(path: Path, read: Callable[[Any], T], damaged: Path) -> T | None:
    """Parse a JSON file; None if it is missing, or damaged and moved away."""
    try:
        return read(json.loads(read_or_damaged(path)))
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, DamagedBlob) as error:
        log.warning("compile cache: %s is damaged (%s); it is set aside", path, error)
        set_aside(path, damaged)
        return None
