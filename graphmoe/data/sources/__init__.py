"""Data sources. `SOURCES` in graphmoe/config/choices.py lists them with their required keys."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from graphmoe.config.choices import SOURCES, look_up
from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data.contents import ContentCheck
from graphmoe.data.corpus import Corpus, configured_tokenizer, refuse_small_vocabulary
from graphmoe.data.samples import MixedSamples, PackedSamples, Samples, derive_key
from graphmoe.data.sources import chat, files, hf, stdlib
from graphmoe.data.text_files import ENDINGS, ROW_ENDINGS, find_files
from graphmoe.data.tokenizer import find_tokenizer, load_tokenizer
from graphmoe.runtime.host.logs import FILE_ONLY

log = logging.getLogger(__name__)
TOKENS_KEY = 1
SYNTHETIC_END = 0  # id of the token after a document


def missing_inputs(config: DataConfig, vocab_size: int) -> Iterator[str]:
    """Yield error messages about the configured tokenizer and file names, without reading text."""
    if config.source not in SOURCES:  # a plug-in decides what its keys mean
        return
    if config.tokenizer is not None and not config.source_facts.ignores("tokenizer"):
        try:
            path = find_tokenizer(config.tokenizer)
            found = replace(config, tokenizer=str(path))
            if config.source == "chat":
                chat.chat_parts(found, vocab_size)
            elif config.source == "memmap" and not config.document_mask:
                refuse_small_vocabulary(found, load_tokenizer(path), vocab_size)
            else:
                configured_tokenizer(found, vocab_size)
        except ConfigError as error:
            yield str(error)
    endings = ROW_ENDINGS if config.source == "chat" else ENDINGS
    find = files.find_prefixes if config.source == "memmap" else partial(find_files, endings=endings)
    reads_files = config.source in ("files", "chat", "memmap") and not config.hf_name
    for key in ("paths", "val_paths") if reads_files else ():
        try:
            find(getattr(config, key), f"data.{key}")
        except ConfigError as error:
            yield str(error)


def open_data(config: DataConfig, *, seq_len: int, vocab_size: int, check: bool = False) -> Corpus:
    """Open the configured corpus; text is tokenised on first use, then cached.

    ``check`` verifies checksums of large files in a thread. *Raises* ConfigError, or DataError for bad
    content.
    """
    for key in config.source_facts.needs:
        if not getattr(config, key):
            raise ConfigError(f"data={config.source} needs data.{key}")
    if config.tokenizer is not None:
        config = replace(config, tokenizer=str(find_tokenizer(config.tokenizer)))
    corpus: Corpus = look_up(OPEN, config.source, "data.source")(config, seq_len, vocab_size)
    if config.document_mask and not config.source_facts.marks and corpus.end_token is None:
        raise ConfigError(
            f"data.document_mask=true needs Corpus.end_token, which data.source={config.source} does not "
            f"set; set it, or use data.document_mask=false"
        )
    counts = corpus.counts.items()
    text = ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in counts)
    log.info("data: %s", text, extra=FILE_ONLY)
    corpus.bad_records.log_total(f"data={config.source}")
    if check:
        packed = [s for s in (corpus.train, corpus.val) if isinstance(s, (PackedSamples, MixedSamples))]
        corpus.check = ContentCheck(file for samples in packed for file in samples.documents.files)
    return corpus


def _open_synthetic(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    train, val = (
        SyntheticSamples(seq_len, vocab_size, config.seed, purpose, config.document_length)
        for purpose in (0, 1)
    )
    counts = {"source": "synthetic", "seq_len": seq_len, "vocab_size": vocab_size}
    return Corpus(train, val, None, counts, end_token=SYNTHETIC_END if config.document_length else None)


@dataclass(eq=False)
class SyntheticSamples(Samples):
    """Uniformly random token ids; sample ``i`` depends only on the seed and ``i``.

    With ``document_length`` each token ends a document with the probability 1 / ``document_length``.
    """

    seq_len: int
    vocab_size: int
    seed: int = 0
    purpose: int = 0  # 0 for training, 1 for validation
    document_length: int | None = None  # mean
    num_samples: int | None = field(default=None, init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.fingerprint = f"synthetic:{self.vocab_size}:{self.seq_len}:{self.seed}:{self.purpose}"
        self.fingerprint += f":{self.document_length}" if self.document_length else ""

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        key = derive_key(self.seed, self.purpose, TOKENS_KEY)
        stream = np.random.Philox(key=key, counter=[0, 0, position, 0])
        raw_T = stream.random_raw(self.seq_len + 1)
        tokens_T = (raw_T % np.uint64(self.vocab_size)).astype(np.int64)
        if self.document_length is None:
            return tokens_T
        # the upper half of a number says whether it is an end, the remainder which other token
        ends_T = (raw_T >> np.uint64(32)) * np.uint64(self.document_length) < np.uint64(1 << 32)
        return np.where(ends_T, SYNTHETIC_END, np.maximum(tokens_T, SYNTHETIC_END + 1))


OPEN: dict[str, Callable[..., Corpus]] = {
    "stdlib": stdlib.open_corpus,
    "files": files.open_corpus,
    "chat": chat.open_corpus,
    "hf": hf.open_corpus,
    "memmap": files.open_token_files,
    "synthetic": _open_synthetic,
}
