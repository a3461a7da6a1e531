"""Hugging Face model families that graphmoe reads and writes, and the choice among them."""

import json
import re
from typing import Any

from graphmoe.checkpoint.hf.differences import same_function
from graphmoe.checkpoint.hf.families import (
    bailing,
    deepseek,
    glm4_moe,
    gpt_oss,
    llama,
    llama4,
    minimax_m2,
    mixtral,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from graphmoe.checkpoint.hf.family import Family
from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.checkpoint.hf.tensor_files import QUANTIZATIONS
from graphmoe.config.choices import LAYERS
from graphmoe.config.ranges import MANY_LAYERS
from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.plan.attention import rotary_elements
from graphmoe.plan.rules.model import model_problems

FAMILIES = (
    deepseek.V2, deepseek.V3,
    llama.LLAMA, llama.QWEN3,
    qwen3_moe.QWEN3_MOE,
    qwen3_next.QWEN3_NEXT, qwen3_5_moe.QWEN3_5_MOE,
    mixtral.MIXTRAL,
    bailing.BAILING, glm4_moe.GLM4_MOE,  # the same function without biases, which GLM-4.5 has
    minimax_m2.MINIMAX_M2,
    gpt_oss.GPT_OSS, llama4.LLAMA4,
)  # fmt: skip
"""Families in the order in which a model to write tries them, after ``model.hf_family``."""


ALSO_READ = {"fmt": "float8_e4m3fn"}  # another spelling of the same format


def family_of(raw: dict[str, Any], where: str) -> Family:
    """Return the family named in config.json. *Raises* ConfigError."""
    wanted, architectures = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise ConfigError(f"{where}: architectures={architectures} must be a list")
    for family in FAMILIES:
        known = wanted in (family.name, *family.aliases)
        if known and all(name == family.architecture for name in architectures):
            return family
        if wanted is None and architectures == [family.architecture]:
            return family
    supported = "; ".join(f"{'/'.join((f.name, *f.aliases))} ({f.architecture})" for f in FAMILIES)
    raise ConfigError(f"{where}: model_type={wanted}, architectures={architectures}; supported: {supported}")


def require_family(name: str) -> None:
    """Raise ConfigError if a value of ``model.hf_family`` is no family."""
    names = [family.name for family in FAMILIES]
    if name and name not in names:
        raise ConfigError(f"model.hf_family={name} is none of {', '.join(names)}")


def to_model_config(raw: dict[str, Any], where: str, name: str) -> tuple[Family, ModelConfig]:
    """Return family and ModelConfig of a config.json. *Raises* ConfigError listing every problem."""
    family = family_of(raw, where)
    config, problems = _read(family, raw, name)
    config.hf_family = family.name
    if problems:
        lines = (_in_its_keys(line, family, config, raw) for line in problems)
        raise ConfigError(f"{where}: " + "\n  ".join(lines))
    return family, config


def _in_its_keys(line: str, family: Family, config: ModelConfig, raw: dict[str, Any]) -> str:
    """Return an error line with keys of config.json for those of ``model`` that have their values."""
    for name in re.findall(r"model\.(\w+)", line):
        value = getattr(config, name, None)
        same = [key for key, given in raw.items() if type(given) in (int, float) and given == value]
        other = {key: _read(family, raw | {key: raw[key] + 1}, "")[0] for key in same}
        if len(found := [key for key in same if getattr(other[key], name) != value]) == 1:
            line = re.sub(rf"model\.{name}\b", found[0], line)
    return line


def to_hf_config(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """Return the family that can express the model, and its config.json without dtype and token ids.

    *Raises* ConfigError naming the keys that the nearest family cannot express, or an unknown ``hf_family``.
    """
    require_family(config.hf_family)
    if config.layer not in LAYERS.names:
        raise ConfigError(
            f"no known Hugging Face family has model.layer={config.layer}; use {' or '.join(LAYERS.names)}"
        )
    attempts = []
    for family in sorted(FAMILIES, key=lambda each: each.name != config.hf_family):
        if family.attention == config.attention:
            raw = _common_keys(family, config) | family.write(config)
            lost = _lost(config, family, raw)
            if not lost:
                return family, raw
            attempts.append((len(lost), family, lost))
    if not attempts:
        known = " or ".join(dict.fromkeys(family.attention for family in FAMILIES))
        raise ConfigError(f"no known Hugging Face family has model.attention={config.attention}; use {known}")
    _, family, lost = min(attempts, key=lambda attempt: attempt[0])
    lines = [f"no Hugging Face family can express this model; {family.name} comes nearest but for:", *lost]
    raise ConfigError("\n  ".join(lines))


def _read(family: Family, raw: dict[str, Any], name: str) -> tuple[ModelConfig, list[str]]:
    keys = Keys(raw)
    if keys.int("num_hidden_layers") > MANY_LAYERS.limit:  # families list the kinds of all layers
        keys.refuse("num_hidden_layers", raw["num_hidden_layers"], f"at most {MANY_LAYERS.limit}")
        return ModelConfig(name=name), keys.problems
    _check_quantization(family, keys)
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", *family.attention_bias)
    keys.only("attention_dropout", 0.0)
    config = ModelConfig(
        name=name,
        vocab_size=keys.int("vocab_size"),
        hidden_size=keys.int("hidden_size"),
        tie_embeddings=keys.bool("tie_word_embeddings", False),
        num_layers=keys.int("num_hidden_layers"),
        init_std=keys.float("initializer_range", 0.02),
        **family.read(keys),
    )
    if keys.problems:
        return config, [*dict.fromkeys(keys.problems)]  # a key may be read twice
    return config, model_problems(config) or _rounded_down(config)


def _rounded_down(config: ModelConfig) -> list[str]:
    fraction, head = config.rotary_fraction, config.head_dim
    ours, theirs = rotary_elements(head, fraction), int(head * fraction)  # as transformers does
    if config.attention != "gqa" or ours == theirs:
        return []
    return [
        f"model.rotary_fraction={fraction} of model.head_dim={head} is {theirs} elements for transformers, "
        f"which rounds down; use a fraction that it takes as {ours}, or another head_dim"
    ]


def _check_quantization(family: Family, keys: Keys) -> None:
    """Record each unsupported key of quantization_config as a problem."""
    found = keys.raw.get("quantization_config")
    if not found:
        return
    wanted = QUANTIZATIONS[family.quantization]
    if not isinstance(found, dict):
        keys.refuse("quantization_config", found, json.dumps(wanted))
        return
    for name, value in wanted.items():
        given = found.get(name, None if name == "quant_method" else value)
        if given not in (value, ALSO_READ.get(name, value)):
            keys.refuse(f"quantization_config.{name}", given, json.dumps(value))
    if (given := found.get("scale_fmt", "float")) not in ("float", "ue8m0"):  # powers of two, in fp32 too
        keys.refuse("quantization_config.scale_fmt", given, '"float" or "ue8m0"')


def _common_keys(family: Family, config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
    }


def _lost(config: ModelConfig, family: Family, raw: dict[str, Any]) -> list[str]:
    again, problems = _read(family, raw, config.name)
    if family.whole_heads and config.hidden_size % config.num_heads:
        problems.append(
            f"model.hidden_size={config.hidden_size} is not a multiple of model.num_heads={config.num_heads}"
            ", as transformers requires"
        )
    return [*same_function(config, again), *problems]
