"""The configuration: options compose, keys are documented, autos resolved; presets are published models."""

import dataclasses
import pwd
import re
import typing
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from omegaconf import OmegaConf

from graphmoe import conf
from graphmoe.command.errors import known_keys
from graphmoe.command.hydra import to_config
from graphmoe.command.words import help_text
from graphmoe.config import schema
from graphmoe.config.arguments import field_docs
from graphmoe.config.masking import to_plain
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import AuxLoss, ComputeDtype, ConfigError, DeviceChoice, ModelConfig, RunConfig
from graphmoe.model.sizes import count_parameters
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.experts import num_dense
from graphmoe.plan.rules import resolve, violations
from graphmoe.train import EXAMPLES
from tests.runs import PRESETS, ROOT, command, config, hydra_config

CONF = Path(conf.__path__[0])
FILES = sorted([*CONF.glob("*/*.yaml"), *CONF.glob("experiment/*/*.yaml")])
OPTIONS = ["=".join(str(path.relative_to(CONF).with_suffix("")).split("/", 1)) for path in FILES]
NEEDED = {  # what an option cannot choose for the user
    "data=files": ["data.paths=[a.txt]", "data.tokenizer=t.json"],
    "data=chat": ["data.paths=[a.jsonl]", "data.tokenizer=t.json"],
    "data=hf": ["data.hf_name=d", "data.tokenizer=t.json"],
    "data=memmap": ["data.paths=[a]"],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_composes_and_is_valid(option):
    group = option.partition("=")[0]
    lines = (CONF / f"{option.replace('=', '/')}.yaml").read_text().splitlines()
    first = next(line for line in lines if not line.startswith("# @package"))
    assert first.startswith("# ") and len(first) > 12  # what it is for
    # debug and experiment options choose for several groups; to_config checks the rules
    found = to_config(hydra_config(option, *NEEDED.get(option, []), with_hydra=False))
    assert violations(found) == []
    if group == "model":
        assert found.model.name == option.partition("=")[2] == found.run.name
        assert found.data.seq_len == min(found.model.context_length, 4096)
    elif group == "data":
        assert option == f"data={found.data.source}"
        shows = f"#   python -m graphmoe.train {option}"
        assert any(shows in line for line in lines)


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


def test_the_resolved_stage_is_the_lowest_that_its_scope_needs_or_the_given():
    stages = {"auto none": 0, "auto partial": 1, "auto layer": 3, "2 none": 2, "3 partial": 3}
    for words, stage in stages.items():
        given, scope = words.split()
        found = config(f"moe.sync_free_stage={given}", f"graph.scope={scope}", "compile.enabled=true")
        assert to_plain(found)["moe"]["sync_free_stage"] == stage, words


def test_without_a_home_folder_the_error_names_what_to_set(monkeypatch, tmp_path):
    unknown = KeyError("getpwuid(): uid not found: 4242")
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=unknown))
    for name in ("HOME", "GRAPHMOE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="no home folder .*; set HOME, or GRAPHMOE_CACHE="):
        schema.cache_root()
    assert schema.cache_root(str(tmp_path / "own")) == tmp_path / "own"
    monkeypatch.setenv("GRAPHMOE_CACHE", str(tmp_path))
    assert schema.cache_root() == tmp_path


def test_the_printed_configuration_is_that_of_the_words(tmp_path):
    shown = command(tmp_path, "model=tiny_gqa", "train.steps=7", "--cfg", "job")
    assert shown.wait() == 0
    printed = OmegaConf.create(shown.out.read_text())
    assert printed.model.name == "tiny_gqa" and printed.train.steps == 7
    assert {key.split(".")[0] for key in known_keys()} == set(printed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr.txt", "stdout.txt"]


def test_help_has_three_examples_and_keys_that_are_often_set_or_all():
    text, whole = (help_text("graphmoe.train", EXAMPLES, with_all=each) for each in (False, True))
    examples = text.split("Examples:")[1].split("Groups")[0]
    assert examples.count("python -m graphmoe.train") == 3 and "max_nonfinite" not in text
    for part in ("deepseek_v3", "synthetic", "train.steps=300", "optim.lr=0.003", "--config-dir"):
        assert part in text
    assert all(len(line) <= 100 for line in text.splitlines() if "python" not in line)
    lines = " ".join(whole.split())
    assert [key for key in known_keys() if "." in key and f" {key}=" not in lines] == []
    assert "train.max_nonfinite=5 Consecutive skipped non-finite steps" in lines
    sections = filter(dataclasses.is_dataclass, typing.get_type_hints(RunConfig).values())
    docs = [text for section in (RunConfig, *sections) for text in field_docs(section).values()]
    assert all(len(text) > 10 and text.endswith(".") for text in docs)


HELP = {
    "model=deepseek_v3 --help": ["model.num_layers=61 ", " model=deepseek_v3."],
    "petite -h": ["model.num_layers=9 ", "optim.lr=0.01 ", "run.name=petite ", "model=petite."],
    "-m petite optim.lr=1e-3,2e-3 --help": ["optim.lr=0.01 ", "model=petite."],
    "experiment=mini --help": ["train.steps=7 ", "data.paths=[a]", " experiment=mini."],
    "petit --help": ["model.num_layers=4 ", "tiny: 'model=petit' on the", "did you mean model=petite?"],
    "train.stps=3 --help": ["train.steps=300 ", "those of model=tiny: unknown key 'train.stps'"],
    "-cn other --help": ["those of model=tiny: -cn is not read by --help"],
}


def test_help_has_the_options_of_ones_own_and_the_values_of_its_words_or_says_why_not(tmp_path):
    mini = "# @package _global_\ntrain: {steps: 7}\ndata: {paths: [a]}"
    petite = "name: petite\nnum_layers: 9\npeak_lr: 1e-2"
    files = {"model/petite": petite, "experiment/mini": mini, "experiment/of/x": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    for words, said in HELP.items():
        given = [*words.split(), f"--config-dir={tmp_path}"]
        shown = " ".join(help_text("graphmoe.train", EXAMPLES, given).split())
        for part in [*said, " moonlight_16b petite qwen3", " mini moe_1t_768_mi300x", " of/x "]:
            assert part in shown, words


BALANCE = {
    "deepseek_v2": (AuxLoss.sequence, 0.001),
    "deepseek_v3": (AuxLoss.sequence, 0.0001),
    "moonlight": (AuxLoss.sequence, 0.001),
    "kimi": (AuxLoss.sequence, 0.001),
    "glm": (AuxLoss.sequence, 0.0001),
    "ling": (AuxLoss.sequence, 0.001),
    "minimax": (AuxLoss.sequence, 0.001),
    "qwen3": (AuxLoss.global_batch, 0.001),
    "moe": (AuxLoss.sequence, 0.001),
    "gpt_oss_20b": (AuxLoss.micro_batch, 1.67e-4),  # 0.001 of one loss over all layers, * top_k 4 / 24 layers
    "gpt_oss_120b": (AuxLoss.micro_batch, 1.11e-4),
    "gpt_oss_20b_mlperf": (AuxLoss.none, 0.001),
    "llama4": (AuxLoss.micro_batch, 0.001),
    "mixtral_8x7b": (AuxLoss.micro_batch, 0.00125),  # 0.02 of one loss over all layers, * top_k 2 / 32 layers
    "mixtral_8x22b": (AuxLoss.micro_batch, 3.57e-5),  # 0.001 * 2 / 56
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_published_model_of_the_documentation_and_states_only_that(name):
    m, defaults = load_preset(name), asdict(ModelConfig())
    stated = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / f"{name}.yaml"))
    assert stated["name"] == name and not [key for key in stated if asdict(m)[key] == defaults[key]]
    if m.num_experts and not name.startswith("tiny"):
        family = max((prefix for prefix in BALANCE if name.startswith(prefix)), key=len)
        assert (m.aux_loss, m.aux_loss_coef) == BALANCE[family]
    row, *_ = re.findall(rf"^\| `{name}` \|.*", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    sizes = [
        f"{m.num_experts}, {m.top_k}, {m.expert_ffn_size}",
        f"{m.shared_ffn_size or '-'}" + ", gated" * m.shared_gate,
    ]
    sizes = sizes if m.num_experts else ["-", "-"]
    assert cells[1:3] + cells[4:6] == [f"{m.num_layers} ({num_dense(m)})", str(m.hidden_size), *sizes]
    assert cells[7:] == [f"{part['body'] / 1e9:.3f}" for part in count_parameters(m).values()]


def test_models_that_no_hub_has_differ_in_their_experts_only():
    """The table of the documentation has their other sizes; test_hf_configs.py compares those of the hub."""
    first = load_preset("moe_515b")
    assert first == ModelConfig(
        name="moe_515b", num_layers=96, hidden_size=8192, dense_ffn_size=12288, num_heads=64, num_experts=112,
        top_k=8, expert_ffn_size=1920, shared_ffn_size=1920, num_dense_layers=0, vocab_size=100352,
        attention="gqa", head_dim=128, num_kv_heads=8, context_length=4096, aux_loss=AuxLoss.sequence,
        aux_loss_coef=0.001,
    )  # fmt: skip
    for name, experts, top_k in (("1t", 224, 8), ("2t", 448, 16)):
        other = replace(first, name=f"moe_{name}", num_experts=experts, top_k=top_k)
        assert load_preset(f"moe_{name}") == other


def test_a_noun_is_plural_unless_there_is_one():
    plurals = {"file": "files", "entry": "entries", "key": "keys", "batch": "batches", "pass": "passes"}
    for noun, plural in plurals.items():
        said = [f"0 {plural}", f"1 {noun}", f"1,234 {plural}"]
        assert [number_of(count, noun) for count in (0, 1, 1234)] == said
