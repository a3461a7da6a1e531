"""Files of a work folder: which of them are kept, in what form, and which of them torch has read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphmoe.runtime.cache.entries import INDUCTOR, TRITON

GROUP_FILE = "__grp__"
"""Begins the name of the file in which Triton lists the files of a kernel, by their absolute paths."""
CHILDREN = "child_paths"
_SKIPPED_FOLDERS = {"locks", "__pycache__"}
_SKIPPED_ENDS = (".lock", ".tmp")


def kept_files(work: Path) -> Iterator[tuple[str, Path]]:
    """(path below the work folder, path) of what is worth keeping: no locks, nothing that is half written.

    What is compiling must be done. Names of unfinished files are those of torch/_inductor/codecache.py
    (``.<pid>.<thread>.tmp``) and triton/runtime/cache.py (``tmp.pid_<pid>_<uuid>/``).
    """
    for part in (INDUCTOR, TRITON):
        for folder, folders, names in os.walk(work / part):
            folders[:] = [
                name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("tmp.")
            ]
            for name in names:
                path = Path(folder, name)
                if name != "lock" and not name.endswith(_SKIPPED_ENDS) and not path.is_symlink():
                    yield path.relative_to(work).as_posix(), path


def stored_form(path: Path, content: bytes, work: Path) -> bytes | None:
    """The content without the place of the work folder; None for what holds only at this place.

    A group file gets the names of its children in Triton's folder, which must all be there.
    """
    group = _group(path, content)
    if group is None:
        return content
    children: dict[str, str] = {}
    for name, child in group[CHILDREN].items():
        inside = Path(child).is_relative_to(work / TRITON)
        if not inside or not os.path.exists(child):
            return None
        children[name] = Path(child).relative_to(work / TRITON).as_posix()
    return json.dumps({**group, CHILDREN: children}, sort_keys=True).encode()


def placed_form(path: Path, content: bytes, work: Path) -> bytes:
    """A stored content as it must be in this work folder: what `stored_form` took away."""
    group = _group(path, content)
    if group is None:
        return content
    children = {name: str(work / TRITON / child) for name, child in group[CHILDREN].items()}
    return json.dumps({**group, CHILDREN: children}).encode()


def has_its_group(path: Path) -> bool:
    """False for a placed group file, one of whose children is not there."""
    if not path.name.startswith(GROUP_FILE) or not path.exists():
        return True
    group = _group(path, path.read_bytes())
    return group is not None and all(os.path.exists(child) for child in group[CHILDREN].values())


def mark_unread(path: Path) -> None:
    """Set the time of the last read so far back that `was_read` can tell a later one."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns))


def was_read(path: Path) -> bool:
    """Whether the file was read since `mark_unread`, or cannot be asked."""
    try:
        return path.stat().st_atime_ns != 0
    except OSError:
        return True


def tells_reads(folder: Path) -> bool:
    """Whether the file system notes reads at all; one that is mounted with noatime does not."""
    probe = folder / "probe"
    probe.write_bytes(b"?")
    mark_unread(probe)
    probe.read_bytes()
    told = was_read(probe)
    probe.unlink()
    return told


def _group(path: Path, content: bytes) -> dict[str, Any] | None:
    """What a group file of Triton's says; None for any other file."""
    if not path.name.startswith(GROUP_FILE):
        return None
    try:
        group = json.loads(content)
        return group if isinstance(group[CHILDREN], dict) else None
    except (ValueError, KeyError, TypeError):
        return None
