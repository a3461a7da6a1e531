"""Text files as a source: .txt, .jsonl and .parquet, tokenised once into the cache."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from graphmoe.config.progress import counting
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import DataConfig
from graphmoe.data.cache import cache_folder, cache_key, cached
from graphmoe.data.contents import read_entry_file
from graphmoe.data.corpus import Corpus, configured_tokenizer, corpus_of_files
from graphmoe.data.errors import BadRecords
from graphmoe.data.indexed import TokenFile
from graphmoe.data.text_files import find_files
from graphmoe.data.tokenise import Recipe, tokenise_files, workers_for
from graphmoe.data.tokenizer import num_ids, tokenizer_file, tokenizer_hash

log = logging.getLogger(__name__)


class _Tally(TypedDict):
    bad: dict[str, int]
    first_bad: str | None


def open_corpus(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    tokenizer, end = configured_tokenizer(config, vocab_size)
    assert config.tokenizer is not None
    id_limit = min(vocab_size, num_ids(tokenizer))  # a larger vocabulary changes nothing: same entry
    recipe = Recipe(tokenizer_file(config.tokenizer), end, config.text_field, id_limit, config.skip_bad)

    def read(files: Sequence[Path], bad: BadRecords) -> list[TokenFile]:
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        key = cache_key("files", stats, tokenizer_hash(tokenizer), end, config.text_field, id_limit)

        def build(folder: Path) -> dict[str, Any]:
            workers = workers_for(files)
            size = sum(size for _, size, _ in stats)
            what = number_of(len(files), "file"), size / 2**20, number_of(workers, "process")
            log.info("tokenising %s, %.1f MiB, %s", *what)
            with counting("tokenising", size) as on_bytes:
                _, found = tokenise_files(
                    files, recipe, folder / "tokens", workers=workers, on_bytes=on_bytes
                )
            return {"bad": found.counts, "first_bad": found.first}

        entry, meta = cached(cache_folder(config.cache_dir), f"files-{key}", build, _Tally)
        bad.merge(meta["bad"], meta["first_bad"])
        return [read_entry_file(entry, "tokens")]

    return corpus_of_files(config, seq_len, vocab_size, tokenizer, find_files, read)
