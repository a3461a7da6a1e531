"""Token files whose contents are not what was written: found, named, and made again where possible."""

from hashlib import sha256

import numpy as np
import pytest

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data import DataError, Loader, contents, open_data
from graphmoe.data.indexed import read_token_file, write_token_file
from graphmoe.plan.plan import plan_of
from graphmoe.runtime.launch.failures import RunFailed
from graphmoe.runtime.ranks import Ranks
from graphmoe.training import run as training
from tests.data.texts import sentences, write_jsonl
from tests.runs import config


@pytest.fixture
def open_text(tmp_path, tokenizer_path, cache):
    write_jsonl(tmp_path / "a.jsonl", sentences(100))
    asked = DataConfig(source="files", paths=[str(tmp_path / "a.jsonl")], tokenizer=str(tokenizer_path))
    return lambda: open_data(asked, seq_len=16, vocab_size=400)


@pytest.fixture
def large(monkeypatch):
    for module in ("sources.files", "cache", "contents"):
        monkeypatch.setattr(f"graphmoe.data.{module}.SMALL_BYTES", 0)


def flip(path, position=10, mask=1):
    raw = bytearray(path.read_bytes())
    raw[position] ^= mask
    path.write_bytes(raw)


def all_of(corpus):
    return corpus.train.reader().read(0, corpus.train.num_samples)


def bin_of(corpus):
    return corpus.train.documents.files[0].path


def test_an_id_beyond_the_vocabulary_in_an_entry_names_file_and_place(open_text, large):
    rows, path = all_of(open_text()), bin_of(open_text())
    flip(path, 2 * 40 + 1, 0x80)
    said = rf"^{path}, document \d+, position \d+: token id 3\d{{4}} is not below"
    with pytest.raises(DataError, match=said):
        all_of(open_text())
    assert np.array_equal(all_of(open_text()), rows)


def test_damage_of_a_large_file_is_found_beside_training_and_mended_by_the_next_run(
    tmp_path, tokenizer_path, open_text, large, monkeypatch
):
    words = (
        "data.source=files", f"data.paths=[{tmp_path}/a.jsonl]", f"data.tokenizer={tokenizer_path}",
        "model.vocab_size=400", "log.sample_tokens=0", "train.val_batches=0",
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    rows, damaged = all_of(open_text()), bin_of(open_text())
    raise_damage = contents.ContentCheck.raise_damage
    flip(damaged)

    def after_the_thread(check):
        check._thread.join()
        raise_damage(check)

    monkeypatch.setattr(contents.ContentCheck, "raise_damage", after_the_thread)
    said = rf"^{damaged}: its sha256[^\n]* run the same command again to rebuild it[^\n]*$"
    with pytest.raises(RunFailed, match=said):
        training.run_worker(plan_of(config(*words), 1), tmp_path / "run", Ranks())
    training.run_worker(plan_of(config(*words), 1), tmp_path / "run", Ranks())
    assert bin_of(open_text()) == damaged and np.array_equal(all_of(open_text()), rows)


@pytest.fixture
def prefix(tmp_path):
    write_token_file(tmp_path / "m", [np.arange(20)] * 30, np.uint16)
    return tmp_path / "m"


def open_pair(prefix, **changes):
    asked = DataConfig(source="memmap", paths=[str(prefix)], val_fraction=0, **changes)
    return open_data(asked, seq_len=10, vocab_size=1000, check=True)


def loader_of(prefix):
    return Loader(open_pair(prefix).train, micro_batch_size=1, global_batch_size=1)


@pytest.mark.parametrize("summed", [False, True])
def test_a_file_exchanged_for_one_of_the_same_lengths_is_not_gone_on_with(prefix, summed):
    if summed:
        contents.write_sums(prefix)
    state = loader_of(prefix).state_dict()
    loader_of(prefix).load_state_dict(state)
    write_token_file(prefix, [np.arange(20) + 1] * 30, np.uint16)
    if summed:
        contents.write_sums(prefix)
    with pytest.raises(ConfigError, match="other tokens, or another dtype, than the checkpoint's"):
        loader_of(prefix).load_state_dict(state)
    del state["contents"]  # a checkpoint of before
    loader_of(prefix).load_state_dict(state)


def test_blocks_lie_over_the_whole_of_a_large_file(prefix, monkeypatch):
    monkeypatch.setattr(contents, "BLOCK_BYTES", 8)
    monkeypatch.setattr(contents, "MAX_BLOCKS", 20)
    path = prefix.with_suffix(".bin")  # of 1200 bytes, 160 of which are read
    whole = contents.contents_of([read_token_file(prefix)])
    found = []
    for position in range(0, 1200, 4):
        flip(path, position)
        found.append(contents.contents_of([read_token_file(prefix)]) != whole)
        flip(path, position)
    assert sum(found) == 40 and found[0] and found[-1] and all(any(found[i : i + 17]) for i in range(283))


def test_a_pair_that_differs_from_its_sums_is_an_error_or_counted(prefix, tmp_path, monkeypatch):
    write_token_file(tmp_path / "other", [np.arange(20)] * 30, np.uint16)
    contents.write_sums(prefix)
    sums = {name: sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("m.bin", "m.idx")}
    lines = prefix.with_suffix(".sha256").read_text().splitlines()
    assert lines == [f"{each}  {name}" for name, each in sums.items()]  # as the command sha256sum writes
    flip(prefix.with_suffix(".bin"))
    said = r"m\.bin: its sha256 differs from that in m\.sha256; restore the file"
    with pytest.raises(DataError, match=said):
        open_pair(prefix)
    both = DataConfig(source="memmap", paths=[str(prefix), str(tmp_path / "other")], skip_bad=True)
    corpus = open_data(both, seq_len=10, vocab_size=1000)
    assert corpus.bad == {"unreadable file": 1} and len(corpus.train.documents.files) == 1
    monkeypatch.setattr("graphmoe.data.sources.files.SMALL_BYTES", 0)
    check = open_pair(prefix).check
    check._run()  # to the end, whatever its thread has done
    with pytest.raises(DataError, match=r"m\.bin: its sha256 differs .*; restore the file"):
        check.raise_damage()


def test_a_wrong_file_of_sums_is_an_error_that_names_it(prefix):
    for text, said in {
        b"": "has no checksum of m.bin",
        b"0" * 64 + b"  other.bin\n": "has no checksum of m.bin",
        b"no sum\n": "m.sha256:1: 'no sum' is not a line of sha256sum",
        b"\xff\xfe": "m.sha256 is not UTF-8",
    }.items():
        prefix.with_suffix(".sha256").write_bytes(text)
        with pytest.raises(DataError, match=said):
            open_pair(prefix)
