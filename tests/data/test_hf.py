"""data=hf on local folders, without a network."""

import itertools
import json

import numpy as np
import pytest

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data import DataError, Loader, open_data
from graphmoe.data.sources import hf as hf_module
from tests.data.test_loader import rows_over_ranks
from tests.data.texts import sentences

pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

SEQ_LEN = 24


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(hf_module, "BLOCK_DOCUMENTS", 7)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write_shards(folder, 0)
    return folder


def write_shards(folder, seed):
    for shard in range(3):
        table = pa.table({"text": sentences(20, seed=shard + seed)})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=6)


def open_hf(folder, tokenizer_path, vocab_size=400, **changes):
    changes = {"val_fraction": 0.0, "tokenizer": str(tokenizer_path), **changes}
    config = DataConfig(source="hf", hf_name=str(folder), **changes)
    return open_data(config, seq_len=SEQ_LEN, vocab_size=vocab_size)


def texts_in(rows, tokenizer) -> list[str]:
    """The documents in overlapping rows of one stream; the first and the last may be cut."""
    stream = [*rows[0], *itertools.chain.from_iterable(row[1:] for row in rows[1:])]
    return tokenizer.decode([int(t) for t in stream], skip_special_tokens=False).split("<|endoftext|>")


def test_the_first_epoch_has_every_document_once(folder, tokenizer_path):
    corpus = open_hf(folder, tokenizer_path)
    tokens = sum(len(corpus.tokenizer.encode(t).ids) + 1 for s in range(3) for t in sentences(20, s))
    rows = corpus.train.reader().read(0, tokens // SEQ_LEN)
    found = texts_in(rows, corpus.tokenizer)[:-1]
    wanted = [text for shard in range(3) for text in sentences(20, seed=shard)]
    assert len(set(found)) == len(found) >= 58 and set(found) <= set(wanted)
    assert found[:20] != wanted[:20]


@pytest.mark.parametrize("prefetch", [0, 4])
def test_resume_with_1_2_4_1_ranks_gives_the_same_global_stream(folder, tokenizer_path, prefetch):
    samples = open_hf(folder, tokenizer_path).train
    rows, state = rows_over_ranks(samples, prefetch)
    assert state["epochs"] >= 1.0
    assert np.array_equal(rows.numpy(), samples.reader().read(0, len(rows)))


@pytest.mark.parametrize("every", [1, 3])
def test_a_chain_of_resumes_within_a_block_is_exact(folder, tokenizer_path, every):
    corpus = open_hf(folder, tokenizer_path)
    whole, state = corpus.train.reader().read(0, 80), None
    for position in range(0, 78, every):
        reader = corpus.train.reader(state)
        assert np.array_equal(reader.read(position, every), whole[position : position + every])
        state = json.loads(json.dumps(reader.state()))


def test_held_out_documents_are_never_trained_on(folder, tokenizer_path):
    corpus = open_hf(folder, tokenizer_path, val_fraction=0.2)
    train = set(texts_in(corpus.train.reader().read(0, 300), corpus.tokenizer)[1:-1])
    val = set(texts_in(corpus.val.reader().read(0, 100), corpus.tokenizer)[1:-1])
    assert val and not train & val and len(train | val) == 60


def test_bad_rows_are_an_error_with_their_number_or_counted(tmp_path, tokenizer_path):
    (tmp_path / "set").mkdir()
    table = pa.table({"text": [*sentences(12), None, *sentences(5)]})
    pq.write_table(table, tmp_path / "set" / "a.parquet")
    corpus = open_hf(tmp_path / "set", tokenizer_path)
    with pytest.raises(DataError, match="row 12 of epoch 0: field 'text' is NoneType"):
        corpus.train.reader().read(0, 30)
    corpus = open_hf(tmp_path / "set", tokenizer_path, skip_bad=True)
    corpus.train.reader().read(0, 10)
    assert corpus.bad["record without text"] >= 1


def test_wrong_configurations_say_what_to_type(folder, tokenizer_path, tmp_path):
    with pytest.raises(ConfigError, match="text_field=body is not a column of .*: text"):
        open_hf(folder, tokenizer_path, text_field="body").train.reader().read(0, 1)
    with pytest.raises(ConfigError, match="cannot open data.hf_name=.*nothing"):
        open_hf(tmp_path / "nothing", tokenizer_path)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_set_exchanged_for_one_of_as_many_shards_is_not_gone_on_with(folder, tokenizer_path, shuffle):
    def loader():
        corpus = open_hf(folder, tokenizer_path, shuffle=shuffle)
        return Loader(corpus.train, micro_batch_size=1, global_batch_size=1, prefetch=0)

    first = loader()
    [next(first) for _ in range(15)]
    state = first.state_dict()
    wanted = next(first)

    def resumed(state):
        other = loader()
        other.load_state_dict(state)
        return next(other)

    assert (resumed(state) == wanted).all()
    write_shards(folder, 7)
    said = r"set \[train\], row \d+ of epoch 0: the documents from here on are not"
    with pytest.raises(DataError, match=said):
        resumed(state)
    del state["reader"]["sum"]  # a checkpoint of before
    resumed(state)
