"""data=chat on a dataset of datasets, a local folder here: its rows are those of files."""

import json

import numpy as np
import pytest
import torch

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data import Loader, open_data
from graphmoe.plan.plan import plan_of
from graphmoe.plan.rules import check
from graphmoe.plan.rules.unused import without_effect
from tests.data.chats import conversations, write_rows, write_tokenizer
from tests.data.test_loader import rows_over_ranks
from tests.runs import config, undecided_config

pytest.importorskip("datasets")
pytest.importorskip("pyarrow")


@pytest.fixture
def opened(tmp_path, monkeypatch, cache):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    keys = {"tokenizer": str(tokenizer), "val_fraction": 0.0}

    def open_chats(**more):
        return open_data(DataConfig("chat", **keys | more), seq_len=96, vocab_size=400)

    (tmp_path / "set").mkdir()
    return open_chats


def samples_of(samples, count):
    return samples.reader().read(0, count)


def test_rows_of_a_dataset_are_those_of_files(opened, tmp_path):
    train, val = conversations(40), conversations(9, seed=1)
    pairs = [{"prompt": "the loss of", "completion": " an expert", "score": i} for i in range(30)]
    (tmp_path / "pairs").mkdir()
    write_rows(tmp_path / "pairs" / "train.jsonl", pairs)
    given = {"train": train, "test": val}
    files = [write_rows(tmp_path / "set" / f"{name}.jsonl", rows) for name, rows in given.items()]
    found = opened(hf_name=str(tmp_path / "set"), hf_val_split="test")
    wanted = opened(paths=[str(files[0])], val_paths=[str(files[1])])
    for one, other in ((found.train, wanted.train), (found.val, wanted.val)):
        assert one.num_samples == other.num_samples > 2
        assert np.array_equal(samples_of(one, 2 * one.num_samples), samples_of(other, 2 * one.num_samples))
    same = {"hf_name": str(tmp_path / "pairs")}, {"paths": [str(tmp_path / "pairs" / "train.jsonl")]}
    found, wanted = (samples_of(opened(**keys).train, 9) for keys in same)
    assert np.array_equal(found, wanted)


def test_order_is_that_of_one_rank_and_a_resume_is_exact(opened, tmp_path):
    write_rows(tmp_path / "set" / "train.jsonl", conversations(80))
    samples = opened(hf_name=str(tmp_path / "set")).train
    rows, _ = rows_over_ranks(samples, 4)
    assert np.array_equal(rows.numpy(), samples_of(samples, len(rows)))
    loader = Loader(samples, micro_batch_size=1, global_batch_size=4)
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    again = Loader(opened(hf_name=str(tmp_path / "set")).train, micro_batch_size=1, global_batch_size=4)
    again.load_state_dict(state)
    assert torch.from_numpy(samples_of(samples, 1)).equal(next(again))
    again.close()
    write_rows(tmp_path / "set" / "train.jsonl", conversations(80, seed=5))
    other = Loader(opened(hf_name=str(tmp_path / "set")).train, micro_batch_size=1, global_batch_size=4)
    with pytest.raises(ConfigError, match="the data is not that of the checkpoint"):
        other.load_state_dict(state)


def test_other_columns_and_sets_are_named(opened, tmp_path):
    write_rows(tmp_path / "set" / "train.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(ConfigError, match="the columns question, answer; data=chat reads messages, p"):
        opened(hf_name=str(tmp_path / "set"))
    with pytest.raises(ConfigError, match="cannot open data.hf_name=.* split=train"):
        opened(hf_name=str(tmp_path / "none" / "such" / "set"))


def test_a_run_reads_files_or_a_dataset():
    words = "data.source=chat", "data.document_mask=true", "data.tokenizer=t"
    with pytest.raises(ConfigError, match="takes data.paths or data.hf_name, and neither is set"):
        check(undecided_config(*words))
    with pytest.raises(ConfigError, match="and both are set; set one of them"):
        check(undecided_config(*words, "data.paths=[a]", "data.hf_name=b"))
    for more in (
        ("data.hf_name=b", "data.val_paths=[c]", "with data.hf_name"),
        ("data.paths=[a]", "data.hf_split=c", "without data.hf_name"),
    ):
        plan = plan_of(config(*words, *more[:2]), 1)
        assert any(f"{more[1]} has no effect {more[2]}" in said for said in without_effect(plan, 1))
