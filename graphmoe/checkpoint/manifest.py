"""manifest.json: the list of a checkpoint's files with their sizes and sha256."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from graphmoe.checkpoint.errors import CheckpointError
from graphmoe.checkpoint.metadata_file import METADATA
from graphmoe.config.untrusted import FileError, is_file_name, open_at_once, read_json
from graphmoe.runtime.host.files import replace_text

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class FileSum:
    """What a file holds: its sha256 in hexadecimal and its size in bytes."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class _Manifest:
    """The fields that are read."""

    format: int
    files: dict[str, FileSum]


def write_manifest(folder: Path, step: int, sums: dict[str, FileSum]) -> None:
    """Write manifest.json, the last file of a checkpoint, durably."""
    document = {
        "format": _FORMAT,
        "step": step,
        "torch": torch.__version__,
        "files": {name: asdict(sums[name]) for name in sorted(sums)},
    }
    replace_text(folder / MANIFEST, json.dumps(document, indent=1) + "\n", durably=True)


def damage(folder: Path, *, share: int = 0, shares: int = 1, contents: bool = True) -> list[str]:
    """What differs from the manifest, one line per file; empty for a whole checkpoint.

    Reads each file; with ``shares``, each shares-th file only, so that ranks can split the work.
    Without ``contents`` only sizes are compared.
    """
    try:
        manifest = read_json(folder / MANIFEST, _Manifest)
    except FileError as error:
        return [f"{MANIFEST}: cannot be read ({error})"]
    if manifest.format != _FORMAT:
        return [f"{MANIFEST}: format {manifest.format}, this version reads {_FORMAT}"]
    if METADATA not in manifest.files or not all(map(is_file_name, manifest.files)):
        return [f"{MANIFEST}: it must name {METADATA}, and files of its own folder only"]
    names = sorted(manifest.files)[share::shares]
    return [line for name in names if (line := _file_damage(folder / name, manifest.files[name], contents))]


def require_named(folder: Path, names: set[str]) -> None:
    """Raise CheckpointError where the manifest of a checkpoint names not all of these files."""
    if unnamed := sorted(names - read_json(folder / MANIFEST, _Manifest).files.keys()):
        raise CheckpointError(f"{folder / unnamed[0]} is to be read, but {MANIFEST} does not name it")


def _file_damage(path: Path, expected: FileSum, contents: bool) -> str | None:
    try:
        with open(path, "rb", opener=open_at_once) as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                return f"{path.name}: no regular file"
            if found.st_size != expected.num_bytes:
                return f"{path.name}: {found.st_size} bytes, the manifest says {expected.num_bytes}"
            if not contents:
                return None
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name}: cannot be read ({error})"
    if sha256 != expected.sha256:
        return f"{path.name}: sha256 {sha256[:12]}..., the manifest says {expected.sha256[:12]}..."
    return None
