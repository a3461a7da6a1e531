"""Sums of files as they were written, and what differs from them now."""

import hashlib
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphmoe.config.untrusted import open_at_once


@dataclass(frozen=True)
class FileSum:
    """Sum of a file: its sha256 in hexadecimal and its size in bytes."""

    sha256: str
    num_bytes: int


def sha256_of(path: Path, stops: Callable[[], bool] = lambda: False) -> str:
    """The sha256 of a file in hexadecimal; of its beginning when ``stops`` becomes true meanwhile."""
    digest = hashlib.sha256()
    with open(path, "rb", opener=open_at_once) as file:
        while not stops() and (block := file.read(4 << 20)):
            digest.update(block)
    return digest.hexdigest()


def sum_of(path: Path) -> FileSum:
    """The sum of a file as it is now."""
    return FileSum(sha256_of(path), path.stat().st_size)


def difference(path: Path, written: FileSum, *, contents: bool = True) -> str | None:
    """Return how a file differs from its sum, with its name; None where it does not.

    Without ``contents`` only sizes are compared. A FIFO is not waited for.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return f"{path.name}: no regular file"
        if found.st_size != written.num_bytes:
            return f"{path.name}: {found.st_size} bytes, written with {written.num_bytes}"
        if contents and (sha256 := sha256_of(path)) != written.sha256:
            return f"{path.name}: sha256 {sha256[:12]}..., written with {written.sha256[:12]}..."
    except OSError as error:
        return f"{path.name}: cannot be read ({error})"
    return None
