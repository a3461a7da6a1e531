"""gpt_oss: sliding and full attention with sinks, biases everywhere, clamped SwiGLU.

Experts are stored as one tensor, [in, out] for each expert, with gate and up in alternate columns.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from graphmoe.checkpoint.hf.family import TRANSPOSED, Family, Form, Piece
from graphmoe.checkpoint.hf.grouped_query import attention_names, read_moe, write_moe
from graphmoe.checkpoint.hf.keys import Keys, each_nth
from graphmoe.config.schema import AttentionBias, ModelConfig
from graphmoe.plan.attention import model_of_layer

WINDOW, THETA, LIMIT, STEEPNESS = 128, 150000.0, 7.0, 1.702  # transformers' defaults
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"


def _read(keys: Keys) -> dict[str, Any]:
    keys.only("swiglu_alpha", STEEPNESS)
    limit = keys.float("swiglu_limit", LIMIT)
    if limit <= 0:
        keys.refuse("swiglu_limit", limit, "a number greater than 0")
    given = {"head_dim": 64} | keys.raw
    if not (keys.raw.get("rope_scaling") or keys.raw.get("rope_parameters")):
        given["rope_parameters"] = YARN
    inner = Keys(given, keys.problems)
    bias = AttentionBias.qkvo if keys.bool("attention_bias", True) else AttentionBias.none
    return read_moe(inner, default_theta=THETA, default_eps=1e-5) | {
        **_read_windows(keys),
        "attention_sinks": True,
        "attention_bias": bias,
        "num_experts": keys.int("num_local_experts", "num_experts"),
        "expert_ffn_size": keys.int("intermediate_size"),
        "expert_bias": True,
        "swiglu_limit": limit,
        "router_bias": True,
        "softmax_after_topk": True,
    }


def _read_windows(keys: Keys) -> dict[str, int]:
    layers = keys.int("num_hidden_layers")
    every = 2 if layers > 1 else 0
    if keys.raw.get("layer_types") is not None:
        every = each_nth(keys, "layer_types", SLIDING, FULL, layers)
    if every == 1:
        return {"window": 0, "full_every": 0}
    window = keys.int("sliding_window", absent=WINDOW)
    if window < 1:
        keys.refuse("sliding_window", window, f"1 or more with {SLIDING} in layer_types")
    return {"window": window, "full_every": every}


def _write(config: ModelConfig) -> dict[str, Any]:
    kinds = [SLIDING if model_of_layer(config, i).window else FULL for i in range(config.num_layers)]
    raw = write_moe(config)
    raw["rope_scaling"] = raw["rope_scaling"] or {"rope_type": "default"}  # null would mean YARN
    return raw | {
        "attention_bias": config.attention_bias is not AttentionBias.none,
        "layer_types": kinds,
        "sliding_window": config.window or config.context_length,  # transformers needs one, even if unused
        "num_local_experts": config.num_experts,
        "intermediate_size": config.expert_ffn_size,
        "swiglu_limit": config.swiglu_limit,
    }


def _apart(interleaved: Tensor) -> Tensor:
    return interleaved.unflatten(-1, (-1, 2)).mT.flatten(-2)


def _interleaved(apart: Tensor) -> Tensor:
    return apart.unflatten(-1, (2, -1)).mT.flatten(-2)


def _experts(config: ModelConfig, theirs: str, ours: str) -> Iterator[Piece]:
    gate_up = Form(lambda w: _apart(w).mT, lambda w: _interleaved(w.mT))
    yield Piece(f"{theirs}.gate_up_proj", f"{ours}.w_gate_up", form=gate_up)
    yield Piece(f"{theirs}.gate_up_proj_bias", f"{ours}.b_gate_up", form=Form(_apart, _interleaved))
    yield Piece(f"{theirs}.down_proj", f"{ours}.w_down", form=TRANSPOSED)
    yield Piece(f"{theirs}.down_proj_bias", f"{ours}.b_down")


GPT_OSS = Family(
    "gpt_oss", "GptOssForCausalLM", "gqa", attention_names, _read, _write,
    router="router", experts=_experts, attention_bias=(True, False), quantization="mxfp4",
)  # fmt: skip
