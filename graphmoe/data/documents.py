"""A table of documents over memory-mapped token files, and its split for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from graphmoe.data.indexed import TokenFile
from graphmoe.data.order import GOLDEN, held_out, mix64


@dataclass(frozen=True)
class Documents:
    """Documents of several token files; 20 bytes of memory for each."""

    files: Sequence[TokenFile]
    file_N: npt.NDArray[np.int32]
    start_N: npt.NDArray[np.int64]
    length_N: npt.NDArray[np.int64]

    @classmethod
    def from_files(cls, files: Sequence[TokenFile]) -> Documents:
        """All documents of these files, in order; empty ones are left out."""
        file_N = np.repeat(np.arange(len(files), dtype=np.int32), [len(f.start_N) for f in files])
        none = [np.zeros(0, np.int64)]
        start_N = np.concatenate(none + [f.start_N for f in files])
        length_N = np.concatenate(none + [f.length_N for f in files])
        return cls(files, file_N, start_N, length_N).select(length_N > 0)

    @property
    def num_documents(self) -> int:
        return len(self.length_N)

    @property
    def num_tokens(self) -> int:
        return int(self.length_N.sum())

    def select(self, keep_N: npt.NDArray[np.bool_]) -> Documents:
        """The documents where ``keep_N`` is true."""
        return Documents(self.files, self.file_N[keep_N], self.start_N[keep_N], self.length_N[keep_N])

    def tokens(self, number: int, first: int, count: int) -> npt.NDArray[Any]:
        """Up to ``count`` tokens of one document from its token ``first`` on."""
        start = int(self.start_N[number])
        stop = min(start + first + count, start + int(self.length_N[number]))
        return self.files[int(self.file_N[number])].tokens_T[start + first : stop]

    def place(self, number: int, token: int) -> str:
        """File, document and position of one token, for messages; all counted from 0."""
        file = self.files[int(self.file_N[number])]
        absolute = int(self.start_N[number]) + token
        document = file.document_at(absolute)
        return f"{file.path}, document {document}, position {absolute - int(file.start_N[document])}"


def split_for_validation(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """(train, validation): no token is in both, and the choice does not depend on a seed.

    Whole documents, chosen by a hash of their number. With fewer than ``1 / fraction`` documents no whole
    one can be spared: the last ``fraction`` of the tokens of each document is held out instead.
    """
    count = documents.num_documents
    if fraction * count >= 1:
        number_N = np.arange(1, count + 1, dtype=np.uint64)
        val_N = held_out(mix64(number_N * np.uint64(GOLDEN)), fraction)
        return documents.select(~val_N), documents.select(val_N)
    tail_N = np.floor(documents.length_N * fraction).astype(np.int64)
    train = replace(documents, length_N=documents.length_N - tail_N)
    val = replace(documents, start_N=documents.start_N + train.length_N, length_N=tail_N)
    return train, val.select(tail_N > 0)
