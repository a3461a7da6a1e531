"""Samples of ``seq_len + 1`` tokens, their source documents and order, and the validation split.

A Feistel network with cycle walking permutes ``0 .. size-1``: O(1) time and memory for any position. Integer
arithmetic only, so the order is the same on every machine and numpy version.
"""

from __future__ import annotations

import hashlib
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from graphmoe.data.contents import contents_of, damaged
from graphmoe.data.errors import BadRecords, DataError
from graphmoe.data.indexed import TokenFile

DOCUMENT_KEY, SAMPLE_KEY, MIX_KEY = 2, 3, 6
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
ROUNDS = 8
MIX_BLOCK = 1024
MAX_BAD_IN_A_ROW = 1000

Tokens_BT = npt.NDArray[np.int64]
Index_N = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Documents:
    """Index of documents in several token files; 20 bytes of memory per document."""

    files: Sequence[TokenFile]
    file_N: npt.NDArray[np.int32]
    start_N: npt.NDArray[np.int64]
    length_N: npt.NDArray[np.int64]

    @classmethod
    def from_files(cls, files: Sequence[TokenFile]) -> Documents:
        """Return all non-empty documents, in order."""
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
        return Documents(self.files, self.file_N[keep_N], self.start_N[keep_N], self.length_N[keep_N])

    def tokens(self, number: int, first: int, count: int) -> npt.NDArray[Any]:
        """Return up to ``count`` tokens of a document, from token ``first``."""
        start = int(self.start_N[number])
        stop = min(start + first + count, start + int(self.length_N[number]))
        file = self.files[int(self.file_N[number])]
        file.require_whole()
        return file.tokens_T[start + first : stop]

    def place(self, number: int, token: int) -> str:
        """Return error text: file, document, position (from 0) of token ``token`` of document ``number``."""
        file = self.files[int(self.file_N[number])]
        absolute = int(self.start_N[number]) + token
        document = file.document_at(absolute)
        return f"{file.path}, document {document}, position {absolute - int(file.start_N[document])}"


def split_for_validation(
    documents: Documents, fraction: float, *, whole: bool = False
) -> tuple[Documents, Documents]:
    """Split into (train, validation) by a hash of document numbers, independent of the seed.

    With fewer than ``1 / fraction`` documents, validation is the last ``fraction`` of each document, or with
    ``whole`` one of several documents.
    """
    count = documents.num_documents
    if whole or fraction * count >= 1:
        number_N = np.arange(1, count + 1, dtype=np.uint64)
        val_N = held_out(mix64(number_N * np.uint64(GOLDEN)), fraction)
        return documents.select(~val_N), documents.select(val_N)
    tail_N = np.floor(documents.length_N * fraction).astype(np.int64)
    train = replace(documents, length_N=documents.length_N - tail_N)
    val = replace(documents, start_N=documents.start_N + train.length_N, length_N=tail_N)
    return train, val.select(tail_N > 0)


class Samples(ABC):
    """An endless sequence of samples: sample ``i`` is the same in every process."""

    seq_len: int
    num_samples: int | None
    """Samples per epoch; None if unknown or endless."""
    fingerprint: str
    """Text that identifies the samples' sizes, order and settings, not their tokens."""
    contents = ""
    """Hash of the tokens in token files (``contents_of``); empty if the source has none."""

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        """Return a sample's tokens [seq_len + 1]; positions continue after the first epoch."""
        raise NotImplementedError

    def reader(self, state: dict[str, Any] | None = None) -> Reader:
        """Return a reader at the first sample, or at a saved ``Reader.state``."""
        return Reader(self)


class Reader:
    """Reads samples in order; a source may override it for faster sequential access."""

    def __init__(self, samples: Samples):
        self.samples = samples

    def read(self, first: int, count: int) -> Tokens_BT:
        """Return ``count`` samples from ``first`` as [count, seq_len + 1]; ``first`` never decreases."""
        return np.stack([self.samples.sample(position) for position in range(first, first + count)])

    def seek(self, position: int) -> None:
        """Skip samples before ``position``."""

    def state(self) -> dict[str, Any]:
        """Return plain values from which ``Samples.reader`` can continue."""
        return {}

    def epochs(self, position: int) -> float:
        """Return the number of passes over the corpus before this sample (integral for streams)."""
        return position / self.samples.num_samples if self.samples.num_samples else 0.0


