"""Text files as a source: .txt, .jsonl and .parquet, tokenised once into the cache."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from tokenizers import Tokenizer

from graphmoe.config.schema import DataConfig
from graphmoe.data.cache import cache_folder, cache_key, cached
from graphmoe.data.contents import read_entry_file
from graphmoe.data.corpus import Corpus, configured_tokenizer, pack_corpus, without_validation
from graphmoe.data.errors import BadRecords
from graphmoe.data.samples import Documents
from graphmoe.data.text_files import find_files
from graphmoe.data.tokenise import Recipe, tokenise_files, usable_cores, workers_for
from graphmoe.data.tokenizer import num_ids, tokenizer_file, tokenizer_hash

log = logging.getLogger(__name__)


class _Tally(TypedDict):
    """The bad records of a cache entry's text."""

    bad: dict[str, int]
    first_bad: str | None


def open_corpus(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    """Open text files, tokenised at first use."""
    tokenizer, end = configured_tokenizer(config)
    bad = BadRecords(config.skip_bad)
    val_files = find_files(config.val_paths, "data.val_paths")
    train_files = without_validation(find_files(config.paths, "data.paths"), val_files)
    train = _tokenised(config, train_files, tokenizer, end, vocab_size, bad)
    val = _tokenised(config, val_files, tokenizer, end, vocab_size, bad) if val_files else None
    corpus = pack_corpus(config, seq_len, train, val, tokenizer, bad, vocab_size)
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
    """Return the documents of text files, out of the cache; they are tokenised there first if need be."""
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
