"""Hugging Face datasets: streams, shuffled, resumable, equal on any number of ranks; and files of rows.

Each rank reads and tokenises the whole stream and keeps its own samples; ``docs/data.md`` has the cost.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data.cache import cache_folder, cache_key, cached
from graphmoe.data.corpus import Corpus, configured_tokenizer
from graphmoe.data.errors import BadRecords, DataError, one_line
from graphmoe.data.samples import Reader, Samples, derive_key, permute
from graphmoe.data.text_files import is_text
from graphmoe.data.tokenise import encode_checked
from graphmoe.data.tokenizer import num_ids, reach_hub, tokenizer_hash

BLOCK_DOCUMENTS = 512  # documents tokenised and shuffled together; a resume re-reads at most one block
SHARD_KEY, BLOCK_KEY = 4, 5

Where = dict[str, Any]  # stream position, as plain values


def open_corpus(config: DataConfig, seq_len: int, vocab_size: int) -> Corpus:
    tokenizer, end = configured_tokenizer(config, vocab_size)
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
    remembered = RememberedSamples(val) if val else None
    return Corpus(train, remembered, tokenizer, counts, bad, end_token=end)


@dataclass(eq=False)
class StreamSamples(Samples):
    dataset: Any
    config: DataConfig
    split: str
    seq_len: int
    tokenizer: Tokenizer
    end_token: int
    id_limit: int
    bad: BadRecords
    held_out: bool | None = None  # True: only held-out documents; False: only the others; None: all
    num_samples: int | None = field(default=None, init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        c = self.config
        parts: list[Any] = [c.hf_name, c.hf_config, self.split, c.text_field]
        parts += [c.seed, c.shuffle, c.val_fraction]
        parts += [self.seq_len, self.end_token, self.id_limit, self.held_out, self.dataset.num_shards]
        parts.append(tokenizer_hash(self.tokenizer))
        self.fingerprint = "stream:" + hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    def reader(self, state: dict[str, Any] | None = None) -> StreamReader:
        return StreamReader(self, state)

    @property
    def name(self) -> str:
        return f"{self.config.hf_name} [{self.split}]"


class StreamReader(Reader):
    """Reader of a stream; its state is a block of documents and an offset in the block's tokens."""

    def __init__(self, samples: StreamSamples, state: dict[str, Any] | None):
        state = state or {"position": 0, "offset": 0, "block": None}
        super().__init__(samples)
        self._name, self._length = samples.name, samples.seq_len + 1
        self._position, self._offset = int(state["position"]), int(state["offset"])
        self._stream = _blocks(samples, state["block"])
        self._blocks: deque[_Block] = deque()
        self._wanted_sum: str | None = state.get("sum")

    def read(self, first: int, count: int) -> npt.NDArray[np.int64]:
        self.seek(first)
        return np.stack([self._next() for _ in range(count)])

    def seek(self, position: int) -> None:
        assert position >= self._position, "a stream cannot go back"
        while self._position < position:
            self._next()

    def state(self) -> dict[str, Any]:
        self._fill(1)
        block = self._blocks[0]
        return {"position": self._position, "offset": self._offset, "block": block.start, "sum": block.sum}

    def epochs(self, position: int) -> float:
        return float(self._blocks[0].start["epoch"]) if self._blocks else 0.0

    def _next(self) -> npt.NDArray[np.int64]:
        self._fill(self._length)
        parts, wanted, offset = [], self._length, self._offset
        for block in self._blocks:
            parts.append(block.tokens_T[offset : offset + wanted])
            wanted, offset = wanted - len(parts[-1]), 0
        self._offset += self._length - 1
        while self._offset >= len(self._blocks[0].tokens_T):
            # the last token of a sample is the first of the next
            self._offset -= len(self._blocks.popleft().tokens_T)
        self._position += 1
        return np.concatenate(parts)

    def _fill(self, num_tokens: int) -> None:
        held = sum(len(block.tokens_T) for block in self._blocks)
        while held < self._offset + num_tokens:
            block = next(self._stream)
            if self._wanted_sum not in (None, block.sum):  # the first block is the saved state's
                raise DataError(
                    f"{_row(self._name, block.start)}: the documents from here on are not those of the "
                    "checkpoint's run; restore the data set, or start a new run folder with hydra.run.dir=..."
                )
            self._wanted_sum = None
            self._blocks.append(block)
            held += len(block.tokens_T)


class _Block(NamedTuple):
    tokens_T: npt.NDArray[np.int64]
    start: Where  # stream position of its first row
    sum: str


def _blocks(samples: StreamSamples, start: Where | None) -> Iterator[_Block]:
    start = start or {"epoch": 0, "shard": 0, "row": 0, "number": 0, "dataset": None}
    while True:
        found = start["number"] > 0  # rows before a resumed position are not read again
        for where, rows in _rows(samples, start):
            tokens_T = _tokens(samples, rows, where)
            if len(tokens_T):
                found = True
                yield _Block(tokens_T, where, hashlib.blake2b(tokens_T.data, digest_size=16).hexdigest())
        if not found:
            raise DataError(_nothing_found(samples))
        start = {"epoch": start["epoch"] + 1, "shard": 0, "row": 0, "number": 0, "dataset": None}


