"""Keys of config.json and names of tensors that families with grouped-query attention share."""

from typing import Any

from graphmoe.checkpoint.hf.keys import Keys, read_rope, write_rope
from graphmoe.config.schema import AuxLoss, ModelConfig, ScoreFunction


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
