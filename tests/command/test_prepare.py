"""The tool that writes Megatron files."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import Tokenizer

from graphmoe.config.schema import ConfigError, DataConfig
from graphmoe.data import open_data
from graphmoe.data.contents import read_summed_file
from graphmoe.data.indexed import read_token_file
from graphmoe.data.tokenizer import train_bpe
from graphmoe.prepare import PrepareArgs, main, prepare
from graphmoe.runtime.host.files import sha256_of
from tests.data.texts import sentences, write_jsonl
from tests.runs import ROOT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_bpe(iter(sentences(100)), 400, 100).save("tok.json")
    for name, seed in (("a", 1), ("b", 2)):
        write_jsonl(tmp_path / f"{name}.jsonl", sentences(25, seed), field="content")
    return tmp_path


ARGS = ["input=*.jsonl", "tokenizer=tok.json", "output=out/tokens", "text_field=content"]


def test_the_command_prints_one_json_document_and_writes_the_pair(folder):
    line = [sys.executable, "-m", "graphmoe.prepare", *ARGS, "workers=2", "format=json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    counts = json.loads(subprocess.check_output(line, env=environment))
    file = read_token_file(folder / "out" / "tokens")
    assert counts["documents"] == len(file.start_N) == 50
    assert counts["tokens"] == len(file.tokens_T) and counts["workers"] == 2 and counts["skipped"] == {}
    tokenizer = Tokenizer.from_file(str(folder / "tok.json"))
    first = file.tokens_T[: file.length_N[0]].tolist()
    assert tokenizer.decode(first, skip_special_tokens=False) == sentences(25, 1)[0] + "<|endoftext|>"


def test_the_files_that_the_tool_writes_can_be_trained_on(folder):
    main(ARGS)
    with pytest.raises(ConfigError, match=r"tokens.bin and .*tokens.idx exist already; use overwrite=true"):
        main(ARGS)
    main([*ARGS, "input=a.jsonl", "overwrite=true"])
    named = read_summed_file(folder / "out" / "tokens", compare=True).sums
    assert named == {name: sha256_of(folder / "out" / name) for name in ("tokens.bin", "tokens.idx")}
    config = DataConfig(source="memmap", paths=["out/tokens"], tokenizer="tok.json")
    corpus = open_data(config, seq_len=32, vocab_size=400)
    assert corpus.train.reader().read(0, 3).shape == (3, 33)


def test_bad_text_no_text_and_a_full_disk_are_errors_that_leave_only_files_of_before(folder, monkeypatch):
    (folder / "c.jsonl").write_text('{"content": "whole"}\n{"content": "half')
    with pytest.raises(ConfigError, match=r"c.jsonl:2: not JSON.*\(skip_bad=true counts"):
        main(ARGS)
    assert list((folder / "out").iterdir()) == []
    (folder / "c.jsonl").unlink()
    with monkeypatch.context() as full:
        fail = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        full.setattr("graphmoe.data.tokenise.write_index", fail)
        with pytest.raises(ConfigError, match="cannot write output=out/tokens: .*No space left"):
            main(ARGS)
    assert list((folder / "out").iterdir()) == []
    main(ARGS)
    before = (folder / "out" / "tokens.idx").read_bytes()
    (folder / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="the corpus is empty: no text in .*empty.txt"):
        main(["input=empty.txt", *ARGS[1:], "overwrite=true"])
    assert (folder / "out" / "tokens.idx").read_bytes() == before


def test_wrong_arguments_are_errors_in_the_tools_own_words(folder):
    for word, said in {
        "input=none*": r"input: no file matches 'none\*'",
        "eod_token=</s>": "^eod_token=</s> is not a token",
        "workers=-1": "workers=-1",
    }.items():
        with pytest.raises(ConfigError, match=said):
            main([*ARGS, word])


def test_documents_can_be_left_without_an_end(folder):
    args = PrepareArgs(["*.jsonl"], Path("tok.json"), Path("raw"), text_field="content", append_eod=False)
    assert prepare(args)["eod_token"] is None
    assert not (np.asarray(read_token_file("raw").tokens_T) == 0).any()
