"""Megatron's token files as a source."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from graphmoe.config.arguments import near_path
from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data.cache import SMALL_BYTES
from graphmoe.data.contents import read_summed_file
from graphmoe.data.corpus import Corpus, corpus_of_files, refuse_small_vocabulary
from graphmoe.data.errors import BadRecords, DataError
from graphmoe.data.indexed import TokenFile, pair
from graphmoe.data.tokenizer import load_tokenizer


def open_corpus(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    tokenizer = None
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
        refuse_small_vocabulary(config, tokenizer, vocab_size)
    return corpus_of_files(config, seq_len, vocab_size, tokenizer, find_prefixes, _readable)


def find_prefixes(patterns: Sequence[str], key: str) -> list[Path]:
    """Return prefixes of token files; a wildcard pattern is matched against ``.idx`` files."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        place = os.path.expanduser(pattern)
        index = str(pair(place)[1])
        matches, where = [index], f"(looked from {Path.cwd()}){near_path(index)}"
        if glob.has_magic(index):
            if not (matches := sorted(glob.glob(index, recursive=True))):
                raise ConfigError(f"{key}: no file matches '{index}' {where}")
        elif os.path.isdir(place):
            raise ConfigError(
                f"{key}: {pattern} is a folder; use '{key}=[{os.path.join(pattern, '*')}]' for its .bin/.idx "
                f"pairs, or data=files for its text"
            )
        elif not Path(index).is_file():
            raise ConfigError(f"{key}: {index} does not exist {where}")
        found.update(dict.fromkeys(Path(match[:-4]).absolute() for match in matches))
    return list(found)


def _readable(prefixes: Sequence[Path], bad: BadRecords) -> list[TokenFile]:
    paths = [path for prefix in prefixes for path in pair(prefix) if path.is_file()]
    small = sum(path.stat().st_size for path in paths) <= SMALL_BYTES
    files = []
    for prefix in prefixes:
        try:
            files.append(read_summed_file(prefix, compare=small))
        except DataError as error:
            bad.report("unreadable file", str(error))
    return files
