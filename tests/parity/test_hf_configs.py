"""config.json to ModelConfig and back: published models, both rope styles, and every refusal."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from graphmoe.checkpoint.hf.differences import same_function
from graphmoe.checkpoint.hf.families import to_hf_config, to_model_config
from graphmoe.config.schema import AttentionBias, AuxLoss, ConfigError, GroupScore, RopeScaling
from graphmoe.ops import router
from graphmoe.pipeline_view.plans import load_preset
from tests.runs import PRESETS
from tests.tolerances import assert_forward_close

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())
"""config.json of the published models, the keys that describe the model, in the hub's style."""
ABSENT = object()
NOT_PUBLISHED = {"moe_": "shared_ffn_size", "gpt_oss_20b_mlperf": "window=129, not 0"}
"""First letters of presets that no family can express, and a key that says why."""


def read(raw):
    return to_model_config(raw, "config.json", "test")[1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset_and_transformers_takes_its_export(name):
    assert same_function(read(PUBLISHED[name]), load_preset(name)) == []
    family, exported = to_hf_config(load_preset(name))
    kind = type(transformers.AutoConfig.for_model(family.name))
    ours, theirs = kind.from_dict(exported), kind.from_dict(PUBLISHED[name] | {"model_type": family.name})
    for key in ("num_nextn_predict_layers", "num_experts_per_tok", "num_local_experts", "hidden_size"):
        assert getattr(ours, key, None) == getattr(theirs, key, None)
    one, other = (
        {key: float(value) for key, value in config.rope_parameters.items() if not isinstance(value, str)}
        for config in (ours, theirs)
    )
    assert one == other
    assert family.name == kind.model_type


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_exported_whole_or_refused_with_its_keys(name):
    config = load_preset(name)
    if key := next((key for start, key in NOT_PUBLISHED.items() if name.startswith(start)), None):
        with pytest.raises(ConfigError, match=key):
            to_hf_config(config)
        return
    _, raw = to_hf_config(config)
    assert same_function(read(raw), config) == []


def test_old_and_new_rope_keys_mean_the_same():
    old = PUBLISHED["deepseek_v3"]
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    scaling = {key: value for key, value in old["rope_scaling"].items() if key != "type"}
    new["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": 10000.0}
    assert read(new) == read(old) and read(new).rope_scaling is RopeScaling.yarn
    plain = PUBLISHED["mixtral_8x7b"]
    new = {key: value for key, value in plain.items() if key != "rope_theta"}
    assert read(new | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}) == read(plain)
    new = {k: value for k, value in PUBLISHED["llama3_8b"].items() if not k.startswith("rope_")}
    found = read(new | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert found == read(PUBLISHED["llama3_8b"]) and found.rope_scaling is RopeScaling.llama3
    assert read(plain | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0}})


def test_the_balance_loss_is_the_one_that_the_published_code_adds():
    lite = read(PUBLISHED["deepseek_v2_lite"])
    assert (lite.aux_loss, lite.aux_loss_coef) == (AuxLoss.sequence, 0.001)
    assert read(PUBLISHED["deepseek_v2_lite"] | {"seq_aux": False}).aux_loss is AuxLoss.micro_batch
    assert read(PUBLISHED["mixtral_8x7b"] | {"router_aux_loss_coef": 0.02}).aux_loss is AuxLoss.none


@pytest.mark.parametrize("name", ["mixtral_8x7b", "qwen3_30b_a3b"])
def test_layers_of_the_same_loads_have_the_loss_of_transformers(name):
    raw = PUBLISHED[name] | {"router_aux_loss_coef": 0.02, "output_router_logits": True}
    config = read(raw)
    assert config.aux_loss is AuxLoss.micro_batch
    logits = torch.randn(64, config.num_experts, generator=torch.Generator().manual_seed(0))
    joined = load_balancing_loss_func((logits,) * config.num_layers, config.num_experts, config.top_k)
    scores = router.scores_of(logits, config.score_function)
    counts = router.count_per_sequence(router.select_experts(config, scores), 1, config.num_experts)
    of_layer = router.balance_loss(*router.balance_terms(config, scores, counts, None))
    assert_forward_close(config.num_layers * config.aux_loss_coef * of_layer, 0.02 * joined.double())
    assert to_hf_config(config)[1]["router_aux_loss_coef"] == 0.02


