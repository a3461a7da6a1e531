"""The configuration: every option composes, every rule speaks up, every key is documented."""

from __future__ import annotations

import dataclasses
import math
import typing
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import conf
from graphmoe.config import (
    ComputeDtype,
    ConfigError,
    DeviceChoice,
    ModelConfig,
    RunConfig,
)
from graphmoe.config_errors import known_keys
from graphmoe.config_rules import (
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_IF_SET,
    SHARES,
    check,
    resolve,
    violations,
)
from graphmoe.entry import to_config, to_plain
from graphmoe.field_docs import field_docs
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
    """Composes words as the command line does."""
    ConfigStore.instance().store(name="schema", node=RunConfig)
    with initialize_config_module("conf", version_base="1.3"):
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


def test_the_way_a_user_thinks_composes(composed):
    words = "model=deepseek_v2_lite model.num_layers=4 data=synthetic optim.lr=3e-4 train.steps=20"
    found = composed(*words.split(), "precision=bf16", "data.seed=3", "model.top_k=4")
    assert (found.model.num_layers, found.model.top_k, found.optim.lr, found.data.seed) == (4, 4, 3e-4, 3)
    assert found.precision.compute is ComputeDtype.bf16


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


def test_a_model_without_experts_needs_no_stage():
    words = ("graph.scope=layer", "compile.enabled=true", "model.num_dense_layers=${model.num_layers}")
    assert (
        config(*words).moe.sync_free_stage == config(*words, "moe.sync_free_stage=0").moe.sync_free_stage == 0
    )


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


def changed(**sections: dict) -> RunConfig:
    """The default configuration with other values."""
    found = RunConfig()
    for section, values in sections.items():
        setattr(found, section, dataclasses.replace(getattr(found, section), **values))
    return found


RANGES = [
    *((key, bad, "greater than 0") for key in f"{POSITIVE} {POSITIVE_IF_SET}".split() for bad in (0, -1)),
    *((key, -1, "0 or greater") for key in NOT_NEGATIVE.split()),
    *((key, bad, "at least 0 and below 1") for key in BELOW_ONE.split() for bad in (-0.1, 1.0)),
    *((key, bad, "between 0 and 1") for key in SHARES.split() for bad in (-0.1, 1.1)),
    *(("optim.lr", bad, "greater than 0") for bad in (math.nan, math.inf)),
]


@pytest.mark.parametrize("key, bad, wanted", RANGES, ids=str)
def test_a_value_out_of_its_range_is_named_with_the_range(key, bad, wanted):
    section, name = key.split(".")
    assert f"{key}={bad} must be {wanted}" in violations(changed(**{section: {name: bad}}))


def test_every_number_of_the_schema_has_a_range_or_a_rule():
    ranged = set(f"{POSITIVE} {POSITIVE_IF_SET} {NOT_NEGATIVE} {BELOW_ONE} {SHARES}".split())
    ruled = {"model.num_kv_heads", "model.yarn_factor", "model.yarn_beta_fast"}
    ruled |= {"data.bpe_vocab_size", "log.peak_tflops"}
    free = {"data.seed", "train.seed"}
    numbers = set()
    for name, kind in typing.get_type_hints(RunConfig).items():
        if dataclasses.is_dataclass(kind):
            for key, hint in typing.get_type_hints(kind).items():
                if hint in (int, float, int | None, float | None):
                    numbers.add(f"{name}.{key}")
    assert numbers == ranged | ruled | free


