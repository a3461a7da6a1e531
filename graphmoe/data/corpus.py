"""From the data section of a configuration to samples for training and validation."""

from __future__ import annotations

import glob
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from tokenizers import Tokenizer

from graphmoe.config.schema import ConfigError, DataConfig, DataSource
from graphmoe.data.cache import SMALL_BYTES, cache_folder, cache_key, cached
from graphmoe.data.contents import ContentCheck, entry_damage, read_entry_file, read_summed_file
from graphmoe.data.documents import Documents, split_for_validation
from graphmoe.data.errors import BadRecords, DataError
from graphmoe.data.hf import StreamSamples, open_stream
from graphmoe.data.indexed import TokenFile, pair
from graphmoe.data.samples import PackedSamples, RememberedSamples, Samples, SyntheticSamples
from graphmoe.data.stdlib import prepare_stdlib
from graphmoe.data.text_files import find_files
from graphmoe.data.tokenise import Recipe, tokenise_files, usable_cores, workers_for
from graphmoe.data.tokenizer import end_of_document, load_tokenizer, num_ids, tokenizer_file, tokenizer_hash

log = logging.getLogger(__name__)


@dataclass
class Corpus:
    """Samples of a run, with what is known of them."""

    train: Samples
    val: Samples | None
    tokenizer: Tokenizer | None = None
    counts: dict[str, Any] = field(default_factory=dict)
    bad_records: BadRecords = field(default_factory=BadRecords)
    check: ContentCheck = field(default_factory=ContentCheck)
    """Check of large files against their sums, if that was asked for."""

    @property
    def bad(self) -> Counter[str]:
        """Number of bad records that were skipped, by kind."""
        return self.bad_records.counts


class _Tally(TypedDict):
    """The bad records of a cache entry's text."""

    bad: dict[str, int]
    first_bad: str | None


def open_data(config: DataConfig, *, seq_len: int, vocab_size: int, check: bool = False) -> Corpus:
    """The corpus that ``config`` names; text is tokenised at first use and then comes from the cache.

    ``check`` starts a thread that reads the large files whose sums are known: ``corpus.check``.
    *Raises* ConfigError for a configuration that cannot work, DataError for bad content.
    """
    openers: dict[DataSource, Callable[[DataConfig, int, int], Corpus]] = {
        DataSource.stdlib: open_stdlib,
        DataSource.files: _open_files,
        DataSource.hf: _open_hf,
        DataSource.memmap: _open_memmap,
        DataSource.synthetic: _open_synthetic,
    }
    corpus = openers[config.source](config, seq_len, vocab_size)
    counts = corpus.counts.items()
    log.info("data: %s", ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in counts))
    corpus.bad_records.log_total(f"data={config.source.value}")
    if check:
        packed = [samples for samples in (corpus.train, corpus.val) if isinstance(samples, PackedSamples)]
        corpus.check = ContentCheck(file for samples in packed for file in samples.documents.files)
    return corpus


def open_stdlib(config: DataConfig, seq_len: int, vocab_size: int, root: Path | None = None) -> Corpus:
    """The corpus of Python's standard library, or of another folder of .py files."""
    tokenizer, end = None, None
    if config.tokenizer is not None:
        tokenizer, end = _tokenizer(config)
    elif not 300 <= config.bpe_vocab_size <= vocab_size:
        raise ConfigError(
            f"data.bpe_vocab_size={config.bpe_vocab_size} is not in 300 .. model.vocab_size={vocab_size}"
        )
    entry, counts = prepare_stdlib(
        cache_folder(config.cache_dir),
        val_fraction=config.val_fraction,
        bpe_vocab_size=config.bpe_vocab_size,
        tokenizer=tokenizer,
        end_token=end,
        root=root,
    )
    with entry_damage(entry):
        tokenizer = load_tokenizer(entry / "tokenizer.json")
    if num_ids(tokenizer) > vocab_size:
        raise ConfigError(
            f"data.tokenizer={config.tokenizer} has {num_ids(tokenizer)} ids, more than model.vocab_size="
            f"{vocab_size}; use model.vocab_size={num_ids(tokenizer)} or more"
        )
    train = Documents.from_files([read_entry_file(entry, "train")])
    val = Documents.from_files([read_entry_file(entry, "val")]) if "val_files" in counts else None
    corpus = _pack(config, seq_len, train, val, tokenizer, BadRecords(config.skip_bad), vocab_size)
    corpus.counts.update(counts, cache=str(entry))
    return corpus


