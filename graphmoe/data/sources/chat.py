"""Conversations as a source: .jsonl and .parquet files, rendered and tokenised once into the cache."""

import logging
from dataclasses import replace

from tokenizers import Tokenizer

from graphmoe.config.ranges import number_of
from graphmoe.config.schema import DataConfig, TooLong
from graphmoe.data.chat import FIELDS, KEPT, NO_LOSS, TOKENS, TOO_LONG, TRAINED, ChatRecipe
from graphmoe.data.chat_template import ChatTemplate, chat_template
from graphmoe.data.corpus import Corpus, refuse_small_vocabulary
from graphmoe.data.packing import WholeSamples
from graphmoe.data.sources.files import tokenised_corpus
from graphmoe.data.sources.hf import rows_file
from graphmoe.data.text_files import ROW_ENDINGS
from graphmoe.data.tokenizer import (
    end_of_document,
    load_tokenizer,
    num_ids,
    tokenizer_file,
    tokenizer_hash,
    usual_end,
)

log = logging.getLogger(__name__)


def open_corpus(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    tokenizer, template, end = chat_parts(config, vocab_size)
    if config.hf_name is not None:
        config = _with_rows(config)
    assert config.tokenizer is not None
    id_limit = min(vocab_size, num_ids(tokenizer))
    recipe = ChatRecipe(
        tokenizer_file(config.tokenizer), end, "text", id_limit, config.skip_bad, template=template,
        train_on=config.train_on, too_long=config.too_long, most_tokens=seq_len + 1,
    )  # fmt: skip
    facts = tokenizer_hash(tokenizer), end, id_limit, *template[1:], config.train_on, config.too_long, seq_len
    corpus, notes = tokenised_corpus(
        config, seq_len, vocab_size, tokenizer, recipe, facts, WholeSamples, ROW_ENDINGS
    )
    names = KEPT, TOKENS, TRAINED, TOO_LONG, NO_LOSS
    samples = sum(found.num_samples or 0 for found in (corpus.train, corpus.val) if found)
    corpus.counts |= {name: notes[name] for name in names} | {"sequences": samples}
    log.info(
        "data=chat: %s with %s, %.0f%% of them with a loss, in %s, %.0f%% full",
        number_of(notes[KEPT], "conversation"),
        number_of(notes[TOKENS], "token"),
        100 * notes[TRAINED] / notes[TOKENS],
        number_of(samples, "sequence"),
        100 * notes[TOKENS] / (samples * (seq_len + 1)),
    )
    if notes[TOO_LONG] or notes[NO_LOSS]:
        log.warning(
            "data=chat: %s longer than data.seq_len + 1 = %d tokens, %s by data.too_long=%s; %d left out, "
            "without a token that has a loss",
            number_of(notes[TOO_LONG], "conversation"),
            seq_len + 1,
            "cut" if config.too_long is TooLong.truncate else "left out",
            config.too_long.value,
            notes[NO_LOSS],
        )
    return corpus


def _with_rows(config: DataConfig) -> DataConfig:
    train = rows_file(config, config.hf_split, FIELDS)
    val = [str(rows_file(config, config.hf_val_split, FIELDS))] if config.hf_val_split else []
    return replace(config, paths=[str(train)], val_paths=val)


def chat_parts(config: DataConfig, vocab_size: int) -> tuple[Tokenizer, ChatTemplate, int | None]:
    """Return the tokenizer, its template and the id after a text, if any. *Raises* ConfigError."""
    assert config.tokenizer is not None
    tokenizer, name = load_tokenizer(config.tokenizer), config.eod_token
    refuse_small_vocabulary(config, tokenizer, vocab_size)
    path = tokenizer_file(config.tokenizer)
    end = usual_end(tokenizer, path) if name is None else end_of_document(tokenizer, path, name)
    return tokenizer, chat_template(config, tokenizer), end
