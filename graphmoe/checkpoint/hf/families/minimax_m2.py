"""minimax_m2 (MiniMax-M2): norms over whole projections, partial rotary embedding."""

from typing import Any

from graphmoe.checkpoint.hf.family import Family
from graphmoe.checkpoint.hf.grouped_query import attention_names, read_attention, write_attention
from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.config.schema import AuxLoss, ModelConfig, ScoreFunction
from graphmoe.plan.attention import rotary_elements


def _read(keys: Keys) -> dict[str, Any]:
    keys.only("router_jitter_noise", 0.0)
    keys.only("output_router_logits", False)
    keys.only("scoring_func", "sigmoid")
    keys.only("use_routing_bias", True)
    keys.only("use_qk_norm", True)
    keys.only("qk_norm_type", "per_layer")
    keys.only("shared_intermediate_size", 0)
    keys.only("routed_scaling_factor", 1.0)
    layers = keys.int("num_hidden_layers")
    keys.layers("attn_type_list", [1] * layers, f"{layers} entries 1, which is softmax attention")
    width, head = keys.int("intermediate_size"), keys.int("head_dim", default=128)
    fraction = keys.int("rotary_dim", default=head) / max(head, 1)
    return read_attention(keys, default_theta=5e6, default_fraction=fraction) | {
        "head_dim": head,
        "num_dense_layers": 0,
        "dense_ffn_size": width,
        "expert_ffn_size": width,
        "shared_ffn_size": 0,
        "num_experts": keys.int("num_local_experts", "num_experts"),
        "top_k": keys.int("num_experts_per_tok"),
        "score_function": ScoreFunction.sigmoid,
        "selection_bias": True,
        "renormalise": True,
        "aux_loss": AuxLoss.none,
        "qk_norm": True,
        "qk_norm_whole": True,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return write_attention(config) | {
        "rotary_dim": rotary_elements(config.head_dim, config.rotary_fraction),
        "intermediate_size": config.expert_ffn_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
        "output_router_logits": False,
    }


MINIMAX_M2 = Family(
    "minimax_m2", "MiniMaxM2ForCausalLM", "gqa", attention_names, _read, _write,
    moe="block_sparse_moe", gate_up_down=("w1", "w3", "w2"),
    renames=((".gate.e_score_correction_bias", ".e_score_correction_bias"),),
)  # fmt: skip