REFUSED = {
    "deepseek_v2": {
        "topk_method": "noaux_tc", "norm_topk_prob": True, "moe_layer_freq": 2, "scoring_func": "sigmoid",
        "mlp_bias": True, "num_key_value_heads": 64,
    },
    "deepseek_v3": {
        "attention_bias": True, "hidden_act": "gelu", "attention_dropout": 0.1, "rope_interleave": False,
        "topk_method": "greedy", "scoring_func": "softmax",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]},
    },
    "llama3_8b": {
        "mlp_bias": True, "attention_bias": True, "hidden_act": "gelu", "partial_rotary_factor": 0.5,
    },
    "qwen3_8b": {"attention_bias": True, "attention_dropout": 0.1},
    "qwen3_30b_a3b": {"mlp_only_layers": [0], "decoder_sparse_step": 2, "attention_bias": True},
    "glm_4_5_air": {"hidden_act": "gelu", "attention_dropout": 0.1},
    "minimax_m2": {
        "scoring_func": "softmax", "use_routing_bias": False, "router_jitter_noise": 0.1,
        "shared_intermediate_size": 8, "attn_type_list": [1] * 61 + [0], "attention_bias": True,
        "output_router_logits": True, "use_qk_norm": False, "qk_norm_type": "per_head",
    },
    "gpt_oss_20b": {
        "layer_types": ["full_attention", "sliding_attention"] * 12, "swiglu_alpha": 1.5, "swiglu_limit": 0.0,
        "hidden_act": "gelu", "quantization_config": {"quant_method": "fp8"},
    },
    "mixtral_8x7b": {"sliding_window": 4096, "router_jitter_noise": 0.1, "hidden_act": "relu"},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_all_unsupported_values_are_named_at_once(name):
    read(PUBLISHED[name])
    with pytest.raises(ConfigError) as caught:
        read(PUBLISHED[name] | REFUSED[name])
    lines = str(caught.value).splitlines()
    assert len(lines) == len(REFUSED[name]) and lines[0].startswith("config.json: ")
    for key in REFUSED[name]:
        assert sum(key in line and "supported is" in line for line in lines) == 1, (key, lines)


YARN = PUBLISHED["deepseek_v3"]["rope_scaling"]
FAMILIES = ("deepseek_v2", "deepseek_v3/kimi_k2", "llama", "qwen3", "qwen3_moe", "mixtral", "gpt_oss")
FAMILIES += ("glm4_moe", "bailing_moe_v2/bailing_moe", "minimax_m2")
LLAMA3 = PUBLISHED["llama3_8b"]["rope_scaling"]
ROPES = [
    ({"type": "linear", "factor": 2.0}, 'rope_type="linear"'),
    ({"rope_type": "llama3", "factor": 8.0}, 'rope_type="llama3"'),
    (YARN | {"mscale": None}, "mscale_all_dim"),
    (YARN | {"mscale_all_dim": 0, "mscale": 0.7}, "mscale"),
    (YARN | {"attention_factor": 1.5}, "attention_factor=1.5"),
    (YARN | {"truncate": "no"}, 'truncate="no" must be true or false'),
    (YARN | {"factor": 0.5}, "factor=0.5"),
    (YARN | {"factor": "40"}, 'factor="40"'),
    (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"full_attention": YARN}, "one dictionary for all layers"),
]


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        *(("deepseek_v3", {"rope_scaling": scaling}, [named]) for scaling, named in ROPES),
        ("mixtral_8x7b", {"rope_scaling": YARN}, ["mscale"]),  # magnitudes of grouped-query attention
        (
            "mixtral_8x7b",
            {"num_key_value_heads": 5},
            ["num_key_value_heads=5 does not divide num_attention_heads=32"],
        ),
        (
            "llama3_8b",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            ["low_freq_factor=null", "high_freq_factor=null", "original_max_position_embeddings is missing"],
        ),
        ("gpt_oss_20b", {"sliding_window": None}, ["sliding_window=null must be a whole number"]),
        ("gpt_oss_20b", {"sliding_window": 0}, ["sliding_window=0; supported is 1 or more with sliding_att"]),
        (
            "gpt_oss_20b",
            {"layer_types": ["full_attention"] * 23},
            ["layer_types has 23 entries; supported is 24 "],
        ),
        ("gpt_oss_20b", {"num_attention_heads": -1}, ["num_attention_heads=-1 must be"]),
        (
            "minimax_m2",
            {"attn_type_list": [1] * 61},
            ["has 61 entries; supported is 62 entries 1, which is softmax"],
        ),
        ("minimax_m2", {"attn_type_list": 1}, ["attn_type_list=1; supported is 62 entries 1"]),
        (
            "gpt_oss_20b",
            {"layer_types": "full", "head_dim": 63},
            ['layer_types="full"; supported is 24 entries'],
        ),
        ("qwen3_8b", {"use_sliding_window": True, "sliding_window": 4096}, ["sliding_window=4096"]),
        ("llama3_8b", {"rope_scaling": LLAMA3 | {"factor": 0.5}}, ["llama3_factor=0.5 must be 1 or greater"]),
        ("llama3_8b", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, ["must exceed"]),
        (
            "deepseek_v3",
            {"kv_lora_rank": ABSENT, "q_lora_rank": ABSENT, "hidden_size": "7168", "norm_topk_prob": 1},
            ["kv_lora_rank is missing", "q_lora_rank is missing", 'hidden_size="7168"', "norm_topk_prob=1"],
        ),
        ("deepseek_v3", {"model_type": "llama"}, FAMILIES),
        ("deepseek_v3", {"architectures": ["DeepseekV3Model"]}, FAMILIES),
        ("deepseek_v3", {"model_type": None, "architectures": None}, FAMILIES),
    ],
)
def test_what_has_no_counterpart_here_is_named(name, change, named):
    raw = {key: value for key, value in (PUBLISHED[name] | change).items() if value is not ABSENT}
    with pytest.raises(ConfigError) as caught:
        read(raw)
    assert [part for part in named if part not in str(caught.value)] == []


