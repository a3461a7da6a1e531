"""Runs with a tied head: they go on bitwise, start from weights of their kind only, and export no head."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from graphmoe import save_hf
from graphmoe.checkpoint import CheckpointError
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError
from graphmoe.convert import ConvertArgs, convert
from graphmoe.model.build import build_model
from graphmoe.run.weights import load_weights
from tests.command.test_convert import CONFIG, assert_same_weights, random_model
from tests.runs import assert_same_state, final_state, numbers, train_in, trainer_in

TIED, APART = "model.tie_embeddings=true", "model.tie_embeddings=false"
SIX = ("train.steps=6", "checkpoint.interval=3", "optim.schedule=constant")
HEAD = "loss_head.head.weight"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folders of two runs, tied and not, that the command line could have made."""
    root = tmp_path_factory.mktemp("runs")
    for word, name in ((TIED, "tied"), (APART, "apart")):
        trainer = train_in(root / name, word, "train.steps=1", "train.val_batches=0")
        (root / name / "resolved.yaml").write_text(yaml.safe_dump(to_plain(trainer.config)))
    return root


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_run_with_a_tied_head_goes_on_bitwise(tmp_path, compute):
    words = (TIED, f"precision.compute={compute}", "model.mtp_depth=1")
    train_in(tmp_path / "whole", *words, *SIX)
    train_in(tmp_path / "first", *words, *SIX, "train.steps=3")
    again = train_in(tmp_path / "second", *words, *SIX, f"checkpoint.resume_from={tmp_path}/first")
    assert again.model.loss_head.head.weight is again.model.embed.weight
    assert numbers(tmp_path / "second") == [row for row in numbers(tmp_path / "whole") if row["step"] > 3]
    states = [final_state(tmp_path / n, tmp_path / f"{n} read", *words) for n in ("whole", "second")]
    assert_same_state(*states)
    assert "model.embed.weight" in states[0] and not any(name.endswith(HEAD) for name in states[0])


@pytest.mark.parametrize(("name", "word"), [("tied", APART), ("apart", TIED)])
def test_a_run_does_not_go_on_with_another_kind_of_head(runs, tmp_path, name, word):
    with pytest.raises(CheckpointError) as caught:
        trainer_in(tmp_path, word, f"checkpoint.resume_from={runs / name}")
    first, *tensors = str(caught.value).splitlines()
    kinds = "True -> False" if name == "tied" else "False -> True"
    assert f"another model (model.tie_embeddings: {kinds}; its own -> this run's)" in first
    assert any(HEAD in line for line in tensors)


@pytest.mark.parametrize(("name", "word"), [("tied", APART), ("apart", TIED)])
def test_a_run_does_not_start_from_the_weights_of_a_run_with_another_kind_of_head(runs, tmp_path, name, word):
    with pytest.raises(ConfigError, match=f"{word}, but .*; use {TIED if name == 'tied' else APART}, or"):
        trainer_in(tmp_path, word, f"checkpoint.init_from={runs / name}")


@pytest.mark.parametrize("ties", [True, False])
def test_a_model_takes_weights_of_its_own_kind_of_head_from_folders(tmp_path, ties):
    config = replace(CONFIG, tie_embeddings=ties)
    model = random_model(config)
    save_hf(model, config, tmp_path / "hf")
    convert(ConvertArgs(from_=tmp_path / "hf", to=tmp_path / "own"))
    for folder in (tmp_path / "hf", tmp_path / "own"):
        target, other = (
            build_model(replace(config, tie_embeddings=kind), seed=7) for kind in (ties, not ties)
        )
        load_weights(target, folder)
        assert_same_weights(target.state_dict(), model.state_dict())
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        words = f"model.tie_embeddings={str(not ties).lower()}, but {folder} is"
        with pytest.raises(ConfigError, match=words):
            load_weights(other, folder)
        assert_same_weights(other.state_dict(), before)
