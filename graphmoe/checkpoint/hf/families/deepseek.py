"""deepseek_v2 and deepseek_v3 (also Moonlight, Kimi-K2): multi-head latent attention.

DeepSeek-V3's experts and router are those of families with grouped-query attention too.
"""

from typing import Any

from graphmoe.checkpoint.hf.family import Family
from graphmoe.checkpoint.hf.keys import Keys, read_rope, write_rope
from graphmoe.config.schema import AuxLoss, GroupScore, ModelConfig, ScoreFunction

BEST_IN_GROUP = 2  # DeepSeek-V3's published code sums two scores of a group, whatever top-k is
SIZES = {  # required keys of config.json and their ModelConfig fields
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "context_length",
}
EXPERT_SIZES = {
    "first_k_dense_replace": "num_dense_layers",
    "intermediate_size": "dense_ffn_size",
    "moe_intermediate_size": "expert_ffn_size",
    "num_experts_per_tok": "top_k",
}
GROUPS = {"n_group": "num_groups", "topk_group": "topk_groups"}
EXPERTS, SHARED = ("n_routed_experts", "num_local_experts", "num_experts"), "n_shared_experts"


def read_sigmoid_moe(keys: Keys, *experts: str, shared: str, default_scale: float = 1.0) -> dict[str, Any]:
    """Return ModelConfig fields of DeepSeek-V3's router and of experts, by the keys of their numbers."""
    groups: dict[str, Any] = {field: keys.int(key) for key, field in GROUPS.items()}
    if groups["num_groups"] > 1:
        groups["group_score"] = GroupScore.top2_sum
    return _read_experts(keys, *experts, shared=shared) | {
        **groups,
        "score_function": ScoreFunction.sigmoid,
        "selection_bias": True,
        "renormalise": keys.bool("norm_topk_prob", True),
        "routed_scale": keys.float("routed_scaling_factor", default_scale),
        "aux_loss": AuxLoss.none,
        "mtp_depth": keys.int("num_nextn_predict_layers", "num_mtp_layers", default=0),
    }


def write_sigmoid_moe(config: ModelConfig, *, shared: str) -> dict[str, Any]:
    """Return the keys that `read_sigmoid_moe` reads, but for the number of experts."""
    return _write_experts(config, shared) | {
        "norm_topk_prob": config.renormalise,
        "num_nextn_predict_layers": config.mtp_depth,
    }


def _read_experts(keys: Keys, *experts: str, shared: str) -> dict[str, Any]:
    if (count := keys.int(*experts)) < 1:
        keys.refuse(experts[0], count, "1 or more")
    sizes: dict[str, Any] = {field: keys.int(key) for key, field in EXPERT_SIZES.items()}
    num_shared = keys.int(shared, default=0 if shared in keys.raw else 1)
    return sizes | {"num_experts": count, "shared_ffn_size": sizes["expert_ffn_size"] * num_shared}


def _write_experts(config: ModelConfig, shared: str) -> dict[str, Any]:
    return {key: getattr(config, field) for key, field in (EXPERT_SIZES | GROUPS).items()} | {
        shared: config.shared_ffn_size // config.expert_ffn_size,
        "routed_scaling_factor": config.routed_scale,
    }


def _read_v2(keys: Keys) -> dict[str, Any]:
    keys.only("scoring_func", "softmax")
    keys.only("topk_method", "greedy", "group_limited_greedy")
    keys.only("norm_topk_prob", False)  # transformers ignores it, DeepSeek's code drops the scale with it
    keys.only("mlp_bias", False)
    fields = _read_latent(keys) | _read_experts(keys, *EXPERTS, shared=SHARED) | _read_aux_loss(keys)
    if keys.raw.get("topk_method") == "group_limited_greedy":
        fields |= {"num_groups": keys.int("n_group"), "topk_groups": keys.int("topk_group")}
    return fields | {
        "score_function": ScoreFunction.softmax,
        "group_score": GroupScore.max,
        "routed_scale": keys.float("routed_scaling_factor", 1.0),
    }


def _write_v2(config: ModelConfig) -> dict[str, Any]:
    limited = config.num_groups > 1
    return _write_latent(config) | {
        **_write_experts(config, SHARED),
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "norm_topk_prob": False,
    }


def _read_v3(keys: Keys) -> dict[str, Any]:
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.only("rope_interleave", True)
    moe = read_sigmoid_moe(keys, *EXPERTS, shared=SHARED, default_scale=2.5)
    if moe["num_groups"] > 1 and moe["top_k"] // max(moe["topk_groups"], 1) == BEST_IN_GROUP:
        moe["group_score"] = GroupScore.topk_sum  # as in the paper
    return _read_latent(keys) | moe | _read_aux_loss(keys)


def _write_v3(config: ModelConfig) -> dict[str, Any]:
    return _write_latent(config) | {
        **write_sigmoid_moe(config, shared=SHARED),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _attention_names(config: ModelConfig) -> dict[str, str]:
    query = {"q_proj": "q_proj"}
    if config.q_lora_rank:
        query = {"q_a_proj": "q_down", "q_a_layernorm": "q_norm", "q_b_proj": "q_up"}
    return query | {
        "kv_a_proj_with_mqa": "kv_down",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "kv_up",
        "o_proj": "out_proj",
    }


def _read_latent(keys: Keys) -> dict[str, Any]:
    keys.only("moe_layer_freq", 1)
    sizes: dict[str, Any] = {field: keys.int(key) for key, field in SIZES.items()}
    keys.only("num_key_value_heads", sizes["num_heads"])
    keys.require("q_lora_rank", null="none")
    keys.require(SHARED, null="none")
    return sizes | {
        "attention": "mla",
        "q_lora_rank": keys.int("q_lora_rank", default=0),
        "norm_eps": keys.float("rms_norm_eps", 1e-6),
        **read_rope(keys, default_theta=10000.0, context=sizes["context_length"], scales_scores=True),
    }


def _read_aux_loss(keys: Keys) -> dict[str, Any]:
    coefficient = keys.float("aux_loss_alpha", 0.0)
    # without aux_loss_alpha transformers adds no balance loss
    if coefficient <= 0:
        return {"aux_loss": AuxLoss.none}
    kind = AuxLoss.sequence if keys.bool("seq_aux", True) else AuxLoss.micro_batch
    return {"aux_loss": kind, "aux_loss_coef": coefficient}


def _write_latent(config: ModelConfig) -> dict[str, Any]:
    return {key: getattr(config, field) for key, field in SIZES.items()} | {
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank or None,
        "moe_layer_freq": 1,
        "n_routed_experts": config.num_experts,
        "aux_loss_alpha": 0.0 if config.aux_loss is AuxLoss.none else config.aux_loss_coef,
        "seq_aux": config.aux_loss is AuxLoss.sequence,
        "rms_norm_eps": config.norm_eps,
        **write_rope(config, scales_scores=True),
    }


V2 = Family(
    "deepseek_v2", "DeepseekV2ForCausalLM", "mla", _attention_names, _read_v2, _write_v2, whole_heads=True
)
V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", "mla", _attention_names, _read_v3, _write_v3,
    aliases=("kimi_k2",),
)  # fmt: skip