RULES = [
    ("model.num_dense_layers=5", "exceeds model.num_layers=4; use 0 to 4"),
    ("model.attention=gqa model.num_kv_heads=3", "does not divide model.num_heads=4; use one of [1, 2, 4]"),
    ("model.attention=gqa model.num_kv_heads=0", "model.num_kv_heads=0 does not divide"),
    ("model.attention=gqa model.head_dim=7", "model.head_dim=7 must be even"),
    ("model.qk_rope_head_dim=5", "model.qk_rope_head_dim=5 must be even"),
    ("model.qk_norm=true", "model.qk_norm=true applies to model.attention=gqa only; use qk_norm=false"),
    ("model.rope_scaling=yarn model.yarn_factor=0.5", "model.yarn_factor=0.5 must be 1 or greater"),
    ("model.rope_scaling=yarn model.yarn_factor=.nan", "model.yarn_factor=nan must be 1 or greater"),
    ("model.rope_scaling=yarn model.yarn_beta_fast=0.5", "model.yarn_beta_slow=1.0; swap them"),
    ("model.top_k=9", "model.top_k=9 exceeds model.num_experts=8; use 1 to 8"),
    (
        "model.softmax_after_topk=true model.score_function=sigmoid",
        "model.softmax_after_topk=true needs model.score_function=softmax, not sigmoid",
    ),
    ("model.softmax_after_topk=true model.renormalise=true", "has no effect with"),
    ("model.num_groups=3", "does not divide model.num_experts=8; use one of [1, 2, 4, 8]"),
    ("model.num_groups=2 model.topk_groups=3", "exceeds model.num_groups=2; use 1 to 2"),
    ("model.num_groups=8 model.topk_groups=1", "leaves 1 experts for model.top_k=2; use topk_groups=2"),
    ("data.bpe_vocab_size=5000", "data.bpe_vocab_size=5000 must be from 300 to model.vocab_size=4096"),
    ("model.attention_backend=te", "use auto or sdpa, or compile.enabled=false"),
    ("data.bpe_vocab_size=299", "data.bpe_vocab_size=299 must be from 300"),
    ("data.source=files data.tokenizer=t", "data.source=files needs data.paths, e.g. 'data.paths=["),
    ("data.source=memmap", "data.source=memmap needs data.paths"),
    ("data.source=files data.paths=[a]", "data.source=files needs data.tokenizer"),
    ("data.source=hf data.tokenizer=t", "data.source=hf needs data.hf_name"),
    ("data.seq_len=5000", "data.seq_len=5000 exceeds model.context_length=4096; use at most 4096"),
    ("data.seq_len=0", "data.seq_len=0 must be greater than 0"),
    ("data.seq_len=2 model.mtp_depth=2", "leaves no label for model.mtp_depth=2; use at least 3"),
    ("log.peak_tflops=0", "log.peak_tflops=0.0 must be greater than 0; null looks it up"),
    ("optim.wsd_decay_fraction=0", "never decays; use a share above 0, or optim.schedule=constant"),
    ("run.name=a/b", "run.name='a/b' names a folder: use a name without slashes"),
    ("run.name=..", "run.name='..' names a folder"),
    ("run.name=''", "run.name='' names a folder"),
    (
        "train.global_batch_size=10 train.micro_batch_size=4",
        "is not a multiple of train.micro_batch_size=4; use e.g. micro_batch_size=2 or global_batch_size=12",
    ),
    ("checkpoint.init_from=a checkpoint.resume_from=b", "use one of the two"),
    (
        "recompute.all=true recompute.segments=[attn] recompute.layer_ids=[1]",
        "leave out recompute.segments=['attn'] and recompute.layer_ids=[1], or use recompute.all=false",
    ),
    (
        "recompute.segments=[attn,loss,embed]",
        "recompute.segments=['attn', 'loss', 'embed'] has loss, embed; use attn, mlp, moe_router, moe_pre",
    ),
    ("recompute.segments=[attn,mlp,attn]", "names attn twice; name each once"),
    (
        "recompute.ops=[moe_act,norm]",
        "has norm; use layernorm, core_attn, mla_up_proj, moe_act, mlp, shared_experts",
    ),
    (
        "recompute.ops=[layernorm] compile.enabled=false",
        "and compile.enabled=false; use compile.enabled=true, or recompute.segments",
    ),
    ("recompute.layer_ids=[-1,2]", "recompute.layer_ids=[-1, 2] has -1; use 0 to 3"),
    ("recompute.layer_ids=[4,5] model.mtp_depth=1", "has 5; use 0 to 4"),
    ("recompute.layer_ids=[1,1]", "recompute.layer_ids=[1, 1] names 1 twice"),
    ("recompute.segments=[moe_router] recompute.layer_ids=[9]", "has 9; use 0 to 3"),
    (
        "recompute.segments=[attn,moe_experts] recompute.layer_ids=[0]",
        "names moe_experts, which no layer of recompute.layer_ids=[0] has; leave it out, or name some of the "
        "layers 1 to 3",
    ),
    ("recompute.segments=[shared_experts] model.shared_ffn_size=0", "shared_experts, which the model has"),
    ("recompute.ops=[mla_up_proj] model.attention=gqa", "recompute.ops names mla_up_proj, which the model"),
    ("recompute.ops=[mlp] model.num_dense_layers=0", "names mlp, which the model has not; leave it out"),
    ("recompute.segments=[moe_router] model.num_dense_layers=4", "names moe_router, which the model has not"),
    ("graph.scope=attn", "graph.scope=attn is one segment; name it in a list: 'graph.scope=[attn]'"),
    ("graph.scope=[attn,attn]", "names a segment twice; name each once"),
    (
        "graph.scope=full_iteration moe.sync_free_stage=2 compile.enabled=false",
        "use moe.sync_free_stage=3 or auto, or graph.scope=none",
    ),
    ("moe.sync_free_stage=4", "moe.sync_free_stage=4 must be auto, 0, 1, 2 or 3"),
    ("moe.sync_free_stage=most", "moe.sync_free_stage='most' must be auto, 0, 1, 2 or 3"),
    ('moe.sync_free_stage="1"', "moe.sync_free_stage='1' must be auto, 0, 1, 2 or 3"),
    ("moe.sync_free_stage=true", "moe.sync_free_stage=True must be auto, 0, 1, 2 or 3"),
    ("moe.sync_free_stage=1.0", "moe.sync_free_stage=1.0 must be auto, 0, 1, 2 or 3"),
    ("moe.sync_free_stage=[1]", "moe.sync_free_stage=[1] must be auto, 0, 1, 2 or 3"),
    (
        "moe.sync_free_stage=0 graph.scope=partial",
        "graph.scope=partial captures moe_router, moe_preprocess, which may wait for the host at "
        "moe.sync_free_stage=0; use moe.sync_free_stage=1 or auto, or graph.scope=[attn]",
    ),
    (
        "moe.sync_free_stage=2 graph.scope=moe",
        "captures moe_dispatch, moe_experts, moe_combine, which may wait for the host at "
        "moe.sync_free_stage=2; use moe.sync_free_stage=3 or auto, or graph.scope=[moe_router,",
    ),
    (
        "moe.sync_free_stage=2 graph.scope=[moe_experts]",
        "use moe.sync_free_stage=3 or auto, or graph.scope=none",
    ),
    (
        "moe.sync_free_stage=1 graph.scope=full_iteration",
        "or graph.scope=[embed,attn,mlp,moe_router,moe_preprocess,shared_experts,loss]",
    ),
    ("moe.sync_free_stage=1 graph.scope=all", "graph.scope=all has all; use one of"),
]


