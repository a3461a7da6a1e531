"""glm4_moe (GLM-4.5, GLM-4.5-Air): grouped-query attention with biases and partial rotary embedding."""

from typing import Any

from graphmoe.checkpoint.hf.families.deepseek import read_sigmoid_moe, write_sigmoid_moe
from graphmoe.checkpoint.hf.family import Family
from graphmoe.checkpoint.hf.grouped_query import attention_names, read_attention, write_attention
from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.config.schema import AttentionBias, ModelConfig
from graphmoe.plan.attention import rotary_elements

SHARED = "n_shared_experts"


def _read(keys: Keys) -> dict[str, Any]:
    biases = keys.bool("attention_bias", False)
    return {
        **read_attention(keys, default_eps=1e-5, default_fraction=0.5),
        **read_sigmoid_moe(keys, "n_routed_experts", "num_local_experts", shared=SHARED),
        "head_dim": keys.int("head_dim"),
        "qk_norm": keys.bool("use_qk_norm", False),
        "attention_bias": AttentionBias.qkv if biases else AttentionBias.none,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_attention(config),
        **write_sigmoid_moe(config, shared=SHARED),
        "n_routed_experts": config.num_experts,
        "use_qk_norm": config.qk_norm,
        "attention_bias": config.attention_bias is not AttentionBias.none,
        "partial_rotary_factor": rotary_elements(config.head_dim, config.rotary_fraction) / config.head_dim,
    }


GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM", "gqa", attention_names, _read, _write, attention_bias=(False, True)
)
