"""qwen3_5_moe_text: qwen3_next with the projections of delta nets apart; routing weights sum to 1.

Published folders are of qwen3_5_moe, which has a vision model too. ``rope_parameters`` has sections for the
three positions of an image's token (mrope_section); those of text are equal, so it has no effect.
"""

import functools
from dataclasses import replace
from typing import Any

from graphmoe.checkpoint.hf.families.qwen3_next import QWEN3_NEXT, linear_attention, read, write
from graphmoe.checkpoint.hf.family import Multimodal
from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.config.schema import ModelConfig

OF_NEXT = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "intermediate_size")
PROJECTIONS = {
    "in_proj_qkv": ("q", "k", "v"), "in_proj_z": ("gate",), "in_proj_b": ("beta",), "in_proj_a": ("decay",)
}  # fmt: skip


def _read(keys: Keys) -> dict[str, Any]:
    keys.only("attn_output_gate", True)  # in published files; transformers has no other form
    return read(keys) | {"renormalise": True}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {key: value for key, value in write(config).items() if key not in OF_NEXT}


QWEN3_5_MOE = replace(
    QWEN3_NEXT, name="qwen3_5_moe_text", architecture="Qwen3_5MoeForCausalLM", read=_read, write=_write,
    linear_attention=functools.partial(linear_attention, projections=PROJECTIONS, by_head=False),
    multimodal=Multimodal("qwen3_5_moe", "model.language_model.", ("model.visual.",), replaced="model."),
)  # fmt: skip
