"""The configuration: every option composes, every key is documented, autos are resolved."""

import dataclasses
import typing
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from graphmoe import conf
from graphmoe.command.errors import known_keys
from graphmoe.command.hydra import to_config
from graphmoe.config.arguments import field_docs
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ComputeDtype, DeviceChoice, ModelConfig, RunConfig
from graphmoe.plan.rules.check import resolve, violations
from tests.runs import command, config

CONF = Path(conf.__path__[0])
FILES = sorted([*CONF.glob("*/*.yaml"), *CONF.glob("experiment/*/*.yaml")])
OPTIONS = ["=".join(str(path.relative_to(CONF).with_suffix("")).split("/", 1)) for path in FILES]
NEEDED = {  # what an option cannot choose for the user
    "data=files": ["data.paths=[a.txt]", "data.tokenizer=t.json"],
    "data=hf": ["data.hf_name=d", "data.tokenizer=t.json"],
    "data=memmap": ["data.paths=[a]"],
}


@pytest.fixture(scope="module")
def composed():
    """Compose words as the command line does."""
    ConfigStore.instance().store(name="schema", node=RunConfig)
    with initialize_config_module("graphmoe.conf", version_base="1.3"):
        yield lambda *words: to_config(compose("config", list(words)))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_composes_and_is_valid(composed, option):
    group = option.partition("=")[0]
    # debug and experiment options choose for several groups; to_config checks the rules
    found = composed(option, *NEEDED.get(option, []))
    assert violations(found) == []
    if group == "model":
        assert found.model.name == option.partition("=")[2] == found.run.name
        assert found.data.seq_len == min(found.model.context_length, 4096)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_every_option_opens_with_what_it_is_for(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# ") and len(lines[0]) > 12


def test_autos_are_resolved_and_the_given_configuration_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("GRAPHMOE_CACHE", str(tmp_path))
    given = RunConfig(model=ModelConfig(context_length=100_000))
    found = resolve(given)
    assert found.run.device is DeviceChoice.cuda and found.precision.compute is ComputeDtype.bf16
    assert found.data.seq_len == 4096 and found.data.cache_dir == str(tmp_path)
    assert given.run.device is DeviceChoice.auto and given.data.seq_len is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("GRAPHMOE_CACHE")
    found = resolve(RunConfig())
    assert found.run.device is DeviceChoice.cpu and found.precision.compute is ComputeDtype.fp32
    assert found.data.cache_dir == str(Path.home() / ".cache" / "graphmoe")


@pytest.mark.parametrize(
    "stage, scope, resolved",
    [("auto", "none", 0), ("auto", "partial", 1), ("auto", "layer", 3), (2, "none", 2), (3, "partial", 3)],
)
def test_the_resolved_stage_is_the_lowest_that_the_scope_needs_or_the_one_that_is_named(
    stage, scope, resolved
):
    found = config(f"moe.sync_free_stage={stage}", f"graph.scope={scope}", "compile.enabled=true")
    assert to_plain(found)["moe"]["sync_free_stage"] == resolved


def test_a_resolved_configuration_survives_the_way_through_yaml(tmp_path):
    found = config("data.source=memmap", "data.paths=[a,b]", "model.aux_loss=none")
    path = tmp_path / "resolved.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(to_plain(found))))
    again = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.load(path)))
    assert again == found and to_plain(found)["model"]["aux_loss"] == "none"


def sections() -> list[type]:
    hints = typing.get_type_hints(RunConfig)
    return [RunConfig, *(kind for kind in hints.values() if dataclasses.is_dataclass(kind))]


@pytest.mark.parametrize("section", sections(), ids=lambda kind: kind.__name__)
def test_every_key_has_its_documentation(section):
    nested = {name for name, kind in typing.get_type_hints(section).items() if dataclasses.is_dataclass(kind)}
    wanted = {f.name for f in dataclasses.fields(section)} - nested
    docs = field_docs(section)
    assert set(docs) == wanted
    assert all(len(text) > 10 and text.endswith(".") and "\n" not in text for text in docs.values())


def test_the_printed_configuration_is_that_of_the_words(tmp_path):
    shown = command(tmp_path, "model=tiny_gqa", "train.steps=7", "--cfg", "job")
    assert shown.wait() == 0
    printed = OmegaConf.create(shown.out.read_text())
    assert printed.model.name == "tiny_gqa" and printed.train.steps == 7
    assert {key.split(".")[0] for key in known_keys()} == set(printed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr.txt", "stdout.txt"]


def test_help_has_three_examples_and_the_groups(tmp_path):
    shown = command(tmp_path, "--help")
    assert shown.wait() == 0
    text = shown.out.read_text()
    examples = text.split("== Examples ==")[1].split("==")[0]
    assert examples.count("python -m graphmoe.train") == 3
    for part in ("deepseek_v3", "synthetic", "max_nonfinite: 5", "--config-dir", "-sc install=bash"):
        assert part in text
