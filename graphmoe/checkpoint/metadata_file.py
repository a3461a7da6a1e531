"""Safe readers of a checkpoint's files: ``.metadata`` of torch's DCP, plain values and tensors.

The unpickler accepts only class names that our checkpoints have; they become records without methods.
The records are validated and converted to DCP's classes field by field.
"""

import io
import math
import os
import pickle
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from graphmoe.checkpoint.folders import MANIFEST, METADATA, CheckpointError, files_in
from graphmoe.config.untrusted import FileError, is_file_name, read_bytes

_DCP, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_RECORDS = {
    *((_DCP, f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
    *((_DCP, kind) for kind in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    (_DCP, "_MEM_FORMAT_ENCODING"),
    (_FILES, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
# bytes, in the pickles of protocol 2 that torch.save writes
_BYTES: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): lambda text, encoding: text.encode({"latin1": "latin1"}[encoding]),
    ("__builtin__", "bytes"): lambda: b"",
}
_DTYPES = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
_VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES},
}
# in format 1, what torch.save wrote for a tensor
_REBUILT = {
    *(("torch._utils", f"_rebuild_tensor_v{version}") for version in (2, 3)),
    *(("torch", name) for name in vars(torch) if name.endswith("Storage")),
    *(("torch.storage", "UntypedStorage"), ("collections", "OrderedDict")),
}
_HEADER_BYTES, _PICKLE_BYTES = 2**16, 2**12  # about 1 KiB and 200 bytes are written
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = tuple[Count, ...]


class StoredPart(Struct, tag="_StorageInfo"):
    """Part of an entry: file name in the checkpoint's folder, offset and length in bytes."""

    relative_path: str
    offset: Count
    length: Count
    transform_descriptors: None = None  # our files are stored untransformed


class _Bytes(Struct, tag="BytesStorageMetadata"): ...


class _Chunk(Struct, tag="ChunkStorageMetadata"):
    offsets: Size
    sizes: Size


class _Properties(Struct, tag="TensorProperties"):
    state: tuple[Any, ...]  # dtype first


class _Tensor(Struct, tag="TensorStorageMetadata"):
    properties: _Properties
    size: Size
    chunks: list[_Chunk]


class _Index(Struct, tag="MetadataIndex", frozen=True):
    fqn: str
    offset: Size | None = None


class _Metadata(Struct, tag="Metadata"):
    state_dict_metadata: dict[str, _Bytes | _Tensor]
    storage_data: dict[_Index, StoredPart]


def read_metadata(folder: Path) -> Metadata:
    """Return names, shapes, dtypes and file positions of the entries in a checkpoint folder.

    ``storage_data`` maps MetadataIndex to StoredPart. *Raises* CheckpointError naming a file that is invalid
    or not in the manifest.
    """
    path = folder / METADATA
    try:
        found = _Unpickler(io.BytesIO(read_bytes(path)), _RECORDS).load()
        saved = _metadata(msgspec.convert(found, _Metadata, from_attributes=True))
    except FileError as error:
        raise CheckpointError(str(error)) from error
    except Exception as error:  # a damaged pickle may raise any class
        why = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path} is not what a checkpoint of graphmoe has: {why}") from error
    for name in {part.relative_path for part in saved.storage_data.values()} - files_in(folder).keys():
        raise CheckpointError(f"{folder / name} is not listed in {MANIFEST}")
    return saved


