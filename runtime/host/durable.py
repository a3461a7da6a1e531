"""Writes that survive a crash: nothing is visible under its name before it is on the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replace the file by ``text`` atomically; a crash leaves the old content or the new one."""
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the folder's list of names on the disk, so that a rename in it survives a power cut.

    A file system that cannot do so for folders (EINVAL) does it in its own time.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
