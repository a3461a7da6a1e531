"""A small tokenizer and an empty cache."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from graphmoe.data.tokenizer import train_bpe
from tests.data.texts import sentences


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(iter(sentences(200)), 400, 200).save(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_path))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRAPHMOE_CACHE", str(folder))
    return folder
