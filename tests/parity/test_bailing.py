"""Ling 2.0 (bailing_moe_v2), which transformers lacks: beside the published formulas, written down here.

Names and formulas are those of ``modeling_bailing_moe_v2.py`` in the hub's Ling-mini-2.0.
"""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from graphmoe import load_hf, save_hf
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.hf.differences import same_function
from graphmoe.checkpoint.hf.families import to_hf_config, to_model_config
from graphmoe.checkpoint.hf.folder import open_hf
from graphmoe.config.schema import AuxLoss, ConfigError
from graphmoe.convert import ConvertArgs, Quantise, convert
from graphmoe.model.build import build_model
from graphmoe.model.sizes import count_parameters
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.layout import REPLICATED, Cut, Layout, ParameterLayout, own_part
from tests.parity.hf_models import assert_same_bits, tensors_in
from tests.runs import ROOT
from tests.tolerances import relative_error

LING = {
    "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2", "attention_dropout": 0.0,
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5120, "max_position_embeddings": 32768, "n_group": 8,
    "moe_intermediate_size": 512, "moe_router_enable_expert_bias": True, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 20,
    "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 600000,
    "rotary_dim": 64, "routed_scaling_factor": 2.5, "score_function": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True,
    "vocab_size": 157184,
}  # fmt: skip
FLASH = {
    "hidden_size": 4096, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_attention_heads": 32,
    "num_hidden_layers": 32,
}  # fmt: skip
V = 43
SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rotary_dim", "num_experts")
SIZES += ("num_experts_per_tok", "n_group", "topk_group", "moe_intermediate_size", "num_shared_experts")
TINY = {"intermediate_size": 21, "num_hidden_layers": 3, "vocab_size": V, "rope_theta": 500.0}
CASES = {
    "groups": ((33, 6, 2, 12, 6, 12, 4, 4, 2, 7, 1), {}),
    "odd": ((26, 5, 1, 10, 4, 15, 3, 3, 2, 9, 2), {"use_qk_norm": False}),
    "one_group": ((19, 3, 3, 8, 8, 7, 2, 1, 1, 5, 1), {"tie_word_embeddings": True}),
    "one_expert": ((22, 4, 2, 8, 2, 6, 1, 2, 1, 8, 1), {}),
}


def raw_of(name):
    sizes, more = CASES[name]
    raw = LING | TINY | dict(zip(SIZES, sizes, strict=True)) | more
    return raw | {"partial_rotary_factor": raw["rotary_dim"] / raw["head_dim"]}


