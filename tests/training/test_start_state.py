"""Folders to start from are looked at before data are tokenised and before a run has a folder."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from graphmoe.checkpoint import CheckpointStore
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError
from graphmoe.plan.plan import plan_of
from graphmoe.runtime.ranks import Ranks
from graphmoe.training import run as training
from graphmoe.training.start_state import check_start
from tests.runs import TINY, config, train_in


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """A run with checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("start") / "first"
    trainer = train_in(folder)
    (folder / "resolved.yaml").write_text(yaml.safe_dump(to_plain(trainer.config)))
    return folder


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_start(config(*words))
    return str(caught.value)


@pytest.mark.parametrize("key", ["resume_from", "init_from"])
def test_a_run_is_refused_before_its_data_are_opened_and_the_error_names_the_key(tmp_path, monkeypatch, key):
    monkeypatch.setattr("graphmoe.training.trainer.open_data", lambda *a, **k: pytest.fail("data are opened"))
    with pytest.raises(ConfigError, match=f"^checkpoint.{key}=nowhere: nowhere (holds|is) no"):
        training.run_worker(plan_of(config(f"checkpoint.{key}=nowhere"), 1), tmp_path, Ranks())


@pytest.mark.parametrize("key", ["resume_from", "init_from"])
@pytest.mark.parametrize("is_taken", [False, True])
def test_the_command_refuses_before_there_is_a_folder(tmp_path, monkeypatch, capsys, key, is_taken):
    from graphmoe import train

    monkeypatch.chdir(tmp_path)
    if is_taken:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}')
    monkeypatch.setattr("graphmoe.run.folder.claim", lambda *a, **k: pytest.fail("a folder is claimed"))
    words = ["graphmoe.train", *TINY, f"checkpoint.{key}=nowhere", "hydra.run.dir=run"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as caught:
        train.main()
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert re.search(f"error: checkpoint.{key}=nowhere: nowhere (holds|is) no", err), err


@pytest.mark.parametrize("place", ["", "/checkpoints", "/checkpoints/step_00000003"])
def test_a_run_starts_from_a_checkpoint_that_fits(first, place):
    for key in ("resume_from", "init_from"):
        check_start(config(f"checkpoint.{key}={first}{place}"))


@pytest.mark.parametrize("key", ["resume_from", "init_from"])
def test_another_model_is_refused_by_its_keys_and_tensors(first, key):
    message = refusal(f"checkpoint.{key}={first}", "model.expert_ffn_size=16")
    head, *tensors = message.splitlines()
    assert head.startswith(f"checkpoint.{key}={first}: {first} is of another model")
    assert "model.expert_ffn_size: 8 -> 16" in head and any("moe_experts.w_down" in line for line in tensors)


def test_another_precision_is_refused_for_the_whole_state_and_fine_for_weights(first):
    message = refusal(f"checkpoint.resume_from={first}", "precision.compute=bf16")
    assert "not of the same precision" in message
    check_start(config(f"checkpoint.init_from={first}", "precision.compute=bf16"))


def test_damage_that_sizes_show_is_named(first, tmp_path):
    shutil.copytree(first, tmp_path / "copy")
    newest, older = (tmp_path / f"copy/checkpoints/step_0000000{step}" for step in (6, 3))
    (newest / "__0_0.distcp").write_bytes(b"short")
    check_start(config(f"checkpoint.resume_from={tmp_path}/copy"))  # the one before is whole
    (older / "manifest.json").write_text(json.dumps({"format": 1, "files": {}}))
    message = refusal(f"checkpoint.resume_from={tmp_path}/copy")
    assert "damaged checkpoints only: __0_0.distcp: 5 bytes" in message and "must name .metadata" in message


def test_damage_that_only_the_contents_show_names_the_key_too(first, tmp_path):
    shutil.copytree(first / "checkpoints" / "step_00000006", tmp_path / "copy" / "step_00000006")
    path = tmp_path / "copy" / "step_00000006" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for key in ("resume_from", "init_from"):
        if key == "init_from":
            shutil.copy(first / "resolved.yaml", tmp_path / "copy")
        with pytest.raises(Exception, match=f"^checkpoint.{key}={tmp_path}/copy: .* are damaged"):
            train_in(tmp_path / key, f"checkpoint.{key}={tmp_path}/copy")


def test_a_run_that_goes_on_in_its_folder_does_not_ask_for_where_it_began(first):
    check_start(config("checkpoint.resume_from=nowhere"), first)
    assert CheckpointStore.open_any(first).latest() == [6, 3]
