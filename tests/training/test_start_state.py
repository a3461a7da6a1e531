"""Folders to start from are looked at before data are tokenised and before a run has a folder."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from graphmoe import save_hf, train
from graphmoe.checkpoint import CheckpointStore
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError
from graphmoe.convert import ConvertArgs, convert
from graphmoe.model.build import build_model
from graphmoe.plan.plan import plan_of
from graphmoe.run.weights import load_weights
from graphmoe.runtime.ranks import Ranks
from graphmoe.training import run as training
from graphmoe.training.start_state import check_start
from tests.command.test_convert import CONFIG, assert_same_weights, random_model
from tests.damage import flip_bit
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
def test_a_start_is_refused_before_data_are_opened_or_a_folder_is_claimed(tmp_path, monkeypatch, capsys, key):
    monkeypatch.setattr("graphmoe.training.trainer.open_data", lambda *a, **k: pytest.fail("data are opened"))
    monkeypatch.setattr("graphmoe.run.folder.claim", lambda *a, **k: pytest.fail("a folder is claimed"))
    said = f"checkpoint.{key}=nowhere: nowhere (holds|is) no"
    with pytest.raises(ConfigError, match=f"^{said}"):
        training.run_worker(plan_of(config(f"checkpoint.{key}=nowhere"), 1), tmp_path, Ranks())
    monkeypatch.chdir(tmp_path)
    words = ["graphmoe.train", *TINY, f"checkpoint.{key}=nowhere", "hydra.run.dir=run"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as caught:
        train.main()
    assert caught.value.code == 2 and re.search(f"error: {said}", capsys.readouterr().err)


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


@pytest.mark.parametrize("ties", [True, False])
def test_another_kind_of_head_is_refused_from_a_run_and_from_folders_of_weights(tmp_path, ties):
    words = [f"model.tie_embeddings={str(kind).lower()}" for kind in (ties, not ties)]
    trainer = train_in(tmp_path / "run", words[0], "train.steps=1", "train.val_batches=0")
    (tmp_path / "run" / "resolved.yaml").write_text(yaml.safe_dump(to_plain(trainer.config)))
    resumed = refusal(f"checkpoint.resume_from={tmp_path}/run", words[1])
    assert f"another model (model.tie_embeddings: {ties} -> {not ties}; its own -> this run's)" in resumed
    assert "loss_head.head.weight" in resumed
    started = refusal(f"checkpoint.init_from={tmp_path}/run", words[1])
    assert f"{words[1]}, but " in started and f"; use {words[0]}, or" in started
    own = replace(CONFIG, tie_embeddings=ties)
    model = random_model(own)
    save_hf(model, own, tmp_path / "hf")
    convert(ConvertArgs(from_=tmp_path / "hf", to=tmp_path / "own"))
    for folder in (tmp_path / "hf", tmp_path / "own"):
        target, other = (build_model(replace(own, tie_embeddings=kind), seed=7) for kind in (ties, not ties))
        load_weights(target, folder)
        assert_same_weights(target.state_dict(), model.state_dict())
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(ConfigError, match=f"{words[1]}, but {folder} is"):
            load_weights(other, folder)
        assert_same_weights(other.state_dict(), before)


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
    flip_bit(tmp_path / "copy" / "step_00000006" / "__0_0.distcp")
    for key in ("resume_from", "init_from"):
        if key == "init_from":
            shutil.copy(first / "resolved.yaml", tmp_path / "copy")
        with pytest.raises(Exception, match=f"^checkpoint.{key}={tmp_path}/copy: .* are damaged"):
            train_in(tmp_path / key, f"checkpoint.{key}={tmp_path}/copy")


def test_a_run_that_goes_on_in_its_folder_does_not_ask_for_where_it_began(first):
    check_start(config("checkpoint.resume_from=nowhere"), first)
    assert CheckpointStore.open_any(first).latest() == [6, 3]
