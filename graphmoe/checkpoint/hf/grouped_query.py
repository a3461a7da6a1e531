"""Keys of config.json and names of tensors that families with grouped-query attention share."""

from typing import Any

from graphmoe.checkpoint.hf.keys import Keys, read_rope, write_rope
from graphmoe.config.schema import AuxLoss, GroupScore, ModelConfig, ScoreFunction


def attention_names(config: ModelConfig) -> dict[str, str]:
    norms = {"q_norm": "q_norm", "k_norm": "k_norm"} if config.qk_norm and config.qk_norm_weight else {}
    return {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", **norms, "o_proj": "out_proj"}


def read_attention(
    keys: Keys,
    *,
    default_theta: float = 10000.0,
    default_eps: float = 1e-6,
    default_fraction: float | None = None,
) -> dict[str, Any]:
    heads, width = keys.int("num_attention_heads"), keys.int("hidden_size")
    context = keys.int("max_position_embeddings")
    keys.require("num_key_value_heads", null="num_attention_heads")
    return {
        "attention": "gqa",
        "num_heads": heads,
        "num_kv_heads": keys.int("num_key_value_heads", default=heads),
        "head_dim": keys.int("head_dim", default=width // max(heads, 1)),
        "context_length": context,
        "norm_eps": keys.float("rms_norm_eps", default_eps),
        **read_rope(
            keys, default_theta=default_theta, context=context, scales_scores=False, fraction=default_fraction
        ),
    }


def read_moe(keys: Keys, **defaults: float) -> dict[str, Any]:
    with_loss = keys.bool("output_router_logits", False)  # transformers adds its balance loss with it only
    layers, top_k = keys.int("num_hidden_layers"), keys.int("num_experts_per_tok", "experts_per_token")
    return {
        **read_attention(keys, **defaults),
        "num_dense_layers": 0,
        "shared_ffn_size": 0,
        "top_k": top_k,
        "score_function": ScoreFunction.softmax,
        "aux_loss": AuxLoss.micro_batch if with_loss else AuxLoss.none,
        # Theirs is one loss over all layers, top_k at balance; ours is one per layer, each 1 at balance.
        "aux_loss_coef": keys.float("router_aux_loss_coef", 0.001) * top_k / max(layers, 1),
    }


def without_window(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    if keys.bool("use_sliding_window", False):
        refuse_window(keys, fields["context_length"])
    return fields


def refuse_window(keys: Keys, context: int) -> None:
    window = keys.int("sliding_window", default=context)
    if window < context:
        keys.refuse("sliding_window", window, f"null, or at least max_position_embeddings={context}")


def write_attention(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        **write_rope(config, scales_scores=False),
    }


def write_moe(config: ModelConfig) -> dict[str, Any]:
    return write_attention(config) | {
        "num_experts_per_tok": config.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": float(f"{config.aux_loss_coef * config.num_layers / config.top_k:.12g}"),
        "sliding_window": None,
    }


SIGMOID_SIZES = {
    "first_k_dense_replace": "num_dense_layers",
    "intermediate_size": "dense_ffn_size",
    "moe_intermediate_size": "expert_ffn_size",
    "num_experts_per_tok": "top_k",
    "n_group": "num_groups",
    "topk_group": "topk_groups",
}
"""Required keys of families with DeepSeek-V3's router, and their ModelConfig fields."""


def read_sigmoid_moe(keys: Keys, *experts: str, shared: str) -> dict[str, Any]:
    """Return ModelConfig fields of DeepSeek-V3's router and of experts, by the keys of their numbers."""
    if (count := keys.int(*experts)) < 1:
        keys.refuse(experts[0], count, "1 or more")
    sizes: dict[str, Any] = {field: keys.int(key) for key, field in SIGMOID_SIZES.items()}
    return sizes | {
        "num_experts": count,
        "shared_ffn_size": sizes["expert_ffn_size"] * keys.int(shared, default=1),
        "score_function": ScoreFunction.sigmoid,
        "group_score": GroupScore.top2_sum,
        "selection_bias": True,
        "renormalise": keys.bool("norm_topk_prob", True),
        "routed_scale": keys.float("routed_scaling_factor", 1.0),
        "aux_loss": AuxLoss.none,
        "mtp_depth": keys.int("num_nextn_predict_layers", "num_mtp_layers", default=0),
    }


def write_sigmoid_moe(config: ModelConfig, *, shared: str) -> dict[str, Any]:
    return {key: getattr(config, field) for key, field in SIGMOID_SIZES.items()} | {
        shared: config.shared_ffn_size // config.expert_ffn_size,
        "norm_topk_prob": config.renormalise,
        "routed_scaling_factor": config.routed_scale,
        "num_nextn_predict_layers": config.mtp_depth,
    }
