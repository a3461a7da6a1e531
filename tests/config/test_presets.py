"""The presets in conf/model are the published models."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from graphmoe.config.schema import AttentionKind, AuxLoss, GroupScore, ModelConfig, RopeScaling, ScoreFunction
from graphmoe.model.sizes import count_parameters

FOLDER = Path(__file__).parents[2] / "conf" / "model"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))

# Billions of parameters without embeddings, head, norms and multi-token prediction: total, active.
BILLIONS = {
    "deepseek_v2_lite": ("15.287", "2.242"),
    "deepseek_v2": ("234.692", "20.326"),
    "deepseek_v3": ("669.172", "35.698"),
    "moonlight_16b": ("15.289", "2.244"),
    "kimi_k2": ("1024.058", "30.512"),
    "moe_515b": ("526.456", "55.352"),
    "moe_1t": ("1033.888", "55.440"),
    "moe_2t": ("2048.750", "91.855"),
    "qwen3_30b_a3b": ("29.910", "2.730"),
    "qwen3_235b_a22b": ("233.848", "20.945"),
    "mixtral_8x7b": ("46.440", "12.618"),
    "mixtral_8x22b": ("140.227", "38.758"),
}
# layers, hidden, dense ffn, heads, experts, top-k, expert ffn, shared ffn, dense layers, vocabulary
SHAPES = {
    "deepseek_v2_lite": (27, 2048, 10944, 16, 64, 6, 1408, 2816, 1, 102400),
    "deepseek_v2": (60, 5120, 12288, 128, 160, 6, 1536, 3072, 1, 102400),
    "deepseek_v3": (61, 7168, 18432, 128, 256, 8, 2048, 2048, 3, 129280),
    "moonlight_16b": (27, 2048, 11264, 16, 64, 6, 1408, 2816, 1, 163840),
    "kimi_k2": (61, 7168, 18432, 64, 384, 8, 2048, 2048, 1, 163840),
    "moe_515b": (96, 8192, 12288, 64, 112, 8, 1920, 1920, 0, 100352),
    "moe_1t": (96, 8192, 12288, 64, 224, 8, 1920, 1920, 0, 100352),
    "moe_2t": (96, 8192, 12288, 64, 448, 16, 1920, 1920, 0, 100352),
    "qwen3_30b_a3b": (48, 2048, 6144, 32, 128, 8, 768, 0, 0, 151936),
    "qwen3_235b_a22b": (94, 4096, 12288, 64, 128, 8, 1536, 0, 0, 151936),
    "mixtral_8x7b": (32, 4096, 14336, 32, 8, 2, 14336, 0, 0, 32000),
    "mixtral_8x22b": (56, 6144, 16384, 48, 8, 2, 16384, 0, 0, 32768),
}
# score function, softmax after top-k, renormalise, scale, groups, groups chosen, selection bias, MTP depth
SOFTMAX, SIGMOID = ScoreFunction.softmax, ScoreFunction.sigmoid
ROUTERS = {
    "deepseek_v2_lite": (SOFTMAX, False, False, 1.0, 1, 1, False, 0),
    "deepseek_v2": (SOFTMAX, False, False, 16.0, 8, 3, False, 0),
    "deepseek_v3": (SIGMOID, False, True, 2.5, 8, 4, True, 1),
    "moonlight_16b": (SIGMOID, False, True, 2.446, 1, 1, True, 0),
    "kimi_k2": (SIGMOID, False, True, 2.827, 1, 1, True, 0),
    "moe_515b": (SOFTMAX, False, False, 1.0, 1, 1, False, 0),
    "moe_1t": (SOFTMAX, False, False, 1.0, 1, 1, False, 0),
    "moe_2t": (SOFTMAX, False, False, 1.0, 1, 1, False, 0),
    "qwen3_30b_a3b": (SOFTMAX, False, True, 1.0, 1, 1, False, 0),
    "qwen3_235b_a22b": (SOFTMAX, False, True, 1.0, 1, 1, False, 0),
    "mixtral_8x7b": (SOFTMAX, True, False, 1.0, 1, 1, False, 0),
    "mixtral_8x22b": (SOFTMAX, True, False, 1.0, 1, 1, False, 0),
}
# rotary base, norm epsilon, longest context
LIMITS = {
    "deepseek_v2_lite": (1e4, 1e-6, 163840),
    "deepseek_v2": (1e4, 1e-6, 163840),
    "deepseek_v3": (1e4, 1e-6, 163840),
    "moonlight_16b": (5e4, 1e-5, 8192),
    "kimi_k2": (5e4, 1e-6, 131072),
    "moe_515b": (1e4, 1e-6, 4096),
    "moe_1t": (1e4, 1e-6, 4096),
    "moe_2t": (1e4, 1e-6, 4096),
    "qwen3_30b_a3b": (1e6, 1e-6, 40960),
    "qwen3_235b_a22b": (1e6, 1e-6, 40960),
    "mixtral_8x7b": (1e6, 1e-5, 32768),
    "mixtral_8x22b": (1e6, 1e-5, 65536),
}
# factor, original context, beta fast, beta slow, mscale, mscale of the softmax scale
YARN = {
    "deepseek_v2_lite": (40.0, 4096, 32.0, 1.0, 0.707, 0.707),
    "deepseek_v2": (40.0, 4096, 32.0, 1.0, 0.707, 0.707),
    "deepseek_v3": (40.0, 4096, 32.0, 1.0, 1.0, 1.0),
    "kimi_k2": (32.0, 4096, 1.0, 1.0, 1.0, 1.0),
}
GQA = {"moe": 8, "qwen3": 4, "mixtral": 8}
BALANCE = {
    "deepseek_v2": (AuxLoss.sequence, 0.001),
    "deepseek_v3": (AuxLoss.sequence, 0.0001),
    "moonlight": (AuxLoss.sequence, 0.001),
    "kimi": (AuxLoss.sequence, 0.001),
    "moe": (AuxLoss.sequence, 0.001),
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


def test_every_published_model_has_a_preset_beside_the_two_tiny_ones():
    assert set(PRESETS) == set(BILLIONS) | {"tiny", "tiny_gqa"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_states_its_name_and_only_what_differs_from_the_defaults(name):
    stated = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
    model, defaults = asdict(load_preset(name)), asdict(ModelConfig())
    assert stated["name"] == name
    assert {key for key in stated if model[key] == defaults[key]} == set()


@pytest.mark.parametrize("name", BILLIONS)
def test_counts_agree_with_the_table_to_all_its_digits(name):
    counts = count_parameters(load_preset(name))
    assert (f"{counts.total.body / 1e9:.3f}", f"{counts.active.body / 1e9:.3f}") == BILLIONS[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_shape_agrees_with_the_table(name):
    m = load_preset(name)
    shape = (m.num_layers, m.hidden_size, m.dense_ffn_size, m.num_heads, m.num_experts, m.top_k)
    shape += (m.expert_ffn_size, m.shared_ffn_size, m.num_dense_layers, m.vocab_size)
    assert shape == SHAPES[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_attention_agrees_with_the_table(name):
    m = load_preset(name)
    family = name.split("_")[0]
    if family in GQA:
        assert (m.attention, m.head_dim, m.num_kv_heads) == (AttentionKind.gqa, 128, GQA[family])
        assert m.qk_norm == (family == "qwen3")
        return
    assert (m.attention, m.kv_lora_rank) == (AttentionKind.mla, 512)
    assert (m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim) == (128, 64, 128)
    assert m.q_lora_rank == (1536 if name in ("deepseek_v2", "deepseek_v3", "kimi_k2") else 0)


@pytest.mark.parametrize("name", BILLIONS)
def test_router_agrees_with_the_table(name):
    m = load_preset(name)
    router = (m.score_function, m.softmax_after_topk, m.renormalise, m.routed_scale)
    router += (m.num_groups, m.topk_groups, m.selection_bias, m.mtp_depth)
    assert router == ROUTERS[name]
    assert m.group_score is (GroupScore.topk_sum if name == "deepseek_v3" else GroupScore.max)


@pytest.mark.parametrize("name", BILLIONS)
def test_rotary_embedding_and_limits_agree_with_the_published_configuration(name):
    m = load_preset(name)
    assert (m.rope_theta, m.norm_eps, m.context_length) == LIMITS[name]
    if name in YARN:
        yarn = (m.yarn_factor, m.yarn_original_context, m.yarn_beta_fast, m.yarn_beta_slow)
        assert (*yarn, m.yarn_mscale, m.yarn_mscale_all_dim) == YARN[name]
    assert m.rope_scaling is (RopeScaling.yarn if name in YARN else RopeScaling.none)


@pytest.mark.parametrize("name", BILLIONS)
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
