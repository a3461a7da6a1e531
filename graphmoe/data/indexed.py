"""Megatron's ``.bin/.idx`` token files, version 1: reader and writer.

``.bin`` has concatenated token ids. ``.idx``, little-endian: magic, uint64 version 1, uint8 dtype code,
uint64 number of sequences, uint64 length of the document list, int32 length and int64 byte position of each
sequence, and the int64 document list: the first sequence of each document, then the number of sequences.
"""

import contextlib
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from graphmoe.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
CODE_OF_DTYPE = {np.dtype(name): code for code, name in enumerate(_DTYPES, start=1)}
DTYPE_OF_CODE = {code: dtype for dtype, code in CODE_OF_DTYPE.items()}

Int_N = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenFile:
    path: Path
    tokens_T: npt.NDArray[Any]
    start_N: Int_N
    length_N: Int_N
    sums: Mapping[str, str] | None = None  # expected sha256 of both files by name, if known
    entry: Path | None = None  # cache entry, if any
    compared: bool = True  # False until the files are checked against ``sums``
    inode: int = 0  # of the mapped ``path``

    def document_at(self, token: int) -> int:
        """Return the index of the document with this token."""
        ends_N = self.start_N + self.length_N
        return int(np.searchsorted(ends_N, token, side="right"))

    def require_whole(self) -> None:
        """Raise DataError if the mapped file became shorter: reading its lost pages would end the process."""
        with contextlib.suppress(FileNotFoundError):  # a removed file keeps its pages
            found, wanted = os.stat(self.path), self.tokens_T.nbytes
            if found.st_ino == self.inode and found.st_size < wanted:
                raise DataError(
                    f"{self.path} was truncated during a run: it has {found.st_size} bytes, and had {wanted}"
                )


def read_token_file(
    prefix: str | Path, *, sums: Mapping[str, str] | None = None, entry: Path | None = None
) -> TokenFile:
    """Open ``prefix.bin`` and ``prefix.idx``. *Raises* DataError naming file and bytes if damaged."""
    bin_path, idx_path = pair(prefix)
    for path in (idx_path, bin_path):
        if not path.is_file():
            why = "is not a regular file" if path.exists() else "does not exist"
            raise DataError(f"{path} {why}; {bin_path.name} and {idx_path.name} belong together")
    try:
        tokens_T, start_N, length_N = _open_pair(bin_path, idx_path)
    except OSError as error:
        raise DataError(f"{error.filename or bin_path} cannot be read ({error.strerror})") from error
    return TokenFile(bin_path, tokens_T, start_N, length_N, sums, entry, inode=os.stat(bin_path).st_ino)


def write_index(path: Path, dtype: npt.DTypeLike, length_N: npt.ArrayLike) -> None:
    """Write the ``.idx`` of a ``.bin`` with one sequence per document."""
    lengths_N = np.asarray(length_N, dtype=np.int64)
    count = len(lengths_N)
    longest = int(lengths_N.max(initial=0))
    if longest > np.iinfo(np.int32).max:
        place = f"document {int(lengths_N.argmax())} of {path}"
        raise DataError(f"{place} has {longest} tokens; the format ends at 2**31 - 1")
    pointers_N = (np.cumsum(lengths_N) - lengths_N) * np.dtype(dtype).itemsize
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[np.dtype(dtype)], count, count + 1))
        file.write(lengths_N.astype("<i4").tobytes())
        file.write(pointers_N.astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())


def write_token_file(prefix: str | Path, documents: Iterable[npt.ArrayLike], dtype: npt.DTypeLike) -> None:
    """Write documents of token ids as ``prefix.bin`` and ``prefix.idx``, the index last."""
    bin_path, idx_path = pair(prefix)
    lengths = []
    with open(bin_path, "wb") as file:
        for document in documents:
            tokens = np.asarray(document, dtype=dtype)
            lengths.append(len(tokens))
            file.write(tokens.tobytes())
        file.flush()
        os.fsync(file.fileno())
    write_index(idx_path, dtype, lengths)


