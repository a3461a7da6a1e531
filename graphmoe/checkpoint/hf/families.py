"""Hugging Face model families that graphmoe reads and writes: keys of config.json, names of tensors."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from graphmoe.checkpoint.hf import deepseek, grouped_query
from graphmoe.checkpoint.hf.keys import Keys
from graphmoe.checkpoint.hf.tensor_files import QUANTIZATION, WHOLE, Index
from graphmoe.config.choices import LAYERS
from graphmoe.config.schema import ConfigError, GroupScore, ModelConfig
from graphmoe.plan.attention import keys_of_other_scalings, keys_of_others
from graphmoe.plan.experts import EXPERT_KEYS
from graphmoe.plan.rules.model import model_problems


@dataclass(frozen=True)
class Family:
    """Configuration format and tensor names of a model family."""

    # model_type in config.json
    name: str
    architecture: str
    attention: str
    # our name of each attention tensor, keyed by its published name
    attention_names: Callable[[ModelConfig], dict[str, str]]
    read: Callable[[Keys], dict[str, Any]]
    # the nearest config.json, which may not express all of the model
    write: Callable[[ModelConfig], dict[str, Any]]
    # a MoE block inside its layer
    moe: str = "mlp"
    # matrices of a routed expert; None if a layer's experts are one tensor
    gate_up_down: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    # other model_types with the same code
    aliases: tuple[str, ...] = ()


LATENT = "mla", deepseek.attention_names
GROUPED = "gqa", grouped_query.attention_names
FAMILIES = (
    Family("deepseek_v2", "DeepseekV2ForCausalLM", *LATENT, deepseek.read_v2, deepseek.write_v2),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", *LATENT, deepseek.read_v3, deepseek.write_v3,
        aliases=("kimi_k2",),
    ),
    Family("llama", "LlamaForCausalLM", *GROUPED, grouped_query.read_llama, grouped_query.write_llama),
    Family("qwen3", "Qwen3ForCausalLM", *GROUPED, grouped_query.read_qwen3, grouped_query.write_qwen3),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", *GROUPED, grouped_query.read_qwen3_moe,
        grouped_query.write_qwen3_moe,
    ),
    Family(
        "mixtral", "MixtralForCausalLM", *GROUPED, grouped_query.read_mixtral, grouped_query.write_mixtral,
        moe="block_sparse_moe", gate_up_down=("w1", "w3", "w2"),
    ),
)  # fmt: skip
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FUSED = ".mlp.experts.gate_up_proj"
"""Suffix of a tensor's name in folders of transformers 5, which store a layer's experts as one tensor."""
TRAINING_KEYS = {"name", "attention_backend", "bias_update_rate", "aux_loss", "aux_loss_coef"}
TRAINING_KEYS |= {"z_loss_coef", "mtp_loss_weight", "init_std", "peak_lr"}
"""ModelConfig keys that config.json lacks, or that only training uses."""


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


def to_model_config(raw: dict[str, Any], where: str, name: str) -> tuple[Family, ModelConfig]:
    """Return family and ModelConfig of a config.json. *Raises* ConfigError listing every problem."""
    family = family_of(raw, where)
    config, problems = _read(family, raw, name)
    if problems:
        lines = [f"{where} cannot be represented:", *problems]
        raise ConfigError("\n  ".join(lines))
    return family, config


def to_hf_config(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """Return the family that can express the model, and its config.json without dtype and token ids.

    *Raises* ConfigError naming the keys that the nearest family cannot express.
    """
    if config.layer not in LAYERS.names:
        raise ConfigError(
            f"no known Hugging Face family has model.layer={config.layer}; use {' or '.join(LAYERS.names)}"
        )
    attempts = []
    for family in FAMILIES:
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


def _read(family: Family, raw: dict[str, Any], name: str) -> tuple[ModelConfig, list[str]]:
    keys = Keys(raw)
    _check_quantization(keys)
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
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
    return config, model_problems(config)


def _check_quantization(keys: Keys) -> None:
    """Record each unsupported key of quantization_config as a problem."""
    found = keys.raw.get("quantization_config")
    if found and not isinstance(found, dict):
        keys.refuse("quantization_config", found, json.dumps(QUANTIZATION))
    elif found:
        for name, value in QUANTIZATION.items():
            given = found.get(name, None if name == "quant_method" else value)
            if given != value:
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
    if family.name in ("llama", "deepseek_v2") and config.hidden_size % config.num_heads:
        problems.append(
            f"model.hidden_size={config.hidden_size} is not a multiple of model.num_heads={config.num_heads}"
            ", as transformers requires"
        )
    return [*same_function(config, again), *problems]


def _effective(config: ModelConfig) -> dict[str, Any]:
    keys = dataclasses.asdict(config)
    dropped = TRAINING_KEYS | keys_of_others(config) | keys_of_other_scalings(config)
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
    if config.num_dense_layers == 0:
        dropped.add("dense_ffn_size")
    return {key: value for key, value in keys.items() if key not in dropped}


@dataclass(frozen=True)
class Piece:
    """A tensor of a published folder, by name: ``theirs`` equals ``ours[index]`` of our model bitwise."""

    theirs: str
    ours: str
    index: Index = WHOLE
    # another published tensor that this one must equal; folders may omit the copy
    repeats: str | None = None
    # False if our folders omit it
    written: bool = True


def pieces(family: Family, config: ModelConfig, *, fused: bool = False) -> list[Piece]:
    """Return all tensors of a published folder; those without ``repeats`` cover each element of ours once."""
    if fused:
        family = replace(family, moe="mlp", gate_up_down=None)
    found = [
        Piece(EMBEDDING, "embed.weight"),
        Piece("model.norm.weight", "loss_head.norm.weight"),
        _head(config),
    ]
    for i in range(config.num_layers):
        found += _layer(family, config, f"model.layers.{i}", f"layers.{i}", dense=i < config.num_dense_layers)
    for k in range(config.mtp_depth):
        found += _mtp(family, config, f"model.layers.{config.num_layers + k}", f"mtp.{k}")
    return found


def _head(config: ModelConfig) -> Piece:
    if config.tie_embeddings:
        return Piece(HEAD, "embed.weight", repeats=EMBEDDING, written=False)
    return Piece(HEAD, "loss_head.head.weight")


def _mtp(family: Family, config: ModelConfig, theirs: str, ours: str) -> Iterator[Piece]:
    """Yield the tensors of a multi-token-prediction layer, with its copies of embedding and head."""
    head = _head(config)
    yield Piece(f"{theirs}.embed_tokens.weight", "embed.weight", repeats=EMBEDDING)
    yield Piece(f"{theirs}.enorm.weight", f"{ours}.embed_norm.weight")
    yield Piece(f"{theirs}.hnorm.weight", f"{ours}.hidden_norm.weight")
    yield Piece(f"{theirs}.eh_proj.weight", f"{ours}.proj.weight")
    yield from _layer(family, config, theirs, f"{ours}.layer", dense=False)
    yield Piece(f"{theirs}.shared_head.norm.weight", f"{ours}.norm.weight")
    yield Piece(f"{theirs}.shared_head.head.weight", head.ours, repeats=head.repeats or head.theirs)


def _layer(family: Family, config: ModelConfig, theirs: str, ours: str, *, dense: bool) -> Iterator[Piece]:
    for their_name, our_name in family.attention_names(config).items():
        yield Piece(f"{theirs}.self_attn.{their_name}.weight", f"{ours}.attn.{our_name}.weight")
    yield Piece(f"{theirs}.input_layernorm.weight", f"{ours}.attn.norm.weight")
    block = f"{theirs}.{family.moe}"
    their_norm = f"{theirs}.post_attention_layernorm.weight"
    if dense:
        yield Piece(their_norm, f"{ours}.mlp.norm.weight")
        yield from _swiglu(block, f"{ours}.mlp", config.dense_ffn_size)
        return
    yield Piece(their_norm, f"{ours}.moe_router.norm.weight")
    yield Piece(f"{block}.gate.weight", f"{ours}.moe_router.gate.weight")
    if config.selection_bias:
        yield Piece(f"{block}.gate.e_score_correction_bias", f"{ours}.moe_router.selection_bias")
    if config.shared_ffn_size:
        yield from _swiglu(f"{block}.shared_experts", f"{ours}.shared_experts", config.shared_ffn_size)
    yield from _experts(family, config, block, f"{ours}.moe_experts")


def _experts(family: Family, config: ModelConfig, block: str, ours: str) -> Iterator[Piece]:
    if family.gate_up_down is None:
        yield Piece(f"{block}.experts.gate_up_proj", f"{ours}.w_gate_up")
        yield Piece(f"{block}.experts.down_proj", f"{ours}.w_down")
        return
    gate, up, down = family.gate_up_down
    width = config.expert_ffn_size
    for e in range(config.num_experts):
        expert = f"{block}.experts.{e}"
        yield Piece(f"{expert}.{gate}.weight", f"{ours}.w_gate_up", (e, slice(0, width)))
        yield Piece(f"{expert}.{up}.weight", f"{ours}.w_gate_up", (e, slice(width, 2 * width)))
        yield Piece(f"{expert}.{down}.weight", f"{ours}.w_down", (e,))


def _swiglu(theirs: str, ours: str, width: int) -> Iterator[Piece]:
    yield Piece(f"{theirs}.gate_proj.weight", f"{ours}.gate_up.weight", (slice(0, width),))
    yield Piece(f"{theirs}.up_proj.weight", f"{ours}.gate_up.weight", (slice(width, 2 * width),))
    yield Piece(f"{theirs}.down_proj.weight", f"{ours}.down.weight")
