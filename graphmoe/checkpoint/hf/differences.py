"""Config keys in which two models differ, for what they compute."""

import dataclasses
from typing import Any

from graphmoe.config.schema import GroupScore, ModelConfig
from graphmoe.plan.attention import keys_of_other_scalings, keys_of_others, rotary_elements
from graphmoe.plan.experts import EXPERT_KEYS, num_dense

TRAINING_KEYS = {"name", "hf_family", "attention_backend", "bias_update_rate", "aux_loss", "aux_loss_coef"}
TRAINING_KEYS |= {"delta_net_backend", "z_loss_coef", "mtp_loss_weight", "init_std", "peak_lr"}
"""ModelConfig keys that config.json lacks, or that only training uses."""


def same_function(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Return a line for each config key that makes two models compute different functions."""
    ours, theirs = _effective(a), _effective(b)
    lines = []
    for key in dict.fromkeys((*ours, *theirs)):
        pair = getattr(a, key), getattr(b, key)
        if pair[0] == pair[1]:  # equal as written: show the effective values, which another key changes
            pair = ours.get(key, theirs.get(key)), theirs.get(key, ours.get(key))
        if ours.get(key) != theirs.get(key) and pair[0] != pair[1]:
            lines.append(f"model.{key}={pair[0]}, not {pair[1]}")
    return lines


def different_keys(a: ModelConfig, b: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Return (key, a's value, b's value) for keys that differ and affect either model's output."""
    keys = dict.fromkeys((*_effective(a), *_effective(b)))
    values = [(key, getattr(a, key), getattr(b, key)) for key in keys]
    return [(key, before, after) for key, before, after in values if before != after]


def _effective(config: ModelConfig) -> dict[str, Any]:
    keys = dataclasses.asdict(config)
    dropped = TRAINING_KEYS | keys_of_others(config) | keys_of_other_scalings(config)
    if config.attention == "gqa":  # a fraction is rounded to elements
        elements = rotary_elements(config.head_dim, config.rotary_fraction)
        keys["rotary_fraction"] = elements / max(config.head_dim, 1)
    if config.num_experts == 0:
        dropped |= {*EXPERT_KEYS}
    if config.softmax_after_topk:
        keys |= {"softmax_after_topk": False, "renormalise": True}
    if config.topk_groups >= config.num_groups:
        keys["num_groups"] = 1
        dropped |= {"topk_groups", "group_score"}
    else:
        per_group = config.top_k // config.topk_groups
        summed = {GroupScore.max: 1, GroupScore.topk_sum: per_group, GroupScore.top2_sum: 2}
        keys["group_score"] = summed[config.group_score]
    if num_dense(config) == 0:
        dropped.add("dense_ffn_size")
    return {key: value for key, value in keys.items() if key not in dropped}
