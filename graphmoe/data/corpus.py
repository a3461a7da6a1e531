"""Corpus of a run: packed training and validation samples from any source."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data.contents import ContentCheck
from graphmoe.data.errors import BadRecords
from graphmoe.data.indexed import TokenFile
from graphmoe.data.samples import Documents, MixedSamples, PackedSamples, Samples, split_for_validation
from graphmoe.data.tokenizer import end_of_document, load_tokenizer, num_ids

log = logging.getLogger(__name__)


@dataclass
class Corpus:
    """Training and validation samples of a run, with counts and the tokenizer."""

    train: Samples
    val: Samples | None
    tokenizer: Tokenizer | None = None
    counts: dict[str, Any] = field(default_factory=dict)
    bad_records: BadRecords = field(default_factory=BadRecords)
    check: ContentCheck = field(default_factory=ContentCheck)
    end_token: int | None = None
    """Id of the token after each document; None if there is none, or if it is unknown."""

    @property
    def bad(self) -> Counter[str]:
        return self.bad_records.counts


def pack_corpus(
    config: DataConfig, seq_len: int, train: Documents, val: Documents | None, tokenizer: Tokenizer | None,
    bad: BadRecords, vocab_size: int, files_of_paths: Sequence[int] = (),
    kind: type[PackedSamples] = PackedSamples,
) -> Corpus:  # fmt: skip
    """Pack documents into samples of a kind; without ``val`` some training documents are held out.

    ``files_of_paths``: number of training files of each entry of data.paths, for data.weights.
    """
    given, whole, least = val is not None, kind is not PackedSamples, kind.least_tokens(seq_len)
    if val is None and config.val_fraction > 0 and config.source != "stdlib":
        if config.document_mask and not whole and config.val_fraction * train.num_documents < 1:
            log.warning(
                "data.document_mask=true: validation holds out the end of each of the %d documents, so their "
                "training parts have no end token and are joined; use data.val_paths, or data.val_fraction=0",
                train.num_documents,
            )
        train, val = split_for_validation(train, config.val_fraction, whole=whole)
    counts: dict[str, Any] = {"source": config.source, "seq_len": seq_len}
    made: dict[str, Samples] = {}
    for name, documents in (("train", train), ("val", val)):
        if documents is None:
            continue
        tokens = documents.num_tokens
        if tokens >= least and name == "train" and config.weights:
            mixed = _mixed(config, seq_len, documents, bad, vocab_size, files_of_paths, kind)
            made[name], counts["mix"] = mixed, _shares(config, mixed)
        elif tokens >= least:
            made[name] = kind(documents, seq_len, config.seed, config.shuffle, vocab_size, bad)
        elif name == "train" or given and config.source != "stdlib":
            raise ConfigError(_too_few(config, name, documents, seq_len))
        else:
            log.warning("no validation: %s", _too_few(config, name, documents, seq_len))
        counts |= {f"{name}_documents": documents.num_documents, f"{name}_tokens": tokens}
        counts[f"{name}_samples"] = made[name].num_samples if name in made else 0
    return Corpus(made["train"], made.get("val"), tokenizer, counts, bad)


def configured_tokenizer(config: DataConfig, vocab_size: int) -> tuple[Tokenizer, int]:
    """Return the tokenizer and its end-of-document id. *Raises* ConfigError."""
    assert config.tokenizer is not None
    tokenizer = load_tokenizer(config.tokenizer)
    refuse_small_vocabulary(config, tokenizer, vocab_size)
    return tokenizer, end_of_document(tokenizer, config.tokenizer, config.eod_token)


def refuse_small_vocabulary(config: DataConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has ids beyond the vocabulary, unless bad data are skipped."""
    if num_ids(tokenizer) > vocab_size and not config.skip_bad:
        raise ConfigError(
            f"data.tokenizer={config.tokenizer} has {num_ids(tokenizer)} ids, more than model.vocab_size="
            f"{vocab_size}; use model.vocab_size={num_ids(tokenizer)} or more (data.skip_bad=true leaves out "
            f"documents with ids beyond it)"
        )


def corpus_of_files(
    config: DataConfig, seq_len: int, vocab_size: int, tokenizer: Tokenizer | None,
    find: Callable[[Sequence[str], str], list[Path]],
    read: Callable[[Sequence[Path], BadRecords], list[TokenFile]],
    kind: type[PackedSamples] = PackedSamples,
) -> Corpus:  # fmt: skip
    """Return the corpus of data.paths and data.val_paths; files in both are for validation.

    ``find`` maps patterns and their key to files; ``read`` opens them as token files.
    """
    bad = BadRecords(config.skip_bad)
    val = find(config.val_paths, "data.val_paths")
    together = [[path] for path in config.paths] if config.weights else [config.paths]
    found = [find(patterns, "data.paths") for patterns in together]
    for path, times in Counter(path for group in found for path in group).items():
        if times > 1:
            raise ConfigError(
                f"data.paths names {path} in two entries with a weight each; remove it from one of them"
            )
    train = [[path for path in group if path not in set(val)] for group in found]
    num_found, num_train = (sum(map(len, groups)) for groups in (found, train))
    if num_train < num_found:
        log.info("data: used for validation only: %s of data.paths", number_of(num_found - num_train, "file"))
    if not all(train):
        raise ConfigError("data.paths names only files of data.val_paths; nothing is left to train on")
    files = [read(group, bad) for group in train]
    documents = Documents.from_files([file for group in files for file in group])
    held_out = Documents.from_files(read(val, bad)) if val else None
    counts = [len(group) for group in files]
    corpus = pack_corpus(config, seq_len, documents, held_out, tokenizer, bad, vocab_size, counts, kind)
    corpus.counts["train_files"] = num_train
    return corpus


def _mixed(
    config: DataConfig, seq_len: int, documents: Documents, bad: BadRecords, vocab_size: int,
    files_of_paths: Sequence[int], kind: type[PackedSamples],
) -> MixedSamples:  # fmt: skip
    parts, first = [], 0
    for path, count in zip(config.paths, files_of_paths, strict=True):
        part = documents.select((documents.file_N >= first) & (documents.file_N < first + count))
        first += count
        if part.num_tokens < kind.least_tokens(seq_len):
            alone = replace(config, paths=[path], val_paths=[])
            raise ConfigError(f"data.weights: {_too_few(alone, 'train', part, seq_len)}")
        parts.append(kind(part, seq_len, config.seed, config.shuffle, vocab_size, bad))
    return MixedSamples(documents, parts, config.weights, config.seed)


def _shares(config: DataConfig, mixed: MixedSamples) -> str:
    parts = zip(mixed.share_P, config.paths, mixed.parts, strict=True)
    return " + ".join(f"{share:.3g} of {path} (samples: {part.num_samples:,})" for share, path, part in parts)


def _too_few(config: DataConfig, name: str, documents: Documents, seq_len: int) -> str:
    paths = config.val_paths if name == "val" and config.val_paths else config.paths
    source = f" (out of [{','.join(paths)}])" if paths else ""
    texts, tokens = number_of(documents.num_documents, "document"), number_of(documents.num_tokens, "token")
    have = f"{texts} with {tokens} in all{source}"
    if not documents.num_tokens:
        return f"the {name} corpus is empty: {have}"
    return (
        f"the {name} corpus has {have}, but one sample takes data.seq_len + 1 = {seq_len + 1}; "
        f"use data.seq_len={max(1, documents.num_tokens - 1)} or less, or more text"
    )
