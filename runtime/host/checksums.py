"""Checksums of files as written, and comparison with the files on disk."""

import hashlib
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphmoe.config.untrusted import open_at_once


@dataclass(frozen=True)
class FileSum:
    sha256: str
    num_bytes: int


def sha256_of(path: Path, stops: Callable[[], bool] = lambda: False) -> str:
    """SHA-256 of a file in hexadecimal; of a prefix if ``stops`` becomes true while reading."""
    digest = hashlib.sha256()
    with open(path, "rb", opener=open_at_once) as file:
        while not stops() and (block := file.read(4 << 20)):
            digest.update(block)
    return digest.hexdigest()


def sum_of(path: Path) -> FileSum:
    return FileSum(sha256_of(path), path.stat().st_size)


def difference(path: Path, written: FileSum, *, contents: bool = True) -> str | None:
    """Describe how a file differs from its checksum; None if it matches."""
    try:
        found = path.stat()
        # opening a FIFO would block until it has a writer
        if not stat.S_ISREG(found.st_mode):
            return f"{path.name}: no regular file"
        if found.st_size != written.num_bytes:
            return f"{path.name}: {found.st_size} bytes, written with {written.num_bytes}"
        if contents and (sha256 := sha256_of(path)) != written.sha256:
            return f"{path.name}: sha256 {sha256[:12]}..., written with {written.sha256[:12]}..."
    except OSError as error:
        return f"{path.name}: cannot be read ({error})"
    return None