@dataclass(eq=False)
class PackedSamples(Samples):
    """Concatenated documents, cut every ``seq_len`` tokens.

    Consecutive samples share one token: the last label of one is the first input of the next. Each epoch
    shuffles the documents, cuts, shuffles the samples, and drops the remainder.
    """

    documents: Documents
    seq_len: int
    seed: int = 0
    shuffle: bool = True
    vocab_size: int | None = None  # ids are checked on access; None: unchecked
    bad: BadRecords = field(default_factory=BadRecords)

    num_samples: int = field(init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        num_tokens = self.documents.num_tokens
        self.num_samples = max(0, num_tokens - 1) // self.seq_len
        assert self.num_samples > 0, "too short for one sample: open_data refuses it before"
        lengths = hashlib.blake2b(self.documents.length_N.tobytes(), digest_size=8).hexdigest()
        self.fingerprint = f"packed:{lengths}:{num_tokens}:{self.seq_len}:{self.seed}:{self.shuffle}"
        self._order = lru_cache(maxsize=2)(self._compute_order)  # two: a batch may span two epochs

    @classmethod
    def least_tokens(cls, seq_len: int) -> int:
        """Return the number of tokens that a corpus needs for one sample."""
        return seq_len + 1

    @cached_property
    def contents(self) -> str:  # type: ignore[override]
        return contents_of(self.documents.files)

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        """Return a sample's tokens; a bad sample is replaced by the next good one of its epoch."""
        epoch, index = divmod(position, self.num_samples)
        tries = min(self.num_samples, MAX_BAD_IN_A_ROW)
        for step in range(tries):
            tokens_T = self._cut(epoch, (index + step) % self.num_samples)
            if tokens_T is not None:
                return tokens_T
        raise DataError(f"{tries} samples in a row contain bad tokens; the first: {self.bad.first}")

    def _cut(self, epoch: int, index: int) -> npt.NDArray[np.int64] | None:
        if self.shuffle:
            key = derive_key(self.seed, epoch, SAMPLE_KEY)
            index = int(permute(np.array([index]), self.num_samples, key)[0])
        document_N, end_N = self._order(epoch)
        tokens_T = np.empty(self.seq_len + 1, dtype=np.int64)
        first, filled = index * self.seq_len, 0
        row = int(np.searchsorted(end_N, first, side="right"))
        while filled < len(tokens_T):
            number = int(document_N[row])
            skip = first + filled - int(end_N[row]) + int(self.documents.length_N[number])
            part = self.documents.tokens(number, skip, len(tokens_T) - filled)
            tokens_T[filled : filled + len(part)] = part
            if self.vocab_size is not None and not self._check(part, number, skip):
                return None
            filled += len(part)
            row += 1
        return tokens_T

    def _check(self, part: npt.NDArray[Any], number: int, skip: int) -> bool:
        assert self.vocab_size is not None
        if int(part.max()) < self.vocab_size and int(part.min()) >= 0:
            return True
        at = int(np.argmax((part >= self.vocab_size) | (part < 0)))
        place = self.documents.place(number, skip + at)
        file = self.documents.files[int(self.documents.file_N[number])]
        if file.entry:  # they were in the vocabulary when they were written
            raise damaged(
                file, f"{place}: token id {part[at]} is not below model.vocab_size={self.vocab_size}"
            )
        self.bad.report_id("sample", place, int(part[at]), self.vocab_size)
        return False

    def _compute_order(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        document_N = np.arange(self.documents.num_documents, dtype=np.int64)
        if self.shuffle:
            document_N = permute(document_N, len(document_N), derive_key(self.seed, epoch, DOCUMENT_KEY))
        return document_N, np.cumsum(self.documents.length_N[document_N])


@dataclass(eq=False)
class MixedSamples(Samples):
    """Weighted mixture of corpora.

    Each block of samples is shuffled and has each corpus's share, up to rounding since the start. Corpora
    have their own epochs; an epoch of the mixture has as many samples as all corpora together.
    """

    documents: Documents
    parts: Sequence[PackedSamples]
    weights: Sequence[float]
    seed: int = 0

    num_samples: int = field(init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.seq_len = self.parts[0].seq_len
        self.num_samples = sum(part.num_samples for part in self.parts)
        self.share_P = np.array(self.weights) / np.sum(self.weights)
        # Long enough that the largest share, which absorbs the rounding, is never negative.
        self._block = max(MIX_BLOCK, 2 * len(self.parts) ** 2)
        facts = repr([*map(float, self.weights), self.seed, *(part.fingerprint for part in self.parts)])
        self.fingerprint = f"mixed:{hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()}"

    @cached_property
    def contents(self) -> str:  # type: ignore[override]
        return contents_of(self.documents.files)

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        block, place = divmod(position, self._block)
        key = derive_key(self.seed, block, MIX_KEY)
        slot = int(permute(np.array([place]), self._block, key)[0])
        before_P, after_P = self._before(block), self._before(block + 1)
        end_P = np.cumsum(after_P - before_P)
        part = int(np.searchsorted(end_P, slot, side="right"))
        return self.parts[part].sample(int(after_P[part]) - int(end_P[part]) + slot)

    def _before(self, block: int) -> npt.NDArray[np.int64]:
        total = block * self._block
        count_P = np.floor(self.share_P * total).astype(np.int64)
        count_P[np.argmax(self.share_P)] += total - count_P.sum()
        return count_P


def permute(index_N: Index_N, size: int, key: int) -> Index_N:
    """Return the images [N] of indices under a permutation of ``0 .. size-1``, chosen by ``key``."""
    assert size > 0
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    place_N = np.asarray(index_N, dtype=np.uint64)
    place_N = _feistel(place_N, half_bits, key)
    outside_N = place_N >= size
    while outside_N.any():  # the network acts on up to 4 * size places; walk on until back inside
        place_N[outside_N] = _feistel(place_N[outside_N], half_bits, key)
        outside_N = place_N >= size
    return place_N.astype(np.int64)


def derive_key(*parts: int) -> int:
    """Return a 64-bit key, different for each tuple of integers (seed, epoch, purpose, ...)."""
    key = 0
    for part in parts:
        key = int(mix64(np.array([(key + GOLDEN + part) & MASK], dtype=np.uint64))[0])
    return key


def mix64(x_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash 64-bit integers bijectively (splitmix64's finaliser)."""
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))


def held_out(hash_N: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Return a mask of a ``fraction`` of entries, those of the smallest hashes: at least one, never all."""
    size = len(hash_N)
    mask_N = np.zeros(size, dtype=np.bool_)
    if fraction > 0 and size > 1:
        count = min(max(1, round(fraction * size)), size - 1)
        mask_N[np.argpartition(hash_N, count - 1)[:count]] = True
    return mask_N


def _feistel(place_N: npt.NDArray[np.uint64], half_bits: int, key: int) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left_N, right_N = place_N >> shift, place_N & mask
    for round_number in range(ROUNDS):
        round_key = np.uint64((key + round_number * GOLDEN) & MASK)
        left_N, right_N = right_N, left_N ^ (mix64(right_N ^ round_key) & mask)
    return (left_N << shift) | right_N
