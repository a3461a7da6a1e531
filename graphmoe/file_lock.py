"""A lock on a file, which the kernel frees when its holder dies."""

from __future__ import annotations

import fcntl
import functools
import os
from pathlib import Path

_held: set[FileLock] = set()


class FileLock:
    """An flock, held by this process and by no child of it; ``take`` is how to get one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _held.add(self)
        _release_in_children()

    @classmethod
    def take(cls, path: Path, *, wait: bool = False) -> FileLock | None:
        """The lock, or None while somebody else has it; ``wait`` blocks until it is free."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def release(self) -> None:
        """Close our end; the lock is free once no process has it open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        _held.discard(self)


@functools.cache
def _release_in_children() -> None:
    """A forked child shares the locks and would hold them on after our death."""

    def release_all() -> None:
        for lock in list(_held):
            lock.release()

    os.register_at_fork(after_in_child=release_all)
