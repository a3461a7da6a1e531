"""The tokenizer of the weights that a run starts from: taken along, or compared with the data's."""

import json
import shlex
from dataclasses import replace

import pytest
import yaml

from graphmoe import save_hf
from graphmoe.config.schema import ConfigError
from graphmoe.convert import ConvertArgs, convert, main
from graphmoe.data.tokenizer import load_tokenizer, train_bpe
from graphmoe.model.build import build_model
from graphmoe.run.stored import refuse_other_tokenizer, run_tokenizer
from graphmoe.run.weights import load_weights
from graphmoe.training.start_checks import check_start
from tests.command.test_convert import CONFIG, random_model
from tests.data.texts import sentences, write_jsonl
from tests.runs import command, config, train_in


@pytest.fixture
def weights(tmp_path):
    """Imported weights with their tokenizer, whose files declare the end of a document, and some text."""
    model = replace(CONFIG, vocab_size=320)
    folder = tmp_path / "hf"
    save_hf(random_model(model), model, folder)
    tokenizer = train_bpe(iter(sentences(50, seed=3)), 310, 50)
    tokenizer.add_special_tokens(["<stop>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    write_jsonl(tmp_path / "a.jsonl", sentences(100))
    return convert(ConvertArgs(from_=folder, to=tmp_path / "own"))


def test_the_printed_command_goes_on_with_the_tokenizer_of_the_folder(weights, tmp_path):
    words = f"data=files data.paths=[{tmp_path}] data.seq_len=16 train.steps=2 train.val_batches=0"
    words += " compile=none run.device=cpu log.report=false hydra.run.dir=run"
    run = command(tmp_path, *shlex.split(weights["command"])[3:], *words.split())
    assert run.wait() == 0, run.err.read_text()
    data = yaml.safe_load((tmp_path / "run" / "resolved.yaml").read_text())["data"]
    assert data["tokenizer"] == f"{tmp_path}/own/tokenizer.json" and data["eod_token"] is None
    ours, theirs = (load_tokenizer(tmp_path / name) for name in ("run", "hf"))
    assert ours.get_vocab() == theirs.get_vocab()
    assert run_tokenizer(tmp_path / "run")[2] == "<stop>"  # of a folder that has no tokenizer_config.json
    for key in ("init_from", "resume_from"):
        start = (f"checkpoint.{key}={tmp_path}/run", "data.source=files", f"data.paths=[{tmp_path}]")
        found = config(*start).data
        assert (found.tokenizer, found.eod_token) == (f"{tmp_path}/run/tokenizer.json", "<stop>")


def test_what_convert_prints_can_be_copied(weights, tmp_path, capsys):
    main([f"from={tmp_path}/hf", f"to={tmp_path}/[x]"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("start a run from it: python -m graphmoe.train 'model=")
    assert lines[2].endswith(": data=files 'data.paths=[corpus/*.jsonl]'") and f"{tmp_path}/[x] (" in lines[0]


def test_another_tokenizer_is_refused_before_text_is_read(weights, tmp_path, caplog):
    (path,) = (tmp_path / "own" / "model").glob("*.yaml")
    keys = yaml.safe_load(path.read_text())
    shape = [f"model.{key}={value}" for key, value in keys.items() if key != "name"]
    tokenizer_path = tmp_path / "other.json"
    train_bpe(iter(sentences(50)), 300, 50).save(str(tokenizer_path))
    start = (*shape, f"checkpoint.init_from={tmp_path}/own", "data.source=files", f"data.paths=[{tmp_path}]")
    check_start(config(*start, f"data.tokenizer={tmp_path}/hf"))
    said = (
        rf"^checkpoint.init_from={tmp_path}/own has another tokenizer than the data \({tokenizer_path}\): of "
        rf"its 311 ids \d+ stand for the same text; use data.tokenizer={tmp_path}/own/tokenizer.json, or to "
        r"go on anyway checkpoint.other_tokenizer=true$"
    )
    with pytest.raises(ConfigError, match=said):
        check_start(config(*start, f"data.tokenizer={tokenizer_path}"))
    check_start(config(*start, f"data.tokenizer={tokenizer_path}", "checkpoint.other_tokenizer=true"))
    assert caplog.messages == []
    document = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    document["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(document))
    check_start(config(*start, f"data.tokenizer={tmp_path}/hf"))
    assert "has the data's token ids, but its tokenizer splits text differently" in caplog.text


def test_positions_that_the_weights_never_saw_are_warned_of(weights, tmp_path, caplog):
    model = replace(CONFIG, vocab_size=320)
    load_weights(build_model(model, seed=1), tmp_path / "own")
    assert caplog.messages == []
    load_weights(build_model(replace(model, context_length=512), seed=1), tmp_path / "own")
    assert f"model.context_length=512 is longer than the 128 of {tmp_path}/own" in caplog.text


def test_a_tokenizer_that_is_trained_anew_is_compared_when_the_data_are_open(tmp_path, monkeypatch, caplog):
    train_in(tmp_path / "first", "train.steps=1", "train.val_batches=0")
    start = f"checkpoint.init_from={tmp_path}/first"
    run = config(start)
    trained = train_bpe(iter(sentences(50)), 300, 50)
    refuse_other_tokenizer(run.checkpoint, run.data, trained)
    assert "has no tokenizer.json, so the data's tokenizer was not compared" in caplog.text
    trained.save(str(tmp_path / "first" / "tokenizer.json"))
    refuse_other_tokenizer(run.checkpoint, run.data, trained)
    with pytest.raises(ConfigError, match=r"than the data \(trained by data=synthetic\): of its 300 ids"):
        refuse_other_tokenizer(run.checkpoint, run.data, train_bpe(iter(["another text"]), 300, 1))
