"""Data sources, one file each, with a function ``open_corpus``.

`SOURCES` in graphmoe/config/choices.py lists them with their required keys.
"""

import importlib
import logging
from collections.abc import Iterator
from dataclasses import replace

from graphmoe.config.choices import SOURCES, look_up
from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data.contents import ContentCheck
from graphmoe.data.corpus import Corpus, configured_tokenizer, refuse_small_vocabulary
from graphmoe.data.samples import MixedSamples, PackedSamples
from graphmoe.data.sources import memmap
from graphmoe.data.text_files import find_files
from graphmoe.data.tokenizer import find_tokenizer, load_tokenizer
from graphmoe.runtime.host.logs import FILE_ONLY

log = logging.getLogger(__name__)


def missing_inputs(config: DataConfig, vocab_size: int) -> Iterator[str]:
    """Yield problems with the configured tokenizer and file names, without reading text."""
    if config.source not in SOURCES:  # a plug-in decides what its keys mean
        return
    if config.tokenizer is not None and not config.source_facts.ignores("tokenizer"):
        try:
            path = find_tokenizer(config.tokenizer)
            found = replace(config, tokenizer=str(path))
            if config.source == "memmap":
                refuse_small_vocabulary(found, load_tokenizer(path), vocab_size)
            else:
                configured_tokenizer(found, vocab_size)
        except ConfigError as error:
            yield str(error)
    find = memmap.find_prefixes if config.source == "memmap" else find_files
    for key in ("paths", "val_paths") if config.source in ("files", "memmap") else ():
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
    if config.source in SOURCES:
        open_corpus = importlib.import_module(f"{__name__}.{config.source}").open_corpus
    else:
        open_corpus = look_up({}, config.source, "data.source")
    corpus: Corpus = open_corpus(config, seq_len, vocab_size)
    counts = corpus.counts.items()
    text = ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in counts)
    log.info("data: %s", text, extra=FILE_ONLY)
    corpus.bad_records.log_total(f"data={config.source}")
    if check:
        packed = [s for s in (corpus.train, corpus.val) if isinstance(s, (PackedSamples, MixedSamples))]
        corpus.check = ContentCheck(file for samples in packed for file in samples.documents.files)
    return corpus
