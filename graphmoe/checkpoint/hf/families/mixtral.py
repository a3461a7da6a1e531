"""mixtral: grouped-query attention, softmax over the chosen experts."""

from typing import Any

from graphmoe.checkpoint.hf.family import Family
from graphmoe.checkpoint.hf.grouped_query import attention_names, read_moe, refuse_window, write_moe
from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.config.schema import ModelConfig


def _read(keys: Keys) -> dict[str, Any]:
    keys.only("router_jitter_noise", 0.0)
    fields = read_moe(keys, default_theta=1e6, default_eps=1e-5)
    refuse_window(keys, fields["context_length"])
    width = keys.int("intermediate_size")
    return fields | {
        "dense_ffn_size": width,
        "num_experts": keys.int("num_local_experts", "num_experts"),
        "expert_ffn_size": width,
        "softmax_after_topk": True,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return write_moe(config) | {
        "intermediate_size": config.expert_ffn_size,
        "num_local_experts": config.num_experts,
    }


MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM", "gqa", attention_names, _read, _write,
    moe="block_sparse_moe", gate_up_down=("w1", "w3", "w2"),
)  # fmt: skip
