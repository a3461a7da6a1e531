"""bailing_moe_v2 (Ling-mini-2.0, Ling-flash-2.0): queries, keys and values in one tensor."""

from typing import Any

from graphmoe.checkpoint.hf.families.deepseek import read_sigmoid_moe, write_sigmoid_moe
from graphmoe.checkpoint.hf.family import Family
from graphmoe.checkpoint.hf.grouped_query import read_attention, write_attention
from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.config.schema import ModelConfig
from graphmoe.plan.attention import rotary_elements

SHARED = "num_shared_experts"


def _attention_names(config: ModelConfig) -> dict[str, str]:
    norms = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"} if config.qk_norm else {}
    return {"query_key_value": "q_proj k_proj v_proj", **norms, "dense": "out_proj"}


def _read(keys: Keys) -> dict[str, Any]:
    for key in ("use_bias", "use_qkv_bias"):
        keys.only(key, False)
    keys.only("use_rmsnorm", True)
    keys.only("score_function", "sigmoid")
    keys.only("moe_router_enable_expert_bias", True)
    keys.only("norm_topk_prob", True)
    fields = read_attention(keys, default_theta=6e5, default_fraction=1.0)
    moe = read_sigmoid_moe(keys, "num_experts", shared=SHARED)
    keys.only("moe_shared_expert_intermediate_size", moe["shared_ffn_size"])
    keys.only("rotary_dim", rotary_elements(fields["head_dim"], fields.get("rotary_fraction", 1.0)))
    # the published gate normalizes the weights of several experts, and does not read norm_topk_prob
    return fields | moe | {"qk_norm": keys.bool("use_qk_norm", True), "renormalise": moe["top_k"] > 1}


def _write(config: ModelConfig) -> dict[str, Any]:
    rotary = rotary_elements(config.head_dim, config.rotary_fraction)
    return {
        **write_attention(config),
        **write_sigmoid_moe(config, shared=SHARED),
        "num_experts": config.num_experts,
        "norm_topk_prob": True,
        "use_qk_norm": config.qk_norm,
        "partial_rotary_factor": rotary / config.head_dim,
        "rotary_dim": rotary,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
    }


BAILING = Family(
    "bailing_moe_v2", "BailingMoeV2ForCausalLM", "gqa", _attention_names, _read, _write,
    aliases=("bailing_moe",), mtp_copies=False,
    renames=(
        ("model.embed_tokens.", "model.word_embeddings."), (".self_attn.", ".attention."),
        (".gate.e_score_correction_bias", ".gate.expert_bias"), (".shared_head.norm.", ".final_layernorm."),
    ),
)  # fmt: skip
