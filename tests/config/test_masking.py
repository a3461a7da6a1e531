"""Placeholders in files of a run for values of host.env and of the environment."""

import sys

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from graphmoe import train
from graphmoe.command.hydra import load_config, schema, to_config
from graphmoe.config.masking import masked_line, masked_overrides, to_plain
from graphmoe.config.schema import AuxLoss
from graphmoe.run.folder import claim
from graphmoe.run.machine import describe
from tests.runs import TINY, command

BASE = {"run": {"device": "cpu"}, "data": {"source": "synthetic"}}


@pytest.fixture
def composed(monkeypatch):
    def compose(keys: dict, **variables: str):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        cfg = OmegaConf.merge(schema(), BASE)
        for key, value in keys.items():
            OmegaConf.update(cfg, key, value, force_add=True)
        return to_plain(to_config(cfg))

    yield compose
    to_config(OmegaConf.merge(schema(), BASE))


KEYS = {"host.env": {"TOKEN": "hunter2", "OTHER": "x${oc.env:SECRET}"}, "train.seed": "${oc.env:SEED}"}
KEYS |= {"data.source": "memmap", "data.paths": ["a", "b"], "model.aux_loss": "none"}


def test_a_run_folder_has_names_and_interpolations_but_no_value(tmp_path, composed):
    plain = composed({**KEYS, "run.name": "${oc.env:SECRET}"}, SEED="5", SECRET="sesame")
    assert plain["host"]["env"] == {"TOKEN": "***", "OTHER": "***"}
    assert (plain["run"]["name"], plain["train"]["seed"]) == ("${oc.env:SECRET}", "${oc.env:SEED}")
    claim(tmp_path / "run", plain, resume=True).release()
    text = (tmp_path / "run" / "resolved.yaml").read_text()
    assert "hunter2" not in text and "sesame" not in text and yaml.safe_load(text) == plain
    read = load_config(tmp_path / "run" / "resolved.yaml")
    assert (read.run.name, read.train.seed, read.model.aux_loss) == ("sesame", 5, AuxLoss.none)
    assert to_plain(read) == plain


def test_a_run_is_continued_with_the_same_value_of_the_environment_and_no_other(tmp_path, composed):
    def folder_of(keys: dict, **variables: str) -> str:
        folder = claim(tmp_path / "run", composed(keys, **variables), resume=True)
        folder.release()
        return folder.path.name

    assert folder_of({"train.seed": "${oc.env:SEED}"}, SEED="5") == "run"
    assert folder_of({"train.seed": "${oc.env:SEED}"}, SEED="6") == "run-2"
    assert folder_of({"train.seed": 5}) == "run"
    assert folder_of({"train.seed": "${oc.env:OTHER}"}, OTHER="6") == "run-2"
    assert folder_of({"train.seed": "${oc.env:OTHER}"}, OTHER="5") == "run"
    assert folder_of({"train.seed": 7}) == "run-3"


def test_words_of_a_command_lose_the_values_of_host_env(monkeypatch):
    words = ["+host.env.TOKEN=hunter2", "host.env={A:b\nc}", "++host.env.X=a,b", "optim.lr=1"]
    words += ["++host={env:{A:b}}", "host={ threads: 1, env: {A: b}}"]
    masked = "+host.env.TOKEN=*** host.env=*** ++host.env.X=*** optim.lr=1 ++host=*** host=***"
    words += ["--host.env.A=b", "--host.env.TOKEN", "hunter2", "--train.steps", "3"]
    masked += " --host.env.A=*** --host.env.TOKEN *** --train.steps 3"
    assert masked_overrides(words) == masked.split()
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    assert describe(torch.device("cpu"))["command"] == ["python", *masked.split()]
    others = ["host=amd", "host.threads=4", "host={threads:4}", "data.paths=[host.env.A=b]"]
    assert masked_overrides(others) == others


def test_a_line_of_words_loses_the_values_of_host_env():
    for words in (
        "+host.env.T='a model.secret=3'",
        "+host.env.T=secret=3 and more",
        '++host={env:{T:secret=3,U:"secret=3"}}',
        "host.env={T:secret=3}",
        "+host.env.T='a\nsecret=3'",
        "+host.env.T=a\nsecret=3",
    ):
        line = masked_line(f"#0 : optim.lr=1 {words} train.steps=2")
        assert "secret" not in line and "secret" not in masked_line(words)
        assert line.startswith("#0 : optim.lr=1 ") and line.endswith(" train.steps=2")


SECRETS = [
    "+host.env.A=[sesame]",
    "+host.env.A={B:sesame}",
    "host.env={A:[sesame]}",
    "train.steps=${oc.env:TOKEN}",
    "optim.schedule=${oc.env:TOKEN}",
    "run.name=a${oc.env:TOKEN}:/b",
    "recompute.segments=[${oc.env:TOKEN}]",
    "host.env.A=sesame{x",
]


@pytest.mark.parametrize("word", SECRETS)
def test_an_error_about_a_secret_of_the_wrong_type_does_not_print_it(word, monkeypatch, capsys):
    monkeypatch.setenv("TOKEN", "sesame")
    monkeypatch.setattr(sys, "argv", ["train", "data=synthetic", word])
    with pytest.raises(SystemExit) as end:
        train.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and "error: " in said and "sesame" not in said
    assert word.partition("=")[0].lstrip("+").removesuffix(".A") in said


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_no_file_of_a_run_or_a_sweep_has_a_secret(tmp_path, workers):
    sweep = ["optim.lr=1e-3", "hydra.sweep.dir=run", "-m"] if workers == 1 else ["hydra.run.dir=run"]
    words = ["+host.env.TOKEN=hunter2", "log.wandb=false", "+host.env.WORD='${oc.env:SECRET}'"]
    words += ["train.steps=2", f"launch.nproc={workers}", *sweep]
    run = command(tmp_path, *TINY, *words, seconds=120, environment={"SECRET": "sesame"})
    assert run.wait() == 0, run.err.read_text()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"hunter2" not in content and b"sesame" not in content, path
