"""Random tokens as a source."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from graphmoe.config.schema import DataConfig
from graphmoe.data.corpus import Corpus
from graphmoe.data.order import derive_key
from graphmoe.data.samples import Samples

TOKENS_KEY = 1


def open_corpus(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    train = SyntheticSamples(seq_len, vocab_size, config.seed)
    val = SyntheticSamples(seq_len, vocab_size, config.seed, purpose=1)
    return Corpus(train, val, None, {"source": "synthetic", "seq_len": seq_len, "vocab_size": vocab_size})


@dataclass(eq=False)
class SyntheticSamples(Samples):
    """Uniformly random token ids; sample ``i`` depends only on the seed and ``i``."""

    seq_len: int
    vocab_size: int
    seed: int = 0
    purpose: int = 0  # 0 for training, 1 for validation
    num_samples: int | None = field(default=None, init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.fingerprint = f"synthetic:{self.vocab_size}:{self.seq_len}:{self.seed}:{self.purpose}"

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        key = derive_key(self.seed, self.purpose, TOKENS_KEY)
        stream = np.random.Philox(key=key, counter=[0, 0, position, 0])
        raw_T = stream.random_raw(self.seq_len + 1)
        return (raw_T % np.uint64(self.vocab_size)).astype(np.int64)
