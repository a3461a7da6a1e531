"""Seconds of what the backward of a layer computes a second time, by segment (docs/recompute.md)."""

from __future__ import annotations

from graphmoe.config.schema import RecomputeConfig
from graphmoe.plan.costs.activations import covers, layer_activations
from graphmoe.plan.costs.layer_parts import along_tp, attention_parts, experts, gate, swiglu
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.costs.speeds import Speeds
from graphmoe.plan.pipeline.costs import DENSE_SEGMENTS, MOE_SEGMENTS

MOVED = 1.5
"""Times that a byte which the forward keeps crosses the card's memory before it is kept."""


def second_forward(sizes: Sizes, speeds: Speeds, recompute: RecomputeConfig, index: int) -> dict[str, float]:
    """Seconds for one micro-batch. Nothing reads the last product of a piece that runs again, so it does not.

    Neither do dispatch and combine.
    """
    model, is_dense = sizes.model, index < sizes.model.num_dense_layers
    segments = DENSE_SEGMENTS if is_dense else MOE_SEGMENTS
    whole = {name for name in segments if covers(recompute, name, index)}
    here = not recompute.layer_ids or index in recompute.layer_ids
    parts = {*recompute.ops} if here else set[str]()
    kept = layer_activations(sizes, RecomputeConfig(), index)
    kept_now = layer_activations(sizes, recompute, index)
    found = {
        name: MOVED * max(kept[name] - kept_now[name], 0) / speeds.hbm
        + (speeds.rates.segment_us * 1e-6 if name in whole else 0.0)
        for name in segments
        if kept[name]
    }

    def add(name: str, seconds: float) -> None:
        found[name] = found.get(name, 0.0) + seconds

    attention = attention_parts(sizes, speeds)
    if "attn" in whole:
        add("attn", attention.before.forward + attention.scores.forward)
        add("attn", attention.gather + attention.heads + attention.ring[0])
        if segments[1] in whole:  # reads the last product
            add("attn", attention.after.forward + attention.scatter)
    else:
        if "mla_up_proj" in parts:
            add("attn", attention.up.forward)
        if "core_attn" in parts:
            add("attn", attention.scores.forward + attention.ring[0])
    for name, inner in (("mlp", model.dense_ffn_size), ("shared_experts", model.shared_ffn_size)):
        if name in segments and inner and name in whole | parts:
            first, _ = swiglu(sizes, speeds, inner)
            add(name, first.forward + (along_tp(sizes, speeds) if name in whole else 0.0))
    if "moe_router" in whole:
        add("moe_router", gate(sizes, speeds).forward)
    if "moe_experts" in whole:
        add("moe_experts", experts(sizes, speeds).forward * 2 / 3)
    return found
