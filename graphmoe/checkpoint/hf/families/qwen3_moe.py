"""qwen3_moe: grouped-query attention with norms of heads, softmax over all experts."""

from typing import Any

from graphmoe.checkpoint.hf.family import Family
from graphmoe.checkpoint.hf.grouped_query import attention_names, read_moe, without_window, write_moe
from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.config.schema import ModelConfig


def _read(keys: Keys) -> dict[str, Any]:
    keys.only("mlp_only_layers", [])
    keys.only("decoder_sparse_step", 1)
    return without_window(keys, read_moe(keys)) | {
        "dense_ffn_size": keys.int("intermediate_size"),
        "num_experts": keys.int("num_experts", "num_local_experts"),
        "expert_ffn_size": keys.int("moe_intermediate_size"),
        "qk_norm": True,
        "renormalise": keys.bool("norm_topk_prob", False),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return write_moe(config) | {
        "intermediate_size": config.dense_ffn_size,
        "moe_intermediate_size": config.expert_ffn_size,
        "num_experts": config.num_experts,
        "norm_topk_prob": config.renormalise or config.softmax_after_topk,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", "gqa", attention_names, _read, _write)
