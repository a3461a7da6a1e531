"""Conversion between ModelConfig and config.json of llama, qwen3, qwen3_moe and mixtral."""

from typing import Any

from graphmoe.checkpoint.hf.keys import Keys, read_rope, write_rope
from graphmoe.config.schema import AuxLoss, ModelConfig, ScoreFunction


def read_llama(keys: Keys) -> dict[str, Any]:
    keys.only("mlp_bias", False)
    return _read_attention(keys) | {"num_experts": 0, "dense_ffn_size": keys.int("intermediate_size")}


def write_llama(config: ModelConfig) -> dict[str, Any]:
    return _write_attention(config) | {"intermediate_size": config.dense_ffn_size, "mlp_bias": False}


def read_qwen3(keys: Keys) -> dict[str, Any]:
    heads = {"head_dim": keys.int("head_dim", default=128), "qk_norm": True}
    return _without_window(keys, read_llama(keys)) | heads


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return write_llama(config) | {"use_sliding_window": False, "sliding_window": None}


def read_qwen3_moe(keys: Keys) -> dict[str, Any]:
    keys.only("mlp_only_layers", [])
    keys.only("decoder_sparse_step", 1)
    return _without_window(keys, _read_common(keys)) | {
        "dense_ffn_size": keys.int("intermediate_size"),
        "num_experts": keys.int("num_experts", "num_local_experts"),
        "expert_ffn_size": keys.int("moe_intermediate_size"),
        "qk_norm": True,
        "renormalise": keys.bool("norm_topk_prob", False),
    }


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return _write_common(config) | {
        "intermediate_size": config.dense_ffn_size,
        "moe_intermediate_size": config.expert_ffn_size,
        "num_experts": config.num_experts,
        "norm_topk_prob": config.renormalise or config.softmax_after_topk,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def read_mixtral(keys: Keys) -> dict[str, Any]:
    keys.only("router_jitter_noise", 0.0)
    fields = _read_common(keys, default_theta=1e6, default_eps=1e-5)
    _refuse_window(keys, fields["context_length"])
    width = keys.int("intermediate_size")
    return fields | {
        "dense_ffn_size": width,
        "num_experts": keys.int("num_local_experts", "num_experts"),
        "expert_ffn_size": width,
        "softmax_after_topk": True,
    }


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    return _write_common(config) | {
        "intermediate_size": config.expert_ffn_size,
        "num_local_experts": config.num_experts,
    }


def attention_names(config: ModelConfig) -> dict[str, str]:
    norms = {"q_norm": "q_norm", "k_norm": "k_norm"} if config.qk_norm else {}
    return {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", **norms, "o_proj": "out_proj"}


def _read_attention(
    keys: Keys, *, default_theta: float = 10000.0, default_eps: float = 1e-6
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
        **read_rope(keys, default_theta=default_theta, context=context, scales_scores=False),
    }


def _read_common(keys: Keys, **defaults: float) -> dict[str, Any]:
    with_loss = keys.bool("output_router_logits", False)  # transformers adds its balance loss with it only
    layers, top_k = keys.int("num_hidden_layers"), keys.int("num_experts_per_tok")
    return {
        **_read_attention(keys, **defaults),
        "num_dense_layers": 0,
        "shared_ffn_size": 0,
        "top_k": top_k,
        "score_function": ScoreFunction.softmax,
        "aux_loss": AuxLoss.micro_batch if with_loss else AuxLoss.none,
        # Theirs is one loss over all layers, top_k at balance; ours is one per layer, each 1 at balance.
        "aux_loss_coef": keys.float("router_aux_loss_coef", 0.001) * top_k / max(layers, 1),
    }


def _without_window(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    if keys.bool("use_sliding_window", False):
        _refuse_window(keys, fields["context_length"])
    return fields


def _refuse_window(keys: Keys, context: int) -> None:
    window = keys.int("sliding_window", default=context)
    if window < context:
        keys.refuse("sliding_window", window, f"null, or at least max_position_embeddings={context}")


def _write_attention(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        **write_rope(config, scales_scores=False),
    }


def _write_common(config: ModelConfig) -> dict[str, Any]:
    return _write_attention(config) | {
        "num_experts_per_tok": config.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": float(f"{config.aux_loss_coef * config.num_layers / config.top_k:.12g}"),
        "sliding_window": None,
    }
