"""llama and qwen3: dense models with grouped-query attention."""

from typing import Any

from graphmoe.checkpoint.hf.family import Family
from graphmoe.checkpoint.hf.grouped_query import (
    attention_names,
    read_attention,
    without_window,
    write_attention,
)
from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.config.schema import ModelConfig


def _read_llama(keys: Keys) -> dict[str, Any]:
    keys.only("mlp_bias", False)
    return read_attention(keys) | {"num_experts": 0, "dense_ffn_size": keys.int("intermediate_size")}


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return write_attention(config) | {"intermediate_size": config.dense_ffn_size, "mlp_bias": False}


def _read_qwen3(keys: Keys) -> dict[str, Any]:
    heads = {"head_dim": keys.int("head_dim", default=128), "qk_norm": True}
    return without_window(keys, _read_llama(keys)) | heads


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return _write_llama(config) | {"use_sliding_window": False, "sliding_window": None}


LLAMA = Family(
    "llama", "LlamaForCausalLM", "gqa", attention_names, _read_llama, _write_llama, whole_heads=True
)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", "gqa", attention_names, _read_qwen3, _write_qwen3)