class _Record:
    """Stand-in for an object of the pickle; ``type`` is its class name."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


_InPython: Any = pickle._Unpickler


class _Unpickler(_InPython):
    """Unpickler that accepts only known (module, name) pairs and never looks up attributes.

    It is the one in Python, to check keys before they are hashed: hashing a tuple of pairs of pairs takes
    exponential time. Sets hash their items, a bytearray takes the memory that it asks for, and no checkpoint
    has one.
    """

    dispatch = {
        code: load
        for code, load in _InPython.dispatch.items()
        if bytes([code]) not in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8)
    }

    def __init__(self, file: io.BytesIO, known: Collection[tuple[str, str]] = ()) -> None:
        super().__init__(file)
        # new classes for each read, since a pickle may set class attributes
        self._records = {each: type(each[1], (_Record,), {"type": each[1]}) for each in known}
        self._values = _VALUES if known else _BYTES

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def find_class(self, module: str, name: str) -> Any:
        found = self._records.get((module, name)) or self._values.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"the pickle names {module}.{name}, which no checkpoint contains")
        return found

    def load_dict(self) -> None:
        _require_plain_keys(self.stack[::2])
        super().load_dict()

    def load_setitem(self) -> None:
        _require_plain_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        _require_plain_keys(self.stack[::2])
        super().load_setitems()

    dispatch |= {
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _require_plain_keys(keys: Sequence[Any]) -> None:
    for key in keys:
        if not isinstance(key, str | int | _Record):
            raise pickle.UnpicklingError(f"a key is a {type(key).__name__}, which no checkpoint contains")


def read_part(file: IO[bytes], part: StoredPart) -> bytearray:
    """Return a part of a file. *Raises* EOFError if the file is shorter."""
    if part.offset + part.length > os.fstat(file.fileno()).st_size:
        raise EOFError("the file ends before its part")
    content = bytearray(part.length)
    file.seek(part.offset)
    file.readinto(content)  # type: ignore[attr-defined]
    return content


def read_tensor(file: IO[bytes], part: StoredPart, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return a new tensor: raw elements, or what ``torch.save`` wrote in format 1.

    Time and memory are bounded by the size of the tensor. *Raises* any Exception for other content.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes <= part.length <= num_bytes + _HEADER_BYTES:
        raise EOFError(f"{part.length} bytes hold no tensor of {num_bytes}")
    content = read_part(file, part)
    if part.length == num_bytes:
        return _elements(content, dtype).view(shape)
    archive = _archive(content)
    pickled = _record(archive, "/data.pkl", _PICKLE_BYTES)
    _, first, size, strides, *_ = _Unpickler(io.BytesIO(pickled), _REBUILT).load().args
    if size != shape:
        raise pickle.UnpicklingError("the tensor has another shape")
    elements = _elements(bytearray(_record(archive, "/data/0", num_bytes)), dtype)
    return elements.as_strided(size, strides, first)  # checks that they are inside


def _elements(content: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


class _Limited(io.BytesIO):
    most: float = _HEADER_BYTES + 2**10

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        if len(found) > self.most:
            raise zipfile.BadZipFile("its list of records is larger than that of one value")
        return found


def _archive(content: bytes | bytearray) -> zipfile.ZipFile:
    # a list of records is parsed in Python, so its length is limited
    file = _Limited(content)
    archive = zipfile.ZipFile(file)
    file.most = math.inf
    return archive


def _record(archive: zipfile.ZipFile, end: str, most_bytes: int) -> bytes:
    found = next(each for each in archive.infolist() if each.filename.endswith(end))
    if found.compress_type != zipfile.ZIP_STORED or found.file_size > most_bytes:
        raise zipfile.BadZipFile("a record is compressed or too large, which no checkpoint's is")
    return archive.read(found)


def read_plain(content: bytes | bytearray) -> Any:
    """Return the plain value that ``torch.save`` wrote. *Raises* any Exception for other content."""
    found = _Unpickler(io.BytesIO(_record(_archive(content), "/data.pkl", len(content)))).load()
    left, items = max(len(content), 2**20), [found]
    while items:
        item = items.pop()
        if isinstance(item, dict | list | tuple):
            left -= 2 * len(item)
            if left < 0:  # pairs of pairs of one memoised value are exponentially many
                raise pickle.UnpicklingError("the value is larger than its file")
            items += [*item, *item.values()] if isinstance(item, dict) else item
    return found


def _metadata(read: _Metadata) -> Metadata:
    stored = {
        MetadataIndex(index.fqn, None if index.offset is None else torch.Size(index.offset)): part
        for index, part in read.storage_data.items()
    }
    for part in stored.values():
        if not is_file_name(part.relative_path):
            raise ValueError(f"an entry names '{part.relative_path}', which is not a file of its folder")
    entries = {name: _entry(name, each) for name, each in read.state_dict_metadata.items()}
    for name, entry in entries.items():
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]
        offsets = [None if chunk is None else chunk.offsets for chunk in chunks]
        if any(MetadataIndex(name, offset) not in stored for offset in offsets):
            raise ValueError(f"the metadata does not name the file of each part of {name}")
    return Metadata(entries, storage_data=stored, storage_meta=StorageMeta())


def _entry(name: str, found: _Bytes | _Tensor) -> BytesStorageMetadata | TensorStorageMetadata:
    if isinstance(found, _Bytes):
        return BytesStorageMetadata()
    for chunk in found.chunks:
        ends = [start + length for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(found.size) or any(e > most for e, most in zip(ends, found.size, strict=True)):
            raise ValueError(f"a part of {name} ends at {ends}, outside of its shape {list(found.size)}")
    if sum(math.prod(chunk.sizes) for chunk in found.chunks) != math.prod(found.size):
        raise ValueError(f"the parts of {name} do not cover its {math.prod(found.size)} elements")
    if some_overlap(found.chunks):
        raise ValueError(f"parts of {name} overlap")
    dtype = found.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in found.chunks]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(found.size), chunks)


def some_overlap(chunks: Sequence[_Chunk | ChunkStorageMetadata]) -> bool:
    # Sort by the dimension with the most distinct offsets, so that each chunk is compared with few others.
    dims = range(len(chunks[0].offsets)) if chunks else range(0)
    dim = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=0)
    ordered = sorted(chunks, key=lambda chunk: chunk.offsets[dim : dim + 1])
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            sides = [*zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)]
            if all(max(a, b) < min(a + n, b + m) for a, n, b, m in sides):
                return True
            if sides[dim][2] >= sides[dim][0] + sides[dim][1]:  # so do all later ones
                break
    return False
