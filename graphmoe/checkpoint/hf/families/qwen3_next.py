"""qwen3_next: gated delta nets, gated attention in each n-th layer, a gated shared expert, centred norms.

``in_proj_qkvz`` has the rows of a key head together: query, key, its value heads, their gates;
``in_proj_ba`` those of the value heads' beta, then of their decays. Layers of multi-token prediction are
neither read nor written.
"""

import functools
from collections.abc import Iterator
from typing import Any

from graphmoe.checkpoint.hf.family import Family, Form, Piece
from graphmoe.checkpoint.hf.grouped_query import attention_names, read_moe, write_moe
from graphmoe.checkpoint.hf.keys import Keys, each_nth
from graphmoe.config.schema import LinearAttention, ModelConfig
from graphmoe.plan.attention import is_linear

LINEAR, FULL = "linear_attention", "full_attention"
SIZES = {  # key in config.json: field of ModelConfig, default of transformers
    "linear_num_key_heads": ("linear_key_heads", 16),
    "linear_num_value_heads": ("linear_value_heads", 32),
    "linear_key_head_dim": ("linear_key_head_dim", 128),
    "linear_value_head_dim": ("linear_value_head_dim", 128),
    "linear_conv_kernel_dim": ("linear_conv_taps", 4),
}
TAPS = Form(lambda w: w.squeeze(1), lambda w: w.unsqueeze(1), of_experts=False)


def read(keys: Keys) -> dict[str, Any]:
    keys.only("mlp_only_layers", [])
    keys.only("decoder_sparse_step", 1)
    width = keys.int("shared_expert_intermediate_size", absent=512)
    return {
        **read_moe(keys, default_fraction=0.25),
        **{field: keys.int(key, absent=default) for key, (field, default) in SIZES.items()},
        "linear_attention": LinearAttention.delta_net,
        "full_every": _read_every(keys),
        "head_dim": keys.int("head_dim", absent=256),
        "dense_ffn_size": keys.int("intermediate_size", absent=5632),
        "num_experts": keys.int("num_experts", "num_local_experts"),
        "expert_ffn_size": keys.int("moe_intermediate_size"),
        "shared_ffn_size": width,
        "shared_gate": width > 0,
        "attention_gate": True,
        "qk_norm": True,
        "renormalise": keys.bool("norm_topk_prob", True),
    }


def _read_every(keys: Keys) -> int:
    if keys.raw.get("layer_types") is None:
        return keys.int("full_attention_interval", absent=4)
    return each_nth(keys, "layer_types", LINEAR, FULL, keys.int("num_hidden_layers"), least=2)


def write(config: ModelConfig) -> dict[str, Any]:
    kinds = [LINEAR if is_linear(config, i) else FULL for i in range(config.num_layers)]
    raw = write_moe(config) | {key: getattr(config, field) for key, (field, _) in SIZES.items()}
    return raw | {
        "layer_types": kinds,
        "full_attention_interval": config.full_every,
        "partial_rotary_factor": config.rotary_fraction,
        "intermediate_size": config.dense_ffn_size,
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.expert_ffn_size,
        "shared_expert_intermediate_size": config.shared_ffn_size,
        "norm_topk_prob": config.renormalise or config.softmax_after_topk,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def linear_attention(
    config: ModelConfig, theirs: str, ours: str, *, projections: dict[str, tuple[str, ...]], by_head: bool
) -> Iterator[Piece]:
    """Yield the tensors of a delta net.

    ``projections``: parts of each projection, which with ``by_head`` has those of a key head together.
    """
    heads, theirs = config.linear_key_heads, f"{theirs}.linear_attn"
    values = config.linear_value_heads // heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim * values
    of_head = {"q": key, "k": key, "v": value, "gate": value, "beta": values, "decay": values}
    count, size = (heads, 1) if by_head else (1, heads)
    for name, parts in projections.items():
        to_rows = [
            (f"{part}_proj.weight", block, of_head[part] * size) for block in range(count) for part in parts
        ]
        yield from _rows(f"{theirs}.{name}.weight", ours, to_rows)
    taps = [("convs.q", 0, heads * key), ("convs.k", 0, heads * key), ("convs.v", 0, heads * value)]
    yield from _rows(f"{theirs}.conv1d.weight", ours, taps, TAPS)
    yield Piece(f"{theirs}.A_log", f"{ours}.log_rate_V")
    yield Piece(f"{theirs}.dt_bias", f"{ours}.dt_bias_V")
    yield Piece(f"{theirs}.norm.weight", f"{ours}.out_norm.weight")
    yield Piece(f"{theirs}.out_proj.weight", f"{ours}.out_proj.weight")


def _rows(
    theirs: str, ours: str, parts: list[tuple[str, int, int]], form: Form | None = None
) -> Iterator[Piece]:
    """Yield the pieces of a tensor by its parts in order: our name, which block of ours, and its rows."""
    start, total = 0, sum(size for _, _, size in parts)
    for name, block, size in parts:
        index = (slice(block * size, (block + 1) * size),)
        rows = slice(start, start + size)
        yield Piece(theirs, f"{ours}.{name}", index, form=form, rows=rows, num_rows=total)
        start += size


QWEN3_NEXT = Family(
    "qwen3_next", "Qwen3NextForCausalLM", "gqa", attention_names, read, write,
    renames=((".shared_experts.", ".shared_expert."),),
    linear_attention=functools.partial(
        linear_attention, by_head=True,
        projections={"in_proj_qkvz": ("q", "k", "v", "gate"), "in_proj_ba": ("beta", "decay")},
    ),
    centred_norms=True,
)  # fmt: skip
