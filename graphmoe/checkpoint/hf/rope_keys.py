"""Rotary embedding in config.json: rope_theta with rope_scaling, or transformers 5's rope_parameters."""

from __future__ import annotations

from typing import Any

from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.config.schema import AttentionKind, ModelConfig, RopeScaling
from graphmoe.model.rope import yarn_magnitude


def read_rope(keys: Keys, kind: AttentionKind, *, default_theta: float, context: int) -> dict[str, Any]:
    """ModelConfig fields of the rotary embedding, by name."""
    rope = keys.raw.get("rope_scaling") or keys.raw.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        keys.refuse("rope_scaling", rope, "one dictionary for all layers")
        return {}
    inner = Keys({**{name: keys.raw.get(name) for name in ("rope_theta", "partial_rotary_factor")}, **rope})
    fields: dict[str, Any] = {"rope_theta": inner.float("rope_theta", default_theta)}
    inner.only("partial_rotary_factor", 1.0)
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling == "yarn":
        fields |= _read_yarn(inner, kind, context)
    elif scaling != "default":
        inner.refuse("rope_type", scaling, '"default" or "yarn"')
    keys.problems += [f"rope_scaling.{line}" for line in inner.problems]
    return fields


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Keys of config.json for the rotary embedding, in the style of the published files."""
    if config.rope_scaling is RopeScaling.none:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    scaling: dict[str, Any] = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": config.yarn_factor,
        "original_max_position_embeddings": config.yarn_original_context,
        "beta_fast": config.yarn_beta_fast,
        "beta_slow": config.yarn_beta_slow,
    }
    magnitudes = {"mscale": config.yarn_mscale, "mscale_all_dim": config.yarn_mscale_all_dim}
    if config.attention is AttentionKind.mla or magnitudes != {"mscale": 1.0, "mscale_all_dim": 0.0}:
        scaling |= magnitudes
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def _read_yarn(rope: Keys, kind: AttentionKind, context: int) -> dict[str, Any]:
    factor = rope.float("factor", 0.0)
    if factor < 1:
        rope.refuse("factor", rope.raw.get("factor"), "1 or greater")
        factor = 1.0
    rope.only("truncate", True)
    mscale, all_dim = _read_magnitudes(rope, kind)
    magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    if abs(rope.float("attention_factor", magnitude) - magnitude) > 1e-6 * magnitude:
        rope.refuse("attention_factor", rope.raw["attention_factor"], f"null or {magnitude} for this factor")
    return {
        "rope_scaling": RopeScaling.yarn,
        "yarn_factor": factor,
        "yarn_original_context": rope.int("original_max_position_embeddings", default=context),
        "yarn_beta_fast": rope.float("beta_fast", 32.0),
        "yarn_beta_slow": rope.float("beta_slow", 1.0),
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": all_dim,
    }


def _read_magnitudes(rope: Keys, kind: AttentionKind) -> tuple[float, float]:
    """mscale and mscale_all_dim, where the published codes agree on what they mean.

    transformers takes mscale as 1 unless both are given and not 0, DeepSeek's code takes each as it is.
    Only latent attention scales its softmax by mscale_all_dim.
    """
    mscale, all_dim = rope.float("mscale", 1.0), rope.float("mscale_all_dim", 0.0)
    if kind is AttentionKind.mla and rope.raw.get("mscale") and all_dim:
        return mscale, all_dim
    if mscale != 1.0 or all_dim:
        given = {name: rope.raw.get(name) for name in ("mscale", "mscale_all_dim")}
        both = ", or both given and not 0" if kind is AttentionKind.mla else ""
        rope.refuse("mscale and mscale_all_dim", list(given.values()), f"[null or 1, null or 0]{both}")
    return 1.0, 0.0