def _nothing_found(samples: StreamSamples) -> str:
    field = samples.config.text_field
    if samples.held_out is None:
        return f"{samples.name} has no document with text in '{field}'"
    side = "validation" if samples.held_out else "training"
    return (
        f"{samples.name}: data.val_fraction={samples.config.val_fraction} leaves no document with text in "
        f"'{field}' for {side}; use data.hf_val_split=..., or data.val_fraction=0 for no validation"
    )


def _tokens(samples: StreamSamples, rows: list[tuple[str, Any]], where: Where) -> npt.NDArray[np.int64]:
    if samples.config.shuffle:
        key = derive_key(samples.config.seed, where["epoch"], where["number"], BLOCK_KEY)
        rows = [rows[i] for i in permute(np.arange(len(rows)), len(rows), key)]
    batch = [(place, text) for place, text in rows if _usable(samples, place, text)]
    documents = encode_checked(samples.tokenizer, batch, samples.end_token, samples.id_limit, samples.bad)
    return np.concatenate([np.zeros(0, np.int64), *documents])


def _usable(samples: StreamSamples, place: str, text: Any) -> bool:
    if not is_text(text, samples.config.text_field, place, samples.bad):
        return False
    if samples.held_out is None:
        return True
    share = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
    return (share < samples.config.val_fraction) == samples.held_out


def _rows(samples: StreamSamples, start: Where) -> Iterator[tuple[Where, list[tuple[str, Any]]]]:
    # blocks of an epoch from a position on: position of the first row, and (place, text) of each row
    shards = np.arange(max(1, samples.dataset.num_shards))
    if samples.config.shuffle:
        shards = permute(shards, len(shards), derive_key(samples.config.seed, start["epoch"], SHARD_KEY))
    where, first, rows = {**start}, start, list[tuple[str, Any]]()
    while where["shard"] < len(shards):
        shard = samples.dataset.shard(num_shards=len(shards), index=int(shards[where["shard"]]))
        loaded = where["dataset"]
        if loaded is not None:
            shard.load_state_dict(copy.deepcopy(loaded))
        records = iter(shard)
        while True:
            if not rows:  # until the first record is read, state_dict() ignores what was loaded
                first = {**where, "dataset": loaded or copy.deepcopy(shard.state_dict())}
                loaded = None
            place = _row(samples.name, where)
            try:
                record = next(records, None)
            except Exception as error:  # of any type: from parsers, file systems and the network
                raise DataError(f"{place}: cannot be read: {one_line(error)}") from error
            if record is None:
                break
            rows.append((place, _text(samples, record)))
            where["row"] += 1
            if len(rows) == BLOCK_DOCUMENTS:
                yield first, rows
                where["number"] += 1
                rows = []
        where |= {"shard": where["shard"] + 1, "dataset": None}
    if rows:
        yield first, rows


def _row(name: str, where: Where) -> str:
    return f"{name}, row {where['row']} of epoch {where['epoch']}"


def _text(samples: StreamSamples, record: dict[str, Any]) -> Any:
    key = samples.config.text_field
    if key not in record:
        what = f"data.text_field={key} is not a column of {samples.name}"
        raise ConfigError(f"{what}; its columns: {', '.join(record)}")
    return record[key]


def rows_file(config: DataConfig, split: str, fields: Sequence[str]) -> Path:
    """Return a parquet file of the cache with these columns of a whole split. *Raises* ConfigError."""
    rows = open_stream(config, split, streaming=False)
    found = [name for name in rows.column_names if name in fields]
    if not found:
        columns = ", ".join(rows.column_names)
        raise ConfigError(
            f"data.hf_name={config.hf_name} split={split} has the columns {columns}; data={config.source} "
            f"reads {', '.join(fields)}: rename a column, or write the rows to a .jsonl of data.paths"
        )

    def build(folder: Path) -> dict[str, Any]:
        rows.select_columns(found).to_parquet(folder / "rows.parquet")
        return {}

    key = cache_key("rows", rows._fingerprint, found)  # of the contents
    return cached(cache_folder(config.cache_dir), f"rows-{key}", build)[0] / "rows.parquet"


def open_stream(config: DataConfig, split: str, *, streaming: bool = True) -> Any:
    """Open a split as datasets.IterableDataset, or as a Dataset on disk. *Raises* ConfigError."""
    try:
        import datasets
    except ImportError as error:
        what = f"data={config.source} data.hf_name={config.hf_name}"
        raise ConfigError(f"{what} needs the datasets library: pip install 'graphmoe[hf]'") from error
    try:
        # what was downloaded before needs no network
        if streaming and not os.path.exists(os.path.expanduser(config.hf_name or "")):
            reach_hub(config.hf_name or "", "README.md", "dataset")
        return datasets.load_dataset(config.hf_name, config.hf_config, split=split, streaming=streaming)
    except Exception as error:  # of any type: from library, hub and network
        raise ConfigError(
            f"cannot open data.hf_name={config.hf_name} split={split}: {one_line(error)}"
        ) from error


class RememberedSamples(Samples):
    """Validation samples: the first ones of a stream, cached in memory."""

    def __init__(self, stream: Samples):
        self.seq_len, self.num_samples, self.fingerprint = stream.seq_len, None, stream.fingerprint
        self._reader = stream.reader()
        self._kept: list[npt.NDArray[np.int64]] = []

    def sample(self, position: int) -> npt.NDArray[np.int64]:
        while len(self._kept) <= position:
            self._kept.append(self._reader.read(len(self._kept), 1)[0])
        return self._kept[position]
