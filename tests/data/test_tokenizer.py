"""Files of tokenizers that somebody else wrote."""

import json
import os
import shutil

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.data.tokenizer import end_of_document, load_tokenizer


@pytest.fixture
def folder(tmp_path, tokenizer_path):
    shutil.copy(tokenizer_path, tmp_path / "tokenizer.json")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"eos_token": 5}', "eos_token: expected str | object | null, found int"),
        (b'{"eos_token": {"content": [1]}}', "eos_token.content: expected str, found array"),
        (b'{"eos_token": {}}', "eos_token: object missing required field content"),
        (rb'{"eos_token": "\ud800"}', "eos_token: .* is no text"),
        (b"", "is no JSON"),
    ],
)
def test_a_wrong_configuration_is_one_line_with_file_and_field(folder, text, said):
    (folder / "tokenizer_config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=said.replace("|", r"\|")) as caught:
        end_of_document(load_tokenizer(folder), folder, None)
    assert f"{folder}/tokenizer_config.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_fifo_is_refused_and_not_waited_for(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match=f"{name} is no regular file"):
        end_of_document(load_tokenizer(folder), folder, None)


def test_an_id_so_large_that_the_library_takes_long_is_refused(folder):
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"]["big"] = 10**9
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"tokenizer.json has the token id 1000000000; ids up to"):
        load_tokenizer(folder)
