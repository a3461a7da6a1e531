"""The ``.metadata`` of a checkpoint: a pickle of torch.distributed.checkpoint, of which nothing runs here.

The unpickler knows the names that our own states lead to and no others. Even these give records without
methods, which are then made into what DCP takes, field by field.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from graphmoe.checkpoint.folders import METADATA, CheckpointError
from graphmoe.config.untrusted import FileError, is_file_name, read_bytes

Stored = BytesStorageMetadata | TensorStorageMetadata
T = TypeVar("T")

_DCP, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_RECORDS = {
    **{
        (_DCP, name): name
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (_FILES, "_StorageInfo"): "_StorageInfo",
    ("torch.serialization", "_get_layout"): "_get_layout",
    ("pathlib", "PosixPath"): "PosixPath",
    ("pathlib._local", "PosixPath"): "PosixPath",  # Python 3.13
}
_VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    **{
        ("torch", str(d).removeprefix("torch.")): d
        for d in vars(torch).values()
        if isinstance(d, torch.dtype)
    },
}


@dataclass(frozen=True)
class StoredPart:
    """A part of an entry: the file in the checkpoint's folder that it lies in, and where, in bytes."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None
    """Always None for DCP: our files are stored as they are."""


def read_metadata(folder: Path) -> Metadata:
    """Return names, shapes, dtypes and places of the entries in a checkpoint folder.

    Its ``storage_data`` are StoredPart by MetadataIndex. *Raises* CheckpointError naming a file that is none
    of ours.
    """
    path = folder / METADATA
    try:
        content = read_bytes(path)
        return _metadata(_Unpickler(io.BytesIO(content)).load())
    except FileError as error:
        raise CheckpointError(str(error)) from error
    except Exception as error:  # of a damaged pickle come all kinds
        why = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path} is not what a checkpoint of graphmoe has: {why}") from error


def file_names(saved: Metadata) -> set[str]:
    """Return the names of the files in which the entries lie."""
    return {part.relative_path for part in saved.storage_data.values()}


class _Record:
    """Stand-in for an object of another class in the pickle."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler of exact pairs of module and name; no attribute of anything is ever looked up."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # of each read anew, since a pickle may set attributes of a class
        self._records = {known: type(name, (_Record,), {}) for known, name in _RECORDS.items()}

    def find_class(self, module: str, name: str) -> Any:
        found = self._records.get((module, name)) or _VALUES.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint holds")
        return found


def _metadata(found: Any) -> Metadata:
    fields = _fields(found, "Metadata")
    stored = {_index(key): _part(part) for key, part in _dict(fields.get("storage_data")).items()}
    entries = {_is(str, k): _entry(k, each) for k, each in _dict(fields.get("state_dict_metadata")).items()}
    for name, entry in entries.items():
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else []
        wanted = [MetadataIndex(name, chunk.offsets) for chunk in chunks]
        for index in wanted if isinstance(entry, TensorStorageMetadata) else [MetadataIndex(name)]:
            if index not in stored:
                raise ValueError(f"{name} has no place in a file")
    return Metadata(entries, storage_data=stored, storage_meta=StorageMeta())


def _entry(name: str, found: Any) -> Stored:
    if _kind(found) == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(found, "TensorStorageMetadata")
    size = _size(fields.get("size"))
    chunks = [_chunk(each, size) for each in _is(list, fields.get("chunks"))]
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"the parts of {name} are not all of its {math.prod(size)} elements")
    if _some_overlap(chunks):
        raise ValueError(f"parts of {name} lie in each other's place")
    dtype, *_ = _state(fields.get("properties"), "TensorProperties", tuple)
    return TensorStorageMetadata(TensorProperties(_is(torch.dtype, dtype)), size, chunks)


def _some_overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Tell whether two parts of a tensor share an element."""
    ordered = sorted(chunks, key=lambda chunk: tuple(chunk.offsets))
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            sides = [*zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)]
            if all(max(a, b) < min(a + n, b + m) for a, n, b, m in sides):
                return True
            if sides[0][2] >= sides[0][0] + sides[0][1]:  # as do all behind it
                break
    return False


def _chunk(found: Any, whole: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(found, "ChunkStorageMetadata")
    chunk = ChunkStorageMetadata(_size(fields.get("offsets")), _size(fields.get("sizes")))
    ends = [start + length for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]
    if len(ends) != len(whole) or any(end > most for end, most in zip(ends, whole, strict=True)):
        raise ValueError(f"a part at {ends} of a tensor of {list(whole)}")
    return chunk


def _index(found: Any) -> MetadataIndex:
    fields = _fields(found, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_is(str, fields.get("fqn")), None if offset is None else _size(offset))


def _part(found: Any) -> StoredPart:
    fields = _fields(found, "_StorageInfo")
    name = _is(str, fields.get("relative_path"))
    if not is_file_name(name):
        raise ValueError(f"an entry lies in '{name}', which is no file of its folder")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed, which no file of a checkpoint is")
    return StoredPart(name, _count(fields.get("offset")), _count(fields.get("length")))


def _size(found: Any) -> torch.Size:
    return torch.Size(map(_count, _is(tuple, found)))


def _count(found: Any) -> int:
    number = _is(int, found)
    if not 0 <= number < 2**63:
        raise ValueError(f"{number} where a size is due")
    return number


def _fields(found: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of an object; those at a default may be left out."""
    return _state(found, kind, dict)


def _state(found: Any, kind: str, state: type[T]) -> T:
    if _kind(found) != kind:
        raise ValueError(f"a {_kind(found)} where a {kind} is due")
    return _is(state, getattr(found, "state", None))


def _kind(found: Any) -> str:
    return type(found).__name__


def _dict(found: Any) -> dict[Any, Any]:
    return _is(dict, found)


def _is(kind: type[T], found: Any) -> T:
    if type(found) is not kind:
        raise ValueError(f"a {_kind(found)} where a {kind.__name__} is due")
    return found
