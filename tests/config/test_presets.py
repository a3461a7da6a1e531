"""The presets in conf/model are the published models."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from graphmoe.config.schema import AuxLoss, ModelConfig
from graphmoe.model.sizes import count_parameters

FOLDER = Path(__file__).parents[2] / "conf" / "model"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))

BALANCE = {
    "deepseek_v2": (AuxLoss.sequence, 0.001),
    "deepseek_v3": (AuxLoss.sequence, 0.0001),
    "moonlight": (AuxLoss.sequence, 0.001),
    "kimi": (AuxLoss.sequence, 0.001),
    "qwen3": (AuxLoss.global_batch, 0.001),
    "mixtral_8x7b": (AuxLoss.micro_batch, 0.02),
    "mixtral_8x22b": (AuxLoss.micro_batch, 0.001),
}


def load_preset(name: str, **overrides: Any) -> ModelConfig:
    """The preset ``name`` over the structured defaults, with some fields changed."""
    merged = OmegaConf.merge(
        OmegaConf.structured(ModelConfig), OmegaConf.load(FOLDER / f"{name}.yaml"), overrides
    )
    model = OmegaConf.to_object(merged)
    assert isinstance(model, ModelConfig)
    return model


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_states_its_name_and_only_what_differs_from_the_defaults(name):
    stated = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
    model, defaults = asdict(load_preset(name)), asdict(ModelConfig())
    assert stated["name"] == name
    assert {key for key in stated if model[key] == defaults[key]} == set()


@pytest.mark.parametrize(("name", "experts", "top_k"), [("515b", 112, 8), ("1t", 224, 8), ("2t", 448, 16)])
def test_models_that_no_hub_has_differ_in_their_experts_only(name, experts, top_k):
    """Compare these alone: tests/parity/test_hf_configs.py compares those of the hub with their files."""
    assert load_preset(f"moe_{name}") == ModelConfig(
        name=f"moe_{name}", num_layers=96, hidden_size=8192, dense_ffn_size=12288, num_heads=64,
        num_experts=experts, top_k=top_k, expert_ffn_size=1920, shared_ffn_size=1920, num_dense_layers=0,
        vocab_size=100352, attention="gqa", head_dim=128, num_kv_heads=8, context_length=4096,
        aux_loss=AuxLoss.sequence, aux_loss_coef=0.001,
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith(("tiny", "moe"))])
def test_balance_loss_is_the_published_one(name):
    m = load_preset(name)
    family = max((prefix for prefix in BALANCE if name.startswith(prefix)), key=len)
    assert (m.aux_loss, m.aux_loss_coef) == BALANCE[family]


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_of_the_documentation_is_true(name):
    page = (FOLDER.parents[1] / "docs" / "models.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    m, counts = load_preset(name), count_parameters(load_preset(name))
    shown = [f"{m.num_layers} ({m.num_dense_layers})", str(m.hidden_size)]
    assert cells[1:3] == shown
    assert cells[4:6] == [f"{m.num_experts}, {m.top_k}, {m.expert_ffn_size}", str(m.shared_ffn_size or "-")]
    assert cells[7:] == [f"{part.body / 1e9:.3f}" for part in (counts.total, counts.active)]
