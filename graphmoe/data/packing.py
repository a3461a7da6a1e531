"""Samples of whole documents, packed into sequences by best fit."""

import hashlib
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphmoe.config.token_flags import ID_BITS, NO_LABEL
from graphmoe.data.samples import SAMPLE_KEY, PackedSamples, derive_key, permute

PACK_KEY = 7
MAX_OPEN = 1024  # sequences that may still take a document


@dataclass(eq=False)
class WholeSamples(PackedSamples):
    """Whole documents with flags, packed once for all epochs; each epoch shuffles the sequences.

    The rest of a sequence repeats its documents without a loss: experts get usual tokens, not padding.
    """

    def __post_init__(self) -> None:
        length_N = self.documents.length_N
        number_N = np.arange(len(length_N), dtype=np.int64)
        if self.shuffle:
            number_N = permute(number_N, len(number_N), derive_key(self.seed, PACK_KEY))
        order_N, self._end_M = best_fit(length_N[number_N], self.seq_len + 1)
        self._number_N = number_N[order_N]
        self.num_samples = len(self._end_M)
        lengths = hashlib.blake2b(length_N.tobytes(), digest_size=8).hexdigest()
        self.fingerprint = f"whole:{lengths}:{self.seq_len}:{self.seed}:{self.shuffle}"

    @classmethod
    def least_tokens(cls, seq_len: int) -> int:
        return 1

    def _cut(self, epoch: int, index: int) -> npt.NDArray[np.int64] | None:
        if self.shuffle:
            key = derive_key(self.seed, epoch, SAMPLE_KEY)
            index = int(permute(np.array([index]), self.num_samples, key)[0])
        parts = []
        for number in self._number_N[self._end_M[index - 1] if index else 0 : self._end_M[index]].tolist():
            parts.append(self.documents.tokens(number, 0, self.seq_len + 1).astype(np.int64))
            if self.vocab_size is not None and not self._check(parts[-1] & ID_BITS, number, 0):
                return None
        tokens_T = np.concatenate(parts)
        rest_T = np.resize(tokens_T, self.seq_len + 1 - len(tokens_T)) | NO_LABEL
        return np.concatenate([tokens_T, rest_T])


def best_fit(
    length_N: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return numbers [N] of documents, sequence by sequence, and where each of the M sequences ends in them.

    A document is added to the open sequence with the least sufficient space; beyond `MAX_OPEN` the fullest
    is closed. O(N log N).
    """
    assert length_N.max(initial=0) <= size
    found: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # free tokens and number of open sequences, sorted
    for number, length in enumerate(length_N.tolist()):
        at = bisect_left(spaces, (length, -1))
        if at < len(spaces):
            space, sequence = spaces.pop(at)
        else:
            space, sequence = size, len(found)
            found.append([])
        found[sequence].append(number)
        if space > length:
            insort(spaces, (space - length, sequence))
        if len(spaces) > MAX_OPEN:
            spaces.pop(0)
    order_N = np.array([number for sequence in found for number in sequence], dtype=np.int64)
    return order_N, np.cumsum([len(sequence) for sequence in found], dtype=np.int64)