def weights_of(raw):
    """Random weights by published name."""
    d, size, vocab = raw["hidden_size"], raw["head_dim"], raw["vocab_size"]
    heads, groups = raw["num_attention_heads"], raw["num_key_value_heads"]
    shapes = {"model.word_embeddings": (vocab, d), "model.norm": (d,)}
    if not raw["tie_word_embeddings"]:
        shapes["lm_head"] = (vocab, d)
    for i in range(raw["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.input_layernorm": (d,), f"{layer}.post_attention_layernorm": (d,)}
        shapes[f"{layer}.attention.query_key_value"] = ((heads + 2 * groups) * size, d)
        shapes[f"{layer}.attention.dense"] = (d, heads * size)
        if raw["use_qk_norm"]:
            shapes |= {f"{layer}.attention.{which}_layernorm": (size,) for which in ("query", "key")}
        mlps = {f"{layer}.mlp": raw["intermediate_size"]}
        if i >= raw["first_k_dense_replace"]:
            width = raw["moe_intermediate_size"]
            mlps = {f"{layer}.mlp.experts.{e}": width for e in range(raw["num_experts"])}
            mlps[f"{layer}.mlp.shared_experts"] = width * raw["num_shared_experts"]
            shapes[f"{layer}.mlp.gate"] = (raw["num_experts"], d)
        for mlp, width in mlps.items():
            shapes |= {f"{mlp}.gate_proj": (width, d), f"{mlp}.up_proj": (width, d)}
            shapes[f"{mlp}.down_proj"] = (d, width)
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[f"{name}.weight"] = 1 + 0.3 * noise if len(shape) == 1 else 0.25 * noise
    biases = [name.replace(".weight", ".expert_bias") for name in found if name.endswith("mlp.gate.weight")]
    return found | {name: 0.2 * torch.rand(raw["num_experts"], generator=generator) for name in biases}


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x, raw):
    """The first ``rotary_dim`` elements of each head [B, S, H, size], in halves."""
    width = raw["rotary_dim"]
    frequencies = raw["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(x.shape[1])[:, None, None] * frequencies
    a, b, rest = x.split([width // 2, width // 2, x.shape[-1] - width], dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], dim=-1)


def attended(h, w, raw):
    """Causal attention; ``w(name)`` is a weight of the layer's attention."""
    heads, groups, size = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    q, k, v = (h @ w("query_key_value").T).unflatten(-1, (-1, size)).split([heads, groups, groups], dim=2)
    if raw["use_qk_norm"]:
        eps = raw["rms_norm_eps"]
        q, k = rms_norm(q, w("query_layernorm"), eps), rms_norm(k, w("key_layernorm"), eps)
    q, k = rotated(q, raw), rotated(k, raw).repeat_interleave(heads // groups, dim=2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * size**-0.5
    scores = scores.masked_fill(torch.ones(h.shape[1], h.shape[1]).triu(1).bool(), -torch.inf)
    out = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v.repeat_interleave(heads // groups, dim=2))
    return out.flatten(2) @ w("dense").T


def swiglu(h, w, name):
    gate, up = h @ w[f"{name}.gate_proj.weight"].T, h @ w[f"{name}.up_proj.weight"].T
    return (F.silu(gate) * up) @ w[f"{name}.down_proj.weight"].T


def moe(h, w, name, raw):
    scores = (h @ w[f"{name}.gate.weight"].T).sigmoid()
    choice = (scores + w[f"{name}.gate.expert_bias"]).unflatten(-1, (raw["n_group"], -1))
    best = choice.topk(2, dim=-1).values.sum(-1).topk(raw["topk_group"], dim=-1).indices
    is_open = torch.zeros(choice.shape[:-1]).scatter(-1, best, 1.0)
    choice = choice.masked_fill(is_open[..., None] == 0, -torch.inf).flatten(-2)
    experts = choice.topk(raw["num_experts_per_tok"], dim=-1).indices
    weights = scores.gather(-1, experts)
    if raw["num_experts_per_tok"] > 1:  # whatever norm_topk_prob is
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = torch.zeros_like(scores).scatter(-1, experts, raw["routed_scaling_factor"] * weights)
    outputs = [swiglu(h, w, f"{name}.experts.{e}") for e in range(raw["num_experts"])]
    routed = (torch.stack(outputs, dim=-1) * weights[..., None, :]).sum(-1)
    return routed + swiglu(h, w, f"{name}.shared_experts")


def logits_of(tokens, w, raw):
    x, eps = w["model.word_embeddings.weight"][tokens], raw["rms_norm_eps"]
    for i in range(raw["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = rms_norm(x, w[f"{layer}.input_layernorm.weight"], eps)
        x = x + attended(h, lambda name, layer=layer: w[f"{layer}.attention.{name}.weight"], raw)
        h = rms_norm(x, w[f"{layer}.post_attention_layernorm.weight"], eps)
        is_dense = i < raw["first_k_dense_replace"]
        x = x + (swiglu(h, w, f"{layer}.mlp") if is_dense else moe(h, w, f"{layer}.mlp", raw))
    x = rms_norm(x, w["model.norm.weight"], eps)
    return x @ w["model.word_embeddings.weight" if raw["tie_word_embeddings"] else "lm_head.weight"].T


def folder_of(path, raw, weights):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in weights.items()}, path / "model.safetensors"
    )
    return path


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_every_bit_are_those_of_the_published_code(name, tmp_path):
    raw = raw_of(name)
    weights = {key: tensor.requires_grad_() for key, tensor in weights_of(raw).items()}
    config, ours = load_hf(folder_of(tmp_path / "hf", raw, weights))
    tokens = torch.randint(V, (2, 20), generator=torch.Generator().manual_seed(1))
    expected = logits_of(tokens[:, :-1], weights, raw)
    assert relative_error(ours(tokens[:, :-1]), expected) <= 1e-4
    F.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    ours.loss(tokens[:, :-1], tokens[:, 1:]).total.backward()
    gradients = {key: torch.zeros_like(t) if t.grad is None else t.grad for key, t in weights.items()}
    _, wanted = load_hf(folder_of(tmp_path / "gradients", raw, gradients))
    scale = max(gradient.norm() for gradient in gradients.values())
    for key, parameter in wanted.named_parameters():
        difference = (ours.get_parameter(key).grad - parameter).norm()
        assert difference / parameter.norm().clamp(min=1e-5 * scale) <= 1e-4, key
    save_hf(ours, config, tmp_path / "again")
    assert_same_bits(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "hf"))
    again, _ = load_hf(tmp_path / "again")
    assert again == dataclasses.replace(config, name="again") and config.aux_loss is AuxLoss.none


def test_a_prediction_layer_has_published_names_and_no_copies(tmp_path):
    raw = raw_of("groups")
    folder_of(tmp_path / "hf", raw, weights_of(raw))
    config = dataclasses.replace(load_hf(tmp_path / "hf")[0], mtp_depth=1)
    model = build_model(config, seed=1)
    save_hf(model, config, tmp_path / "mtp")
    assert_same_bits(load_hf(tmp_path / "mtp")[1].state_dict(), model.state_dict())
    own = {
        name.removeprefix("model.layers.3.") for name in tensors_in(tmp_path / "mtp") if ".3." in name[:15]
    }
    of_layer = {name.removeprefix("model.layers.2.") for name in weights_of(raw) if ".2." in name[:15]}
    assert own - of_layer == {f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")}


def test_a_missing_or_misshaped_fused_tensor_is_named_once(tmp_path):
    raw = raw_of("groups")
    weights = weights_of(raw)
    del weights["model.layers.0.attention.query_key_value.weight"]
    weights["model.layers.1.attention.query_key_value.weight"] = torch.zeros(119, 33)
    with pytest.raises(ConfigError) as caught:
        load_hf(folder_of(tmp_path / "hf", raw, weights))
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "missing: model.layers.0.attention.query_key_value.weight [120, 33]",
        "mis-shaped: model.layers.1.attention.query_key_value.weight is [119, 33], not [120, 33]",
    ]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=3)], ids=["tp", "dp"])
def test_shards_of_ranks_are_read_from_fused_tensors(tmp_path, layout):
    raw, name = raw_of("groups"), "layers.1.attn.k_proj.weight"
    source = open_hf(folder_of(tmp_path / "hf", raw, weights_of(raw)))
    whole = load_hf(tmp_path / "hf")[1].get_parameter(name)
    parallel = ParameterLayout((Cut(0, "tp"),), "dp_cp") if layout.tp > 1 else REPLICATED
    for rank in range(layout.size("world")):
        own = own_part(whole.detach(), parallel, layout, rank)
        wanted = own.flatten()[own.numel() // layout.dp * layout.index("dp", rank) :][:111]
        start = own.numel() // layout.dp * layout.index("dp", rank)
        shard = FlatShard(torch.empty_like(wanted), start, own.shape, parallel, layout, rank)
        source.fill({name: shard})
        assert torch.equal(shard.data, wanted) and wanted.numel() == 111


def test_fused_matrices_in_fp8_are_read_again(tmp_path):
    raw = raw_of("groups")
    folder_of(tmp_path / "hf", raw, weights_of(raw))
    convert(ConvertArgs(tmp_path / "hf", tmp_path / "own"))
    convert(ConvertArgs(tmp_path / "own", tmp_path / "fp8", quantise=Quantise.fp8_block))
    scales = [name for name in tensors_in(tmp_path / "fp8") if name.endswith("_scale_inv")]
    assert sum("query_key_value" in name for name in scales) == 3 == sum(".dense." in name for name in scales)
    exact, found = (load_hf(tmp_path / name)[1].state_dict() for name in ("hf", "fp8"))
    for name, tensor in exact.items():
        assert relative_error(found[name], tensor) < 0.04


PUBLISHED = {"ling_mini_2": LING, "ling_flash_2": LING | FLASH}
ACTIVE = {
    "ling_mini_2": (16.3, 0.789),
    "ling_flash_2": (103, 4.8),
    "glm_4_5_air": (106, 12),
    "minimax_m2": (230, 10),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset_both_ways(name):
    assert same_function(to_model_config(PUBLISHED[name], "config.json", name)[1], load_preset(name)) == []
    family, raw = to_hf_config(load_preset(name))
    assert family.name == "bailing_moe_v2"
    assert {key: raw.get(key) for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_billions_of_parameters_are_the_published_ones(name):
    """All, and those that a token uses without embedding and head, both without multi-token prediction."""
    counts = count_parameters(dataclasses.replace(load_preset(name), mtp_depth=0))
    found = counts["total"]["full"] / 1e9, counts["active"]["body"] / 1e9
    assert found == pytest.approx(ACTIVE[name], rel=0.02)


def test_glm_4_5_has_its_published_parameters():
    air = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())["glm_4_5_air"]
    large = {
        "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92, "n_routed_experts": 160,
        "moe_intermediate_size": 1536, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    }  # fmt: skip
    _, config = to_model_config(air | large, "config.json", "glm_4_5")
    counts = count_parameters(dataclasses.replace(config, mtp_depth=0))
    assert (counts["total"]["full"] / 1e9, counts["active"]["body"] / 1e9) == pytest.approx(
        (355, 32), rel=0.02
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_qkv_bias": True, "use_bias": True}, ["use_qkv_bias=true", "use_bias=true"]),
        ({"score_function": "softmax"}, ["score_function"]),
        ({"moe_router_enable_expert_bias": False}, ["moe_router_enable_expert_bias=false"]),
        ({"moe_shared_expert_intermediate_size": 64}, ["moe_shared_expert_intermediate_size=64"]),
        ({"norm_topk_prob": False}, ["norm_topk_prob=false"]),
        ({"rotary_dim": 32}, ["rotary_dim=32"]), ({"n_group": None}, ["n_group"]),
        ({"architectures": ["BailingMoeForCausalLM"]}, ["BailingMoeForCausalLM"]),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_named(change, named):
    with pytest.raises(ConfigError) as caught:
        to_model_config(LING | change, "config.json", "test")
    assert [part for part in named if part not in str(caught.value)] == []