@pytest.mark.parametrize("words, message", RULES, ids=[words for words, _ in RULES])
def test_a_broken_rule_is_the_one_violation_and_says_what_would_do(words, message):
    merged = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.from_dotlist(words.split()))
    found = violations(OmegaConf.to_object(merged))
    assert len(found) == 1 and message in found[0]


def test_all_violations_are_reported_together():
    broken = changed(
        model={"num_experts": 0, "num_heads": 0, "attention": "gqa", "num_kv_heads": 0},
        train={"steps": 0, "micro_batch_size": 3},
        optim={"lr": -1.0},
        data={"seq_len": -4},
    )
    with pytest.raises(ConfigError) as error:
        check(broken)
    lines = str(error.value).splitlines()
    assert lines[0] == "the configuration cannot run:" and all(line.startswith("  ") for line in lines[1:])
    wanted = "model.num_experts=0 model.num_heads=0 train.steps=0 optim.lr=-1.0 data.seq_len=-4"
    for key in wanted.split():
        assert any(key in line for line in lines), key
    assert any("train.global_batch_size=16" in line for line in lines)


def test_the_default_configuration_breaks_no_rule():
    assert violations(RunConfig()) == []


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


def test_info_makes_no_folder(tmp_path):
    shown = command(tmp_path, "model=tiny", "format=json", module="graphmoe.info")
    assert shown.wait() == 0, shown.err.read_text()
    assert shown.out.read_text().startswith("{")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr.txt", "stdout.txt"]
