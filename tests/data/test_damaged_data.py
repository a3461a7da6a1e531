"""Damaged data, tokenizers and caches: no traceback, no hang, and no other tokens without a word."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data import Corpus, DataError, Loader, open_data
from graphmoe.data.contents import ContentCheck, write_sums
from graphmoe.data.indexed import write_token_file
from graphmoe.data.samples import PackedSamples
from graphmoe.data.sources.stdlib import open_corpus as open_stdlib
from tests.damage import failures, fresh_copy
from tests.data.texts import sentences, write_jsonl

pytestmark = pytest.mark.slow

CASES = 100
VOCAB = 400
SAMPLES = 40
Opened = Callable[[Path], Corpus]


def opener(source: str, paths: str, **keys: Any) -> Opened:
    """Open paths of a folder, with its tokenizer if it has one."""

    def opened(folder: Path) -> Corpus:
        own = folder / "tokenizer.json"
        names = {"hf_name": f"{folder}/{paths}"} if source == "hf" else {"paths": [f"{folder}/{paths}"]}
        asked = DataConfig(source, tokenizer=None if source == "memmap" else str(own), **names, **keys)
        return open_data(asked, seq_len=16, vocab_size=VOCAB)

    return opened


def outcome(opened: Opened, folder: Path, state: dict[str, Any] | None) -> npt.NDArray[np.int64] | str:
    try:
        corpus = opened(folder)
        loader = Loader(corpus.train, micro_batch_size=1, global_batch_size=1, prefetch=0)
        if state is not None:
            loader.load_state_dict(state)
        return np.concatenate([next(loader).numpy() for _ in range(SAMPLES)])
    except (ConfigError, DataError) as error:
        return str(error)


@pytest.fixture
def require_none(tmp_path, monkeypatch):
    """Fail if a damage is taken wrongly: a resume knows what there should be, a start may not."""
    monkeypatch.setenv("GRAPHMOE_CACHE", str(tmp_path / "cache"))
    work = tmp_path / "work"  # the path is the same in each case: it is part of the key

    def require_none(opened: Opened, source: Path) -> None:
        whole = opened(fresh_copy(source, work))
        loader = Loader(whole.train, micro_batch_size=1, global_batch_size=1, prefetch=0)
        [next(loader) for _ in range(3)]
        state = loader.state_dict()
        wanted = outcome(opened, work, state)
        assert not isinstance(wanted, str)
        for start, samples in ((None, None), (state, wanted)):

            def problem(folder: Path, number: int, start=start, samples=samples) -> str | None:
                got = outcome(opened, folder, start)
                if isinstance(got, str):
                    named = str(folder) in got or "the checkpoint" in got
                    return None if named and "\n" not in got else f"no line that names a file: {got!r}"
                if samples is not None and not np.array_equal(got, samples):
                    return "other tokens without a word"
                return None if got.max() < VOCAB and got.min() >= 0 else "ids beyond the vocabulary"

            assert failures(source.name, source, work, problem, CASES) == []

    return require_none


@pytest.fixture
def source(tmp_path, tokenizer_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    shutil.copy(tokenizer_path, folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}, "lstrip": 1}')
    return folder


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_damaged_text_files_are_named_or_read_right(source, require_none, ending, skip_bad):
    for seed in range(3):
        path, texts = source / f"{seed}.{ending}", sentences(60, seed)
        if ending == "txt":
            path.write_text("\n".join(texts))
        elif ending == "jsonl":
            write_jsonl(path, texts)
        else:
            pa = pytest.importorskip("pyarrow")
            import pyarrow.parquet as pq

            pq.write_table(pa.table({"text": texts}), path, row_group_size=20)
    require_none(opener("files", f"*.{ending}", skip_bad=skip_bad), source)


@pytest.mark.parametrize("summed", [False, True])
def test_damaged_pairs_are_named_or_read_right(tmp_path, require_none, summed):
    source = tmp_path / "source"
    source.mkdir()
    rng = np.random.default_rng(0)
    for name in "ab":
        documents = [rng.integers(0, VOCAB, size=length) for length in rng.integers(5, 60, size=40)]
        write_token_file(source / name, documents, np.uint16)
        if summed:
            write_sums(source / name)
    require_none(opener("memmap", "*", val_fraction=0), source)


def test_damaged_data_sets_are_named_or_read_right(source, require_none, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    (source / "set").mkdir()
    for seed in range(3):
        write_jsonl(source / "set" / f"{seed}.jsonl", sentences(60, seed))
    require_none(opener("hf", "set", val_fraction=0, shuffle=False), source)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", ["stdlib", "files"])
def test_damaged_caches_give_the_same_samples_or_an_error(source, tmp_path, monkeypatch, kind, large):
    """An entry is whole or made again, if need be at the second start: its samples are the same always."""
    texts, work = tmp_path / "texts", tmp_path / "work"
    texts.mkdir()
    for seed in range(30):
        (texts / f"{seed}.py").write_text("\n".join(sentences(10, seed)))
    write_jsonl(source / "a.jsonl", sentences(100))
    monkeypatch.setenv("GRAPHMOE_CACHE", str(work))
    if large:
        for module in ("sources.files", "cache", "contents"):
            monkeypatch.setattr(f"graphmoe.data.{module}.SMALL_BYTES", 0)
    asked = DataConfig(bpe_vocab_size=320, val_fraction=0.1)

    def opened(folder: Path) -> Corpus:
        is_own = kind == "stdlib"
        corpus = open_stdlib(asked, 16, VOCAB, texts) if is_own else opener("files", "*.jsonl")(source)
        for samples in (corpus.train, corpus.val):
            assert isinstance(samples, PackedSamples)
            check = ContentCheck(samples.documents.files)
            check._run()  # to the end, whatever its thread has done
            check.raise_damage()
        return corpus

    opened(work)
    whole = fresh_copy(work, tmp_path / "whole")
    wanted = outcome(opened, work, None)

    def found(folder: Path, number: int) -> str | None:
        got = outcome(opened, folder, None)
        if large and isinstance(got, str) and "run the same command again" in got:
            got = outcome(opened, folder, None)
        if isinstance(got, str):
            return None if got.startswith(f"cannot make the cache entry {folder}") else got
        return None if np.array_equal(got, wanted) else "other tokens without a word"

    assert failures(f"cache {kind}", whole, work, found, CASES) == []
