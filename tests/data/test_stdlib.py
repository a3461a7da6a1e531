"""data=stdlib on a small folder, and once on the real library."""

import time

import pytest

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data import open_data
from graphmoe.data.sources.stdlib import find_sources
from graphmoe.data.sources.stdlib import open_corpus as open_stdlib
from tests.data.texts import sentences

SEQ_LEN, VOCAB = 16, 400


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "lib"
    for i in range(40):
        path = root / ("json" if i % 2 else ".") / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(sentences(10, seed=i)))
    for name in ("test/a.py", "json/tests/b.py", "site-packages/c.py", "__pycache__/d.py", "encodings/e.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("LEFTOUT")
    (root / "f.so").write_text("LEFTOUT")
    (root / "empty.py").write_text("")
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\n")
    (root / "broken.py").write_bytes(b"# caf\xe9\n")
    return root


def open_small(root, **changes):
    changes = {"bpe_vocab_size": 320, "val_fraction": 0.1, **changes}
    return open_stdlib(DataConfig(**changes), SEQ_LEN, VOCAB, root)


def test_every_file_is_a_document_of_one_side(root, cache):
    corpus = open_small(root)
    train, val = (
        {corpus.tokenizer.decode(table.tokens(n, 0, 10**6).tolist()) for n in range(table.num_documents)}
        for table in (corpus.train.documents, corpus.val.documents)
    )
    assert (len(train), len(val)) == (37, 4) and not train & val
    names = {*find_sources(root)}
    assert {"module0.py", "json/module1.py", "latin.py"} <= names and len(names) == 43
    texts = {(root / name).read_text("latin-1") for name in names - {"empty.py", "broken.py"}}
    assert train | val == texts
    counts = corpus.counts
    assert corpus.end_token == 0
    assert (counts["train_files"], counts["val_files"], counts["files_left_out"]) == (37, 4, 2)


def test_the_cache_is_used_until_a_file_changes(root, cache, monkeypatch):
    open_small(root)
    with monkeypatch.context() as patch:
        patch.setattr("graphmoe.data.sources.stdlib._build", None)
        open_small(root, seed=3)
    (root / "module0.py").write_text("# another text of the same file\n" * 9)
    open_small(root)
    open_small(root, bpe_vocab_size=310)
    assert len(list(cache.glob("stdlib-*/meta.json"))) == 3


def test_a_tokenizer_of_the_user_replaces_the_trained_one(root, cache, tokenizer_path, tokenizer):
    corpus = open_small(root, tokenizer=str(tokenizer_path))
    assert corpus.tokenizer.to_str() == tokenizer.to_str()
    trained = open_stdlib(DataConfig(val_fraction=0.1), SEQ_LEN, 310, root).tokenizer
    assert trained.get_vocab_size() == 310  # not the default's 4096
    with pytest.raises(ConfigError, match="more than model.vocab_size=100; use model.vocab_size="):
        open_stdlib(DataConfig(tokenizer=str(tokenizer_path)), SEQ_LEN, 100, root)


def test_wrong_configurations_say_what_to_type(root, cache, tmp_path):
    for size in (299, 401):
        with pytest.raises(ConfigError, match=rf"data.bpe_vocab_size={size} is not in 300 .. .*=400"):
            open_small(root, bpe_vocab_size=size)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds 0 .py files.*data=files"):
        open_small(tmp_path / "empty")


@pytest.mark.slow
def test_the_whole_real_library_is_prepared_within_its_budget(cache):
    started = time.monotonic()
    corpus = open_data(DataConfig(), seq_len=256, vocab_size=4096)
    assert time.monotonic() - started < 60 and corpus.counts["train_tokens"] > 1_000_000
