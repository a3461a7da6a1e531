"""data=memmap through open_data."""

from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from graphmoe.config.choices import DATA_SOURCES
from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data import open_data, sources
from graphmoe.data.indexed import write_token_file


@pytest.fixture
def open_memmap(tmp_path):
    """open_data over two pairs of 30 documents; token ids tell the file."""
    for number, name in enumerate("ab"):
        documents = [np.arange(20) + 100 * number for _ in range(30)]
        write_token_file(tmp_path / name, documents, np.uint16)

    def open_memmap(*names, seq_len=10, vocab_size=1000, **changes):
        paths = [str(tmp_path / name) for name in names]
        config = DataConfig(source="memmap", paths=paths, **changes)
        return open_data(config, seq_len=seq_len, vocab_size=vocab_size)

    return open_memmap


@pytest.mark.parametrize("names", [("a", "b"), ("a.bin", "b.idx"), ("*",), ("a", "?", "b")])
def test_prefixes_endings_and_globs_name_the_same_pairs(open_memmap, names):
    corpus = open_memmap(*names)
    wanted = {"train_files": 2, "train_documents": 57, "val_documents": 3, "train_tokens": 57 * 20}
    assert wanted.items() <= corpus.counts.items() and corpus.tokenizer is None
    rows = corpus.train.reader().read(0, corpus.train.num_samples)
    assert {*np.unique(rows)} == {*range(20), *range(100, 120)}


def test_wrong_prefixes_say_what_was_looked_for(open_memmap):
    with pytest.raises(ConfigError, match="data=memmap needs data.paths"):
        open_memmap()
    with pytest.raises(ConfigError, match=r"data.paths: no file matches '.*no-\*.idx'"):
        open_memmap("no-*")
    for skip_bad in (False, True):
        with pytest.raises(ConfigError, match=r"data.paths: \S*/nothing.idx does not exist") as caught:
            open_memmap("a", "nothing", skip_bad=skip_bad)
        assert "skip_bad" not in str(caught.value)


GROUP = Path(__file__).parents[2] / "conf" / "data"


def test_every_source_has_a_file():
    names = set(DATA_SOURCES.names)
    assert {path.stem for path in GROUP.glob("*.yaml")} == names
    assert {path.stem for path in Path(sources.__file__).parent.glob("[a-z]*.py")} == names


@pytest.mark.parametrize("source", DATA_SOURCES.names)
def test_a_file_sets_its_source_and_shows_a_command(source):
    path = GROUP / f"{source}.yaml"
    merged = OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.load(path))
    assert merged.source == source
    assert f"#   python -m graphmoe.train data={source}" in path.read_text()