SLIDING, LINEAR, FULL = (f"{kind}_attention" for kind in ("sliding", "linear", "full"))
WRONG_OF = {
    "qwen3_next_80b_a3b": [
        ({"linear_num_key_heads": None}, "linear_num_key_heads=null must be a whole number"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads=24 is not a multiple of linear_num_key"),
        ({"full_attention_interval": 0, "layer_types": None}, "full_attention_interval=0 must be 2 to num_"),
        ({"layer_types": [LINEAR] * 48}, f'layer_types[47]="{LINEAR}"; supported is "{FULL}" there: 48 '),
        ({"layer_types": [FULL] * 48}, f'layer_types[0]="{FULL}"; supported is "{LINEAR}" there: 48 entries'),
        ({"rope_parameters": "yarn"}, 'rope_parameters="yarn"; supported is one dictionary for all layers'),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor=null; supported is 1 or"),
        ({"rope_theta": "x", "rope_scaling": {"rope_type": "default"}}, 'rope_theta="x" must be a number'),
    ],
    "gpt_oss_20b": [
        (
            {"layer_types": [SLIDING, FULL] * 11 + [FULL] * 2},
            f'layer_types[22]="{FULL}"; supported is "{SLIDING}" there: 24 entries "{SLIDING}", but each '
            f'n-th "{FULL}" (n=2)',
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_OF)
def test_a_line_names_the_key_and_the_entry_of_config_json(name):
    for change, line in WRONG_OF[name]:
        with pytest.raises(ConfigError) as caught:
            read(to_hf_config(load_preset(name))[1] | change)
        (found,) = str(caught.value).splitlines()
        assert found.startswith(f"config.json: {line}")


@pytest.mark.parametrize("name", ["gpt_oss_20b", "minimax_m2", "llama4_scout", "qwen3_30b_a3b"])
@pytest.mark.parametrize(
    "lists", [{}, {"layer_types": None, "attn_type_list": None}], ids=["given", "absent"]
)
def test_a_number_of_layers_is_refused_before_lists_are_made(name, lists):
    tracemalloc.start()
    with pytest.raises(ConfigError, match="num_(hidden_)?layers=2147483647|2147483647 of"):
        read(PUBLISHED[name] | lists | {"num_hidden_layers": 2**31 - 1})
    assert tracemalloc.get_traced_memory()[1] < 1e7
    tracemalloc.stop()


def test_a_model_of_two_families_is_written_as_the_one_that_it_names():
    plain = replace(load_preset("qwen3_next_80b_a3b"), num_layers=4)
    for name, written in (
        ("", "qwen3_next"),
        ("qwen3_5_moe_text", "qwen3_5_moe_text"),
        ("mixtral", "qwen3_next"),
    ):
        family, raw = to_hf_config(replace(plain, hf_family=name))
        assert family.name == written and read(raw).hf_family == written
    with pytest.raises(ConfigError, match="^model.hf_family=qwen3_5 is none of deepseek_v2, "):
        to_hf_config(replace(plain, hf_family="qwen3_5"))


def test_windows_of_few_layers_are_those_of_transformers():
    for layers in (1, 2, 3):
        raw = PUBLISHED["gpt_oss_20b"] | {"num_hidden_layers": layers, "layer_types": None}
        kinds = transformers.GptOssConfig(num_hidden_layers=layers).layer_types
        assert same_function(read(raw), read(raw | {"layer_types": kinds})) == []


@pytest.mark.parametrize("name", ["glm_4_5_air", "ling_mini_2", "minimax_m2"])
def test_a_rotary_fraction_means_the_same_elements_in_transformers(name):
    config = replace(load_preset(name), head_dim=96, rotary_fraction=0.333333)
    _, raw = to_hf_config(config)
    fraction = raw.get("partial_rotary_factor", raw.get("rotary_dim", 0) / 96)
    assert int(96 * fraction) == 32 and same_function(read(raw), config) == []
    with pytest.raises(ConfigError, match="model.rotary_fraction=0.68.* is 29 elements for transformers"):
        to_hf_config(replace(config, head_dim=44, rotary_fraction=30 / 44))


@pytest.mark.parametrize("name", ["glm_4_5_air", "ling_mini_2"])
@pytest.mark.parametrize("factor", [1e299, 0.333333], ids=str)
def test_a_rotary_factor_that_transformers_takes_otherwise_is_named(name, factor):
    _, raw = to_hf_config(load_preset(name))
    raw |= {"head_dim": 2**31 - 2 if factor > 1 else 96, "rotary_dim": None, "partial_rotary_factor": None}
    with pytest.raises(ConfigError, match=f"model.rotary_fraction={factor}".replace("+", r"\+")):
        read(raw | {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": factor}})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_key_that_is_absent_is_refused_by_name_or_means_what_transformers_takes(name):
    published = PUBLISHED[name]
    family = to_hf_config(load_preset(name))[0].name
    kind = type(transformers.AutoConfig.for_model(family))
    ignored = {"architectures", "model_type", "num_nextn_predict_layers"}  # it runs no layers of the last
    if "kv_lora_rank" in published:
        ignored.add("num_key_value_heads")  # with latents there are as many as heads
    for key in published.keys() - ignored:
        raw = {other: value for other, value in published.items() if other != key}
        try:
            found = read(raw)
        except ConfigError as error:
            assert f"{key} is missing" in str(error), key
            continue
        with_defaults = kind.from_dict(raw | {"model_type": family}).to_dict()
        taken = read(with_defaults | {"architectures": published["architectures"]})
        assert same_function(found, replace(taken, mtp_depth=found.mtp_depth)) == [], key


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("tiny", {"shared_ffn_size": 100}, "shared_ffn_size"),
        ("tiny", {"mtp_depth": 1}, "mtp_depth"),
        ("tiny", {"num_heads": 5}, "hidden_size"),
        ("deepseek_v3", {"yarn_mscale": 0.5, "yarn_mscale_all_dim": 0.0}, "mscale"),
        ("deepseek_v3", {"selection_bias": False}, "selection_bias"),
        ("deepseek_v3", {"group_score": GroupScore.max}, "group_score"),
        ("qwen3_30b_a3b", {"routed_scale": 2.0}, "routed_scale"),
        ("qwen3_30b_a3b", {"num_dense_layers": 1}, "num_dense_layers"),
        ("qwen3_30b_a3b", {"num_groups": 4, "topk_groups": 2}, "num_groups"),
        ("mixtral_8x7b", {"shared_ffn_size": 64}, "shared_ffn_size"),
        ("llama3_8b", {"hidden_size": 4100}, "hidden_size"),
        ("gpt_oss_20b", {"attention_bias": AttentionBias.qkv}, "attention_bias"),
        ("gpt_oss_20b", {"swiglu_limit": 0.0}, "swiglu_limit"),
        ("gpt_oss_20b", {"router_bias": False}, "router_bias"),
        ("gpt_oss_20b", {"attention_sinks": False}, "attention_sinks"),
        ("deepseek_v3", {"expert_bias": True}, "expert_bias"),
    ],
)
def test_a_model_that_no_family_can_express_is_refused_by_key(name, change, key):
    with pytest.raises(ConfigError, match=key):
        to_hf_config(replace(load_preset(name), **change))


def test_two_models_never_differ_by_equal_values():
    dense = replace(load_preset("tiny_gqa"), num_dense_layers=4, dense_ffn_size=704)
    grouped, scaled = replace(dense, num_groups=4, topk_groups=4), replace(dense, softmax_after_topk=True)
    for other in (load_preset("qwen3_30b_a3b"), load_preset("mixtral_8x7b"), grouped, scaled):
        lines = same_function(dense, other) + same_function(other, dense)
        pairs = [line.partition("=")[2].split(", not ") for line in lines]
        assert [pair for pair in pairs if pair[0] == pair[1]] == []
    with pytest.raises(ConfigError, match="num_dense_layers=4, not 0") as caught:
        to_hf_config(dense)
    assert "dense_ffn_size" not in str(caught.value)