def _open_files(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    if not config.paths:
        raise ConfigError("data=files needs data.paths=[...], files or globs of .txt, .jsonl or .parquet")
    tokenizer, end = _tokenizer(config)
    bad = BadRecords(config.skip_bad)
    val_files = find_files(config.val_paths, "data.val_paths")
    train_files = _without(find_files(config.paths, "data.paths"), val_files)
    train = _tokenised(config, train_files, tokenizer, end, vocab_size, bad)
    val = _tokenised(config, val_files, tokenizer, end, vocab_size, bad) if val_files else None
    corpus = _pack(config, seq_len, train, val, tokenizer, bad, vocab_size)
    corpus.counts["train_files"] = len(train_files)
    return corpus


def _tokenised(
    config: DataConfig,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    end: int,
    vocab_size: int,
    bad: BadRecords,
) -> Documents:
    """The documents of text files, out of the cache; they are tokenised there first if need be."""
    id_limit = min(vocab_size, num_ids(tokenizer))  # a larger vocabulary changes nothing: same entry
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = cache_key("files", stats, tokenizer_hash(tokenizer), end, config.text_field, id_limit)
    assert config.tokenizer is not None
    recipe = Recipe(tokenizer_file(config.tokenizer), end, config.text_field, id_limit, config.skip_bad)

    def build(folder: Path) -> dict[str, Any]:
        workers = workers_for(files, usable_cores())
        size_mib = sum(size for _, size, _ in stats) / 2**20
        log.info("tokenising %d files, %.1f MiB, %d processes", len(files), size_mib, workers)
        totals = tokenise_files(files, recipe, folder / "tokens", workers=workers)
        return {"bad": totals.bad, "first_bad": totals.first_bad}

    entry, meta = cached(cache_folder(config.cache_dir), f"files-{key}", build, _Tally)
    bad.merge(meta["bad"], meta["first_bad"])
    return Documents.from_files([read_entry_file(entry, "tokens")])


def _open_memmap(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    if not config.paths:
        raise ConfigError("data=memmap needs data.paths=[...], prefixes of .bin/.idx pairs")
    bad = BadRecords(config.skip_bad)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer is not None else None
    val_prefixes = _prefixes(config.val_paths, "data.val_paths")
    prefixes = _without(_prefixes(config.paths, "data.paths"), val_prefixes)
    train = Documents.from_files(_readable(prefixes, bad))
    val = Documents.from_files(_readable(val_prefixes, bad)) if val_prefixes else None
    corpus = _pack(config, seq_len, train, val, tokenizer, bad, vocab_size)
    corpus.counts["train_files"] = len(prefixes)
    return corpus


def _prefixes(patterns: Sequence[str], key: str) -> list[Path]:
    """Prefixes of token files; a pattern with wildcards stands for the indices that it matches."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        stem = os.path.expanduser(pattern)
        stem = stem[:-4] if stem.endswith((".bin", ".idx")) else stem
        matches = (
            [stem]
            if not glob.has_magic(stem)
            else [m[:-4] for m in sorted(glob.glob(stem + ".idx", recursive=True))]
        )
        if not matches:
            raise ConfigError(f"{key}: no file matches '{stem}.idx' (looked from {Path.cwd()})")
        if not glob.has_magic(stem) and not Path(f"{stem}.idx").is_file():
            raise ConfigError(f"{key}: {stem}.idx does not exist (looked from {Path.cwd()})")
        found.update(dict.fromkeys(Path(match).absolute() for match in matches))
    return list(found)


def _readable(prefixes: Sequence[Path], bad: BadRecords) -> list[TokenFile]:
    """The pairs that can be read; a few small ones with sums are compared with them at once."""
    paths = [path for prefix in prefixes for path in pair(prefix) if path.is_file()]
    small = sum(path.stat().st_size for path in paths) <= SMALL_BYTES
    files = []
    for prefix in prefixes:
        try:
            files.append(read_summed_file(prefix, compare=small))
        except DataError as error:
            bad.report("unreadable file", str(error))
    return files


def _open_hf(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    tokenizer, end = _tokenizer(config)
    bad = BadRecords(config.skip_bad)
    limit = min(vocab_size, num_ids(tokenizer))

    def stream(split: str, held_out: bool | None) -> StreamSamples:
        rows = open_stream(config, split)
        return StreamSamples(rows, config, split, seq_len, tokenizer, end, limit, bad, held_out)

    if config.hf_val_split is not None:
        train, val = stream(config.hf_split, None), stream(config.hf_val_split, None)
    elif config.val_fraction > 0:
        train, val = stream(config.hf_split, False), stream(config.hf_split, True)
    else:
        train, val = stream(config.hf_split, None), None
    counts = {"source": train.name, "shards": train.dataset.num_shards, "seq_len": seq_len}
    return Corpus(train, RememberedSamples(val) if val else None, tokenizer, counts, bad)


def _open_synthetic(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    train = SyntheticSamples(seq_len, vocab_size, config.seed)
    val = SyntheticSamples(seq_len, vocab_size, config.seed, purpose=1)
    return Corpus(train, val, None, {"source": "synthetic", "seq_len": seq_len, "vocab_size": vocab_size})


def _tokenizer(config: DataConfig) -> tuple[Tokenizer, int]:
    """The configured tokenizer and the id that ends a document."""
    if config.tokenizer is None:
        raise ConfigError(f"data={config.source.value} needs data.tokenizer=..., a tokenizer.json")
    tokenizer = load_tokenizer(config.tokenizer)
    return tokenizer, end_of_document(tokenizer, config.tokenizer, config.eod_token)


def _without(train: Sequence[Path], val: Sequence[Path]) -> list[Path]:
    """The training files that are not validation files too."""
    kept = [path for path in train if path not in set(val)]
    if len(kept) < len(train):
        log.info("data: %d files of data.paths are for validation only", len(train) - len(kept))
    if not kept:
        raise ConfigError("data.paths names only files of data.val_paths; nothing is left to train on")
    return kept


def _pack(
    config: DataConfig, seq_len: int, train: Documents, val: Documents | None, tokenizer: Tokenizer | None,
    bad: BadRecords, vocab_size: int,
) -> Corpus:  # fmt: skip
    """A corpus of packed samples; without ``val`` some of the training documents are held out."""
    given = val is not None
    if val is None and config.val_fraction > 0 and config.source is not DataSource.stdlib:
        train, val = split_for_validation(train, config.val_fraction)
    counts: dict[str, Any] = {"source": config.source.value, "seq_len": seq_len}
    made: dict[str, PackedSamples] = {}
    for name, documents in (("train", train), ("val", val)):
        if documents is None:
            continue
        tokens = documents.num_tokens
        if tokens >= seq_len + 1:
            made[name] = PackedSamples(documents, seq_len, config.seed, config.shuffle, vocab_size, bad)
        elif name == "train" or given and config.source is not DataSource.stdlib:
            raise ConfigError(_too_few(config, name, documents, seq_len))
        else:
            log.warning("no validation: %s", _too_few(config, name, documents, seq_len))
        counts |= {f"{name}_documents": documents.num_documents, f"{name}_tokens": tokens}
        counts[f"{name}_samples"] = tokens and max(0, tokens - 1) // seq_len
    return Corpus(made["train"], made.get("val"), tokenizer, counts, bad)


def _too_few(config: DataConfig, name: str, documents: Documents, seq_len: int) -> str:
    paths = config.val_paths if name == "val" and config.val_paths else config.paths
    source = f" (out of [{','.join(paths)}])" if paths else ""
    have = f"{documents.num_documents} documents with {documents.num_tokens} tokens in all{source}"
    if not documents.num_tokens:
        return f"the {name} corpus is empty: {have}"
    return (
        f"the {name} corpus has {have}, but one sample takes data.seq_len + 1 = {seq_len + 1}; "
        f"use data.seq_len={max(1, documents.num_tokens - 1)} or less, or more text"
    )