def pair(prefix: str | Path) -> tuple[Path, Path]:
    """Return the ``.bin`` and ``.idx`` paths; the prefix may have either suffix."""
    text = str(prefix)
    text = text[:-4] if text.endswith((".bin", ".idx")) else text
    return Path(text + ".bin"), Path(text + ".idx")


def smallest_dtype(num_ids: int) -> np.dtype[Any]:
    """Return the smallest dtype for ids below ``num_ids`` that published readers support."""
    return np.dtype(np.uint16 if num_ids <= 1 << 16 else np.int32)


def _open_pair(bin_path: Path, idx_path: Path) -> tuple[npt.NDArray[Any], Int_N, Int_N]:
    raw = np.memmap(idx_path, dtype=np.uint8, mode="r") if idx_path.stat().st_size else np.zeros(0, np.uint8)
    dtype, sizes_M, pointers_M, documents = _parse_index(raw, idx_path)
    bin_bytes, wanted_bytes = bin_path.stat().st_size, int(sizes_M.sum()) * dtype.itemsize
    if bin_bytes != wanted_bytes:
        raise DataError(
            f"{bin_path} has {bin_bytes} bytes, but {idx_path.name} describes {len(sizes_M)} sequences with "
            f"{wanted_bytes // dtype.itemsize} tokens of {dtype.itemsize} bytes = {wanted_bytes} bytes; "
            f"the file is {'truncated' if bin_bytes < wanted_bytes else 'not the one that was indexed'}"
        )
    ends_M = np.cumsum(sizes_M)
    if not np.array_equal(pointers_M, (ends_M - sizes_M) * dtype.itemsize):
        raise DataError(f"{idx_path}: positions of sequences do not follow from their lengths; it is damaged")
    edges = np.concatenate([np.zeros(1, np.int64), ends_M])[documents]
    tokens_T = np.memmap(bin_path, dtype=dtype, mode="r") if bin_bytes else np.zeros(0, dtype)
    return tokens_T, edges[:-1], np.diff(edges)


def _parse_index(raw: npt.NDArray[np.uint8], path: Path) -> tuple[np.dtype[Any], Int_N, Int_N, Int_N]:
    what = f"{path} ({len(raw)} bytes)"
    if len(raw) < HEADER.size:
        raise DataError(f"{what} is shorter than the {HEADER.size} bytes of a header; it is truncated")
    magic, version, code, num_sequences, num_entries = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(f"{what} starts with {magic!r}, not {MAGIC!r}; it is not a Megatron index")
    if version != VERSION:
        raise DataError(f"{what} has index version {version}; only version {VERSION} is known")
    if code not in DTYPE_OF_CODE or not np.issubdtype(DTYPE_OF_CODE[code], np.integer):
        raise DataError(f"{what} has dtype code {code}, which is not an integer type")
    wanted = HEADER.size + num_sequences * 12 + num_entries * 8
    if len(raw) != wanted:
        with_modes = len(raw) == wanted + num_sequences
        cause = "it is of a multimodal corpus" if with_modes else "it is truncated or damaged"
        raise DataError(
            f"{path} has {len(raw)} bytes, but {num_sequences} sequences and {num_entries} document entries "
            f"take {wanted} bytes; {cause}"
        )
    sizes_at, documents_at = HEADER.size + num_sequences * 4, HEADER.size + num_sequences * 12
    sizes_M = raw[HEADER.size : sizes_at].view("<i4").astype(np.int64)
    pointers_M = raw[sizes_at:documents_at].view("<i8")
    documents = np.array(raw[documents_at:].view("<i8"))
    whole = len(documents) and documents[0] == 0 and documents[-1] == num_sequences
    if not whole or (documents[1:] < documents[:-1]).any() or (sizes_M < 0).any():
        raise DataError(f"{what}: its document list or lengths are not in order; it is damaged")
    return DTYPE_OF_CODE[code], sizes_M, pointers_M, documents
