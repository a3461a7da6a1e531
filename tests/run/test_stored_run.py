"""Runs and weights of somebody else: their files are typed, and nothing in them is looked up here."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from graphmoe import convert, generate
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError
from graphmoe.run.stored import config_file
from graphmoe.run.weights import FolderKind, kind_of, open_weights
from tests.runs import config


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "tokenizer.json").touch()
    write(folder, to_plain(config()))
    return folder


def write(folder: Path, document: dict) -> None:
    (folder / "resolved.yaml").write_text(yaml.safe_dump(document))


def refusal(call: Callable[[list[str]], object], *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        call([*words])
    return str(caught.value)


@pytest.mark.parametrize("key", ["name", "num_layers"])
def test_what_a_strangers_file_would_look_up_here_is_refused(run, tmp_path, monkeypatch, key):
    monkeypatch.setenv("A_SECRET", "s3cr3t")
    document = to_plain(config())
    document["model"][key] = "${oc.env:A_SECRET}"
    write(run, document)
    for main, *words in ((generate.main, f"run={run}"), (convert.main, f"from={run}", f"to={tmp_path}/to")):
        message = refusal(main, *words)
        assert f"model.{key}=${{oc.env:A_SECRET}} would be looked up" in message and "s3cr3t" not in message
        assert str(run / "resolved.yaml") in message


def test_attention_of_a_file_is_imported_if_its_reader_names_it(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "strange_code.py").write_text("raise AssertionError\n")
    document = to_plain(config())
    document["model"]["attention"] = "strange_code:it"
    write(run, document)
    folder = own_folder(tmp_path / "own")
    (folder / "model" / "m.yaml").write_text(yaml.safe_dump(document["model"]))
    to = f"to={tmp_path / 'to'}"
    for main, *words in (
        (generate.main, f"run={run}"),
        (convert.main, f"from={run}", to),
        (convert.main, f"from={folder}", to, "target=hf"),
    ):
        for named in ([], ["attention=strange_code:other"]):
            with pytest.raises(ConfigError, match=r"yaml: .*attention=strange_code:it is code outside the"):
                main([*words, *named])
        with pytest.raises(AssertionError):
            main([*words, "attention=strange_code:it"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": 3}, "model: expected object, found int"),
        ({"model": {"num_layers": [1]}}, "model.num_layers fits no model"),
        ({"model": {"num_layers": -1}}, "model.num_layers=-1"),
        ({"model": {"colour": "red"}}, "model.colour fits no model"),
        ({"precision": {"compute": "fp8"}}, "precision.compute=fp8 must be one of"),
        ({"precision": {"compute": 8}}, "precision.compute: expected str"),
        ({"data": [1]}, "data: expected object, found array"),
    ],
)
def test_wrong_types_are_one_line_that_names_file_and_field(run, tmp_path, change, words):
    document = to_plain(config())
    model = change.get("model")
    document |= {"model": document["model"] | model} if isinstance(model, dict) else change
    write(run, document)
    message = refusal(convert.main, f"from={run}", f"to={tmp_path / 'to'}")
    assert words in message and str(run / "resolved.yaml") in message and "\n" not in message


def test_a_folder_inside_of_a_run_is_no_run_itself(run, tmp_path):
    step = run / "checkpoints" / "step_00000003"
    (step / "inside").mkdir(parents=True)
    (run / "weights").mkdir()
    for named in (run, run / "checkpoints", step):
        assert kind_of(named) is FolderKind.run and config_file(named) == run / "resolved.yaml"
    for other in (run / "weights", step / "inside"):
        with pytest.raises(ConfigError, match="holds no weights"):
            kind_of(other)
    (run / "config.json").write_text("{}")
    assert kind_of(run) is FolderKind.hf


def own_folder(folder: Path, **meta) -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "m.yaml").write_text(yaml.safe_dump(to_plain(config())["model"]))
    save_file({"embed.weight": torch.zeros(2)}, folder / "weights.safetensors")
    document = {"format": "graphmoe-weights-1", "model": "model/m.yaml", **meta}
    (folder / "weights.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"model": "model/../../m.yaml"}, r"weights\.json: model=.* must be a file in model/"),
        ({"model": "/etc/passwd"}, r"weights\.json: model=/etc/passwd must be a file in model/"),
        ({"model": 3}, r"weights\.json.* model: expected str, found int"),
        ({"token_ids": {"eos_token_id": "x"}}, r"weights\.json.* token_ids"),
        ({"token_ids": [1]}, r"weights\.json.* token_ids: expected"),
        # of more layers than there are tensors, which is refused before the model is made
        ({}, r"m\.yaml: model\.num_layers=2, but the weights have 1 tensors"),
    ],
)
def test_fields_of_our_weights_have_types_and_stay_in_their_folder(tmp_path, meta, words):
    with pytest.raises(ConfigError, match=words):
        open_weights(own_folder(tmp_path / "own", **meta))


@pytest.mark.parametrize(
    ("names", "said"),
    [(each, r"index\.json: weight_map") for each in ({}, {"a": "../b"}, {"a": "/etc/passwd"}, {"a": 3}, [1])]
    + [({"a": "fifo"}, "fifo is not a regular file")],
)
def test_an_index_names_regular_files_of_its_folder(tmp_path, names, said):
    folder = own_folder(tmp_path / "own")
    (folder / "weights.safetensors").rename(folder / "b")
    os.mkfifo(folder / "fifo")
    (folder / "weights.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError, match=said):
        open_weights(folder)
