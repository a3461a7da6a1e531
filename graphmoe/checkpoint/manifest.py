"""manifest.json: the list of a checkpoint's files with their sizes and sha256."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from graphmoe.checkpoint.durable import write_durably

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class FileSum:
    """What a file holds: its sha256 in hexadecimal and its size in bytes."""

    sha256: str
    num_bytes: int


def write_manifest(folder: Path, step: int, sums: dict[str, FileSum]) -> None:
    """Write manifest.json, the last file of a checkpoint, durably."""
    document = {
        "format": _FORMAT,
        "step": step,
        "torch": torch.__version__,
        "files": {name: asdict(sums[name]) for name in sorted(sums)},
    }
    write_durably(folder / MANIFEST, json.dumps(document, indent=1) + "\n")


def damage(folder: Path, *, share: int = 0, shares: int = 1) -> list[str]:
    """What differs from the manifest, one line per file; empty for a whole checkpoint.

    Reads each file; with ``shares``, each shares-th file only, so that ranks can split the work.
    """
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        sums = {name: FileSum(**entry) for name, entry in document["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST}: cannot be read ({error!r})"]
    if document.get("format") != _FORMAT:
        return [f"{MANIFEST}: format {document.get('format')!r}, this version reads {_FORMAT}"]
    lines = [_file_damage(folder / name, sums[name]) for name in sorted(sums)[share::shares]]
    return [line for line in lines if line]


def _file_damage(path: Path, expected: FileSum) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.num_bytes:
            return f"{path.name}: {size} bytes, the manifest says {expected.num_bytes}"
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name}: cannot be read ({error})"
    if sha256 != expected.sha256:
        return f"{path.name}: sha256 {sha256[:12]}..., the manifest says {expected.sha256[:12]}..."
    return None
