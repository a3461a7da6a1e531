"""llama4_text (Llama 4 Scout and Maverick): chunked attention, layers without rotary embedding, top 1.

Experts are stored as one tensor, [in, out] for each expert, gate before up. Rotation pairs are neighbours.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from graphmoe.checkpoint.hf.family import TRANSPOSED, Family, Form, Multimodal, Piece
from graphmoe.checkpoint.hf.grouped_query import attention_names, read_attention, write_attention
from graphmoe.checkpoint.hf.keys import Keys, each_nth
from graphmoe.config.schema import AuxLoss, ModelConfig, ScoreFunction
from graphmoe.plan.attention import model_of_layer
from graphmoe.plan.experts import is_moe

THETA, CHUNK, FLOOR, SCALE, INTERVAL, HEAD = 500000.0, 8192, 8192, 0.1, 4, 128  # transformers' defaults
CHUNKED, FULL = "chunked_attention", "full_attention"


def _read(keys: Keys) -> dict[str, Any]:
    for key, value in (("num_experts_per_tok", 1), ("router_jitter_noise", 0.0)):
        keys.only(key, value)
    layers, width = keys.int("num_hidden_layers"), keys.int("intermediate_size")
    fields = read_attention(keys, default_theta=THETA, default_eps=1e-5)
    normed, every = keys.bool("use_qk_norm", True), keys.int("interleave_moe_layer_step", absent=1)
    moe = [*range(every - 1, layers, max(every, 1))]
    if (given := keys.raw.get("moe_layers")) not in (None, moe):
        keys.refuse("moe_layers", given, f"null or {moe}, by interleave_moe_layer_step={every}")
    return fields | {
        "head_dim": keys.int("head_dim", default=HEAD),
        "num_dense_layers": 0,
        "moe_every": every,
        "dense_ffn_size": keys.int("intermediate_size_mlp", absent=16384),
        "num_experts": keys.int("num_local_experts"),
        "top_k": 1,
        "expert_ffn_size": width,
        "shared_ffn_size": width,
        "score_function": ScoreFunction.sigmoid,
        "input_scaling": True,
        "aux_loss": AuxLoss.none,
        "qk_norm": normed,
        "qk_norm_weight": not normed,
        **_read_layers(keys, layers, fields["context_length"]),
    }


def _read_layers(keys: Keys, layers: int, context: int) -> dict[str, Any]:
    every = keys.int("no_rope_layer_interval", absent=INTERVAL)
    if keys.raw.get("no_rope_layers"):  # 1: with rotary embedding; [] is in published files
        every = each_nth(keys, "no_rope_layers", 1, 0, layers)
    rotates = [int(not every or (i + 1) % every != 0) for i in range(layers)]
    kinds = [CHUNKED if rotary else FULL for rotary in rotates]
    keys.layers("layer_types", kinds, f"{CHUNKED} of layers with rotary embedding, {FULL} of those without")
    chunk = keys.int("attention_chunk_size", default=CHUNK)
    tuned = keys.raw.get("attn_temperature_tuning", True)  # older files have 4
    keys.only("attn_temperature_tuning", True, False, 4)
    floor = keys.int("floor_scale", default=FLOOR) if tuned and 0 in rotates else 0
    return {
        "nope_every": every if 0 in rotates else 0,
        "attention_chunk": chunk if chunk < context else 0,
        "attention_temperature_floor": floor,
        "attention_temperature_scale": keys.float("attn_scale", SCALE) if floor else SCALE,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    layers = range(config.num_layers)
    rotates = [model_of_layer(config, i).rotary_fraction > 0 for i in layers]
    floor = config.attention_temperature_floor
    return write_attention(config) | {
        "intermediate_size": config.expert_ffn_size,
        "intermediate_size_mlp": config.dense_ffn_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": config.moe_every,
        "moe_layers": [i for i in layers if is_moe(config, i)],
        "no_rope_layers": [int(rotary) for rotary in rotates],
        "layer_types": [CHUNKED if rotary else FULL for rotary in rotates],
        "attention_chunk_size": config.attention_chunk or config.context_length,  # transformers needs one
        "attn_temperature_tuning": floor > 0,
        "floor_scale": floor or FLOOR,
        "attn_scale": config.attention_temperature_scale,
        "use_qk_norm": config.qk_norm,
        "output_router_logits": False,
    }


def _experts(config: ModelConfig, theirs: str, ours: str) -> Iterator[Piece]:
    yield Piece(f"{theirs}.gate_up_proj", f"{ours}.w_gate_up", form=TRANSPOSED)
    yield Piece(f"{theirs}.down_proj", f"{ours}.w_down", form=TRANSPOSED)


def _row_forms(config: ModelConfig) -> dict[str, Form]:
    """Heads whose rotation pairs are neighbours, as heads whose pairs are in both halves.

    Layers without rotary embedding too: queries and keys in the same order have the same products.
    """
    size = config.head_dim

    def halves(w: Tensor) -> Tensor:
        return w.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2)

    def neighbours(w: Tensor) -> Tensor:
        return w.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)

    form = Form(halves, neighbours, block=size)
    return {"q_proj": form, "k_proj": form}


LLAMA4 = Family(
    "llama4_text", "Llama4ForCausalLM", "gqa", attention_names, _read, _write,
    moe="feed_forward", router="router", experts=_experts, row_forms=_row_forms,
    renames=((".shared_experts.", ".shared_expert."),),
    multimodal=Multimodal("llama4", "language_model.", ("vision_model.", "multi_modal_projector.")),
)  # fmt: skip
