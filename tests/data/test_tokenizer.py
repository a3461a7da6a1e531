"""Files of tokenizers that somebody else wrote."""

import json
import os
import shutil
from unittest.mock import Mock

import pytest

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data import open_data
from graphmoe.data.sources.hf import open_stream
from graphmoe.data.tokenizer import end_of_document, find_tokenizer, load_tokenizer
from tests.data.texts import sentences, write_jsonl


@pytest.fixture
def folder(tmp_path, tokenizer_path):
    shutil.copy(tokenizer_path, tmp_path / "tokenizer.json")
    return tmp_path


def test_a_wrong_configuration_is_one_line_with_file_and_field(folder):
    for text, said in {
        b'{"eos_token": 5}': r"eos_token: expected str \| object \| null, found int",
        b'{"eos_token": {"content": [1]}}': "eos_token.content: expected str, found array",
        b'{"eos_token": {}}': "eos_token: object missing required field content",
        rb'{"eos_token": "\ud800"}': "eos_token: .* is not text",
        b"": "is not JSON",
    }.items():
        (folder / "tokenizer_config.json").write_bytes(text)
        with pytest.raises(ConfigError, match=rf"^[^\n]*{said}[^\n]*$") as caught:
            end_of_document(load_tokenizer(folder), folder, None)
        assert f"{folder}/tokenizer_config.json" in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_fifo_is_refused_and_not_waited_for(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
        end_of_document(load_tokenizer(folder), folder, None)


def test_an_id_so_large_that_the_library_takes_long_is_refused(folder):
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"]["big"] = 10**9
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"tokenizer.json has the token id 1000000000; ids up to"):
        load_tokenizer(folder)


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    there, asked = {}, []

    def download(name, file, *, local_files_only):
        if not local_files_only:
            asked.append(file)
        if local_files_only or file not in there:
            raise LocalEntryNotFoundError("not here")
        return str(there[file])

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("graphmoe.data.tokenizer.reach_hub", lambda *a: None)
    return there, asked


def test_a_tokenizer_is_taken_by_its_name_on_the_hub(folder, hub, cache, tmp_path, monkeypatch):
    there, asked = hub
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", sentences(30))
    there["tokenizer.json"] = folder / "tokenizer.json"
    data = DataConfig("files", paths=["a.jsonl"], tokenizer="Qwen/Qwen3-30B-A3B")
    assert open_data(data, seq_len=16, vocab_size=400).tokenizer.get_vocab_size() == 400
    assert asked == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    for name in (folder, folder / "tokenizer.json", "no/tokenizer.json", "a/b/c"):
        assert find_tokenizer(name) == folder / "tokenizer.json" or not find_tokenizer(name).exists()
    assert len(asked) == 3


def test_a_name_without_a_hub_is_one_line_at_once(monkeypatch):
    unreachable = Mock(side_effect=OSError("[Errno -2] Name or service not known"))
    monkeypatch.setattr("graphmoe.data.tokenizer.reach_hub", unreachable)
    said = r"data.tokenizer=me/mine is not a file here, and the .* hub .*service not known\); give the path"
    with pytest.raises(ConfigError, match=said):
        find_tokenizer("me/mine")
    monkeypatch.setattr("graphmoe.data.sources.hf.reach_hub", unreachable)
    data = DataConfig("hf", hf_name="me/texts", tokenizer="t.json")
    with pytest.raises(ConfigError, match="cannot open data.hf_name=me/texts .*service not known"):
        open_stream(data, "train")
