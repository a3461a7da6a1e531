"""Files as a source: .txt, .jsonl and .parquet, tokenised once into the cache, or Megatron's token files."""

import functools
import glob
import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from tokenizers import Tokenizer

from graphmoe.config.arguments import near_path
from graphmoe.config.progress import counting
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data.cache import SMALL_BYTES, cache_folder, cache_key, cached
from graphmoe.data.contents import read_entry_file, read_summed_file
from graphmoe.data.corpus import Corpus, configured_tokenizer, corpus_of_files, refuse_small_vocabulary
from graphmoe.data.errors import BadRecords, DataError
from graphmoe.data.indexed import TokenFile, pair
from graphmoe.data.samples import PackedSamples
from graphmoe.data.text_files import ENDINGS, find_files
from graphmoe.data.tokenise import Recipe, tokenise_files, workers_for
from graphmoe.data.tokenizer import load_tokenizer, num_ids, tokenizer_file, tokenizer_hash

log = logging.getLogger(__name__)


class _Tally(TypedDict):
    bad: dict[str, int]
    first_bad: str | None
    notes: NotRequired[dict[str, int]]


def open_corpus(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    tokenizer, end = configured_tokenizer(config, vocab_size)
    assert config.tokenizer is not None
    id_limit = min(vocab_size, num_ids(tokenizer))  # a larger vocabulary changes nothing: same entry
    recipe = Recipe(tokenizer_file(config.tokenizer), end, config.text_field, id_limit, config.skip_bad)
    facts = tokenizer_hash(tokenizer), end, config.text_field, id_limit
    corpus, _ = tokenised_corpus(config, seq_len, vocab_size, tokenizer, recipe, facts)
    corpus.end_token = end
    return corpus


def tokenised_corpus(
    config: DataConfig, seq_len: int, vocab_size: int, tokenizer: Tokenizer, recipe: Recipe,
    facts: Sequence[Any], kind: type[PackedSamples] = PackedSamples, endings: tuple[str, ...] = ENDINGS,
) -> tuple[Corpus, Counter[str]]:  # fmt: skip
    """Return the corpus of data.paths and data.val_paths by a recipe, from the cache, and its notes.

    ``facts``: plain values on which, beside the files, the tokens depend.
    """
    notes = Counter[str]()
    find = functools.partial(find_files, endings=endings)

    def read(files: Sequence[Path], bad: BadRecords) -> list[TokenFile]:
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        key = cache_key(config.source, stats, *facts)

        def build(folder: Path) -> dict[str, Any]:
            workers, noted = workers_for(files), Counter[str]()
            into = folder / "tokens"
            size = sum(size for _, size, _ in stats)
            what = number_of(len(files), "file"), size / 2**20, number_of(workers, "process")
            log.info("tokenising %s, %.1f MiB, %s", *what)
            with counting("tokenising", size) as on_bytes:
                _, found = tokenise_files(
                    files, recipe, into, workers=workers, on_bytes=on_bytes, on_notes=noted.update
                )
            return {"bad": found.counts, "first_bad": found.first, "notes": noted}

        entry, meta = cached(cache_folder(config.cache_dir), f"{config.source}-{key}", build, _Tally)
        bad.merge(meta["bad"], meta["first_bad"])
        notes.update(meta.get("notes", {}))
        return [read_entry_file(entry, "tokens")]

    return corpus_of_files(config, seq_len, vocab_size, tokenizer, find, read, kind), notes


def open_token_files(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    tokenizer = end = None
    if config.document_mask:
        tokenizer, end = configured_tokenizer(config, vocab_size)
    elif config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
        refuse_small_vocabulary(config, tokenizer, vocab_size)

    def read(prefixes: Sequence[Path], bad: BadRecords) -> list[TokenFile]:
        files = _readable(prefixes, bad)
        if end is not None:
            _refuse_other_end(files, end)
        return files

    corpus = corpus_of_files(config, seq_len, vocab_size, tokenizer, find_prefixes, read)
    corpus.end_token = end
    return corpus


def _refuse_other_end(files: Sequence[TokenFile], end: int) -> None:
    # the first document of each: without end tokens all would be one, and nothing would be masked
    for file in files:
        last_N = (file.start_N + file.length_N - 1)[file.length_N > 0]
        if not len(last_N) or (token := int(file.tokens_T[last_N[0]])) == end:
            continue
        raise ConfigError(
            f"data.document_mask=true needs token {end} (data.eod_token) after each document, and the first "
            f"of {file.path} ends with token {token}; set data.eod_token to that token, write the files by "
            f"graphmoe.prepare with append_eod=true, or use data.document_mask=false"
        )


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
