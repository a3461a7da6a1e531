"""Megatron's token files as a source."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data.cache import SMALL_BYTES
from graphmoe.data.contents import read_summed_file
from graphmoe.data.corpus import Corpus, pack_corpus, without_validation
from graphmoe.data.errors import BadRecords, DataError
from graphmoe.data.indexed import TokenFile, pair
from graphmoe.data.samples import Documents
from graphmoe.data.tokenizer import load_tokenizer


def open_corpus(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    """Open .bin/.idx pairs."""
    bad = BadRecords(config.skip_bad)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer is not None else None
    val_prefixes = _prefixes(config.val_paths, "data.val_paths")
    prefixes = without_validation(_prefixes(config.paths, "data.paths"), val_prefixes)
    train = Documents.from_files(_readable(prefixes, bad))
    val = Documents.from_files(_readable(val_prefixes, bad)) if val_prefixes else None
    corpus = pack_corpus(config, seq_len, train, val, tokenizer, bad, vocab_size)
    corpus.counts["train_files"] = len(prefixes)
    return corpus


def _prefixes(patterns: Sequence[str], key: str) -> list[Path]:
    """Return prefixes of token files; a pattern with wildcards stands for the indices that it matches."""
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
    """Return the pairs that can be read; a few small ones with sums are compared with them at once."""
    paths = [path for prefix in prefixes for path in pair(prefix) if path.is_file()]
    small = sum(path.stat().st_size for path in paths) <= SMALL_BYTES
    files = []
    for prefix in prefixes:
        try:
            files.append(read_summed_file(prefix, compare=small))
        except DataError as error:
            bad.report("unreadable file", str(error))
    return files
