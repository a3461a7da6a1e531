"""Sizes and supported options of each kind of attention (`AttentionFacts`); defaults suit a plug-in."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from graphmoe.config.choices import look_up
from graphmoe.config.schema import LinearAttention, ModelConfig, RopeScaling
from graphmoe.plan.layout import divisors

MAX_MASKED_HEAD = 256  # elements of a head in `ops.attention_kernels`
GROUPED_OPTIONS = (
    "qk_norm", "qk_norm_weight", "qk_norm_whole", "window", "full_every", "attention_chunk", "nope_every",
    "attention_temperature_floor", "attention_sinks", "attention_gate", "attention_bias",
)  # fmt: skip
"""Keys of ``model`` that another attention than gqa refuses unless they have their defaults."""
LINEAR_HEADS = (16, 32, 64, 128)  # those in `ops.delta_net.kernels`
LINEAR_CHUNK = 64  # positions that these compute at once


class Weight(NamedTuple):
    """Name, input width and output width of an attention projection."""

    name: str
    rows: int
    """Input width; in the last GEMM that of all value heads."""
    columns: int
    """Output width; sharded over tp, except in the last GEMM."""


class Latents(NamedTuple):
    """Widths of MLA's latents: tp gathers latents instead of the normed input, cp instead of keys, values."""

    queries: int
    """Width that queries are computed from; 0 if that is the normed input."""
    keys: int
    """Width that keys and values are computed from, without the shared rotary part of a key."""


@dataclass(frozen=True)
class AttentionFacts:
    head: int
    value: int
    rotary: int
    """Elements of a head that have rotary embedding."""
    weights: tuple[Weight, ...]
    """The last projects value heads to the output; the others make queries, keys and values."""
    kv_heads: int | None = None
    """Number of key-value heads; None if equal to that of query heads."""
    normed_heads: int = 0
    """Number of query and key heads with their own norm, whose inputs are saved."""
    latents: Latents | None = None
    up: tuple[str, ...] = ()
    """Weights that compute heads from latents; ``recompute.ops=[mla_up_proj]`` recomputes these heads."""
    axes: tuple[str, ...] = ()
    """Supported axes among tp and cp."""
    documents: bool = False
    """True if ``forward`` takes first_BS, int32 [B, S]: the first position that each position attends to."""
    kept: int | None = None
    """Further saved elements of a token, sharded over tp, besides queries, keys, values, result and inputs
    of `normed_heads`; None: unknown.
    """
    recurrence: int = 0
    """Forward FLOPs of one token's reads and writes of a state, in place of keys; 0: it attends to keys."""
    keys: tuple[str, ...] = ()
    """Keys of ``model`` that this kind reads and another may not."""
    problems: tuple[str, ...] = ()


def attention_facts(model: ModelConfig) -> AttentionFacts:
    return look_up(FACTS, model.attention, "model.attention", attribute="facts")(model)


def no_effect(given: str, because: str, use: str) -> str:
    """Return the error that a key of ``model`` has no effect: key=value, that which rules it out, a value."""
    return f"model.{given} has no effect with model.{because}; use model.{given.partition('=')[0]}={use}"


def is_hybrid(model: ModelConfig) -> bool:
    return model.linear_attention is not LinearAttention.none


def is_linear(model: ModelConfig, index: int) -> bool:
    """Return whether a layer has ``linear_attention``; layers of multi-token prediction see all keys."""
    if not is_hybrid(model) or index >= model.num_layers:
        return False
    return model.full_every < 1 or (index + 1) % model.full_every != 0


def model_of_layer(model: ModelConfig, index: int) -> ModelConfig:
    """Return the configuration of one layer.

    ``window=0`` or ``attention_chunk=0`` if it sees all keys, ``rotary_fraction=0`` without rotary embedding.
    With ``linear_attention``, ``attention`` is the kind of the layer, and all layers of the result are alike.
    """
    if _is_nope(model, index):
        normed = model.qk_norm and norms_heads(model, index)
        model = replace(model, rotary_fraction=0.0, qk_norm=normed, attention_chunk=0)
    if is_hybrid(model):
        kind = model.linear_attention.value if is_linear(model, index) else model.attention
        return replace(model, attention=kind, linear_attention=LinearAttention.none, full_every=0)
    return replace(model, window=0, full_every=0) if _is_nth(index, model.full_every) else model


def norms_heads(model: ModelConfig, index: int) -> bool:
    """Return whether a layer has the model's norms of heads: without weights, if it has rotary embedding."""
    return model.qk_norm_weight or not _is_nope(model, index)


def masks_of_layers(model: ModelConfig, seq_len: int) -> Counter[tuple[int, int]]:
    """Return the number of layers with each window and chunk, 0 if that is no less than the sequence.

    Layers with ``linear_attention`` attend to no keys, and are not counted.
    """
    masks = (_mask(model, i) for i in range(model.num_layers) if not is_linear(model, i))
    return Counter((w if w < seq_len else 0, c if c < seq_len else 0) for w, c in masks)


def _mask(model: ModelConfig, index: int) -> tuple[int, int]:
    window = 0 if _is_nth(index, model.full_every) else model.window
    return window, 0 if _is_nope(model, index) else model.attention_chunk


def _is_nope(model: ModelConfig, index: int) -> bool:
    return index < model.num_layers and _is_nth(index, model.nope_every)


def _is_nth(index: int, every: int) -> bool:
    return every > 0 and (index + 1) % every == 0


def keys_per_query(model: ModelConfig, seq_len: int) -> float:
    """Return the mean number of keys that a query sees, over all layers; half the sequence if causal."""
    total = 0.0
    for (window, chunk), layers in masks_of_layers(model, seq_len).items():
        seen = seq_len / 2
        if window:
            seen = window - window**2 / (2 * seq_len)
        if chunk:
            seen = (seq_len // chunk * chunk**2 + (seq_len % chunk) ** 2) / (2 * seq_len)
        total += layers * seen
    return total / model.num_layers


def keys_of_others(model: ModelConfig) -> set[str]:
    """Return the keys of ``model`` that only other kinds of attention read; none for a plug-in."""
    if model.attention not in FACTS:
        return set()
    every = {key for facts in FACTS.values() for key in facts(model).keys}
    return every - {*attention_facts(model).keys}


def keys_of_other_scalings(model: ModelConfig) -> set[str]:
    """Return the keys of ``model`` that only other values of ``rope_scaling`` read."""
    prefixes = tuple(f"{kind}_" for kind in RopeScaling if kind is not model.rope_scaling)
    return {field.name for field in fields(model) if field.name.startswith(prefixes)}


def rotary_elements(head: int, fraction: float) -> int:
    """Return the elements of a head that have rotary embedding; 0 for a fraction out of its range."""
    return round(head * fraction) if 0 < fraction <= 1 else 0


def _latent(model: ModelConfig) -> AttentionFacts:
    width, heads, rope, value = (
        model.hidden_size, model.num_heads, model.qk_rope_head_dim, model.v_head_dim,
    )  # fmt: skip
    head, rank, latent = model.qk_nope_head_dim + rope, model.q_lora_rank, model.kv_lora_rank
    queries = [Weight("q_proj", width, heads * head)]
    if rank:
        queries = [Weight("q_down", width, rank), Weight("q_up", rank, heads * head)]

    def problems() -> Iterator[str]:
        if rope % 2:
            yield f"model.qk_rope_head_dim={rope} must be even for the rotary embedding"
        default = type(model)()
        if 0 < model.rotary_fraction < 1:
            yield (
                f"model.rotary_fraction={model.rotary_fraction:g} applies to model.attention=gqa only; use "
                "model.rotary_fraction=1.0"
            )
        for key in GROUPED_OPTIONS:
            value, usual = getattr(model, key), getattr(default, key)
            if value != usual and (isinstance(value, str | bool) or value > 0):
                how = (f"model.{key}={str(each).lower()}" for each in (value, usual))
                yield f"{next(how)} applies to model.attention=gqa only; use {next(how)}"

    return AttentionFacts(
        head,
        value,
        rope,
        (
            *queries,
            Weight("kv_down", width, latent + rope),
            Weight("kv_up", latent, heads * (model.qk_nope_head_dim + value)),
            Weight("out_proj", heads * value, width),
        ),
        latents=Latents(rank, latent),
        up=(queries[-1].name, "kv_up"),
        axes=("tp", "cp"),
        documents=True,
        kept=0,
        keys=("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        problems=tuple(problems()),
    )


def _grouped(model: ModelConfig) -> AttentionFacts:
    width, heads, groups, head = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    fraction = model.rotary_fraction
    rotary = rotary_elements(head, fraction)

    def problems() -> Iterator[str]:
        if heads > 0 and (groups < 1 or heads % groups):
            yield (
                f"model.num_kv_heads={groups} does not divide model.num_heads={heads}; "
                f"use one of {divisors(heads)}"
            )
        if head % 2:
            yield f"model.head_dim={head} must be even for the rotary embedding"
        elif fraction <= 1 and (rotary < 2 or rotary % 2 or abs(head * fraction - rotary) > 1e-4):
            yield (
                f"model.rotary_fraction={fraction:g} must make an even number of elements, 2 to {head}, of "
                f"model.head_dim={head}; use 1, or n / {head} with an even n"
            )
        if model.qk_norm_whole and not model.qk_norm:
            yield no_effect("qk_norm_whole=true", "qk_norm=false", "false")
        if is_hybrid(model):
            yield from _delta_net_problems(model)
        elif model.full_every and not model.window:
            yield no_effect(f"full_every={model.full_every}", "window=0", "0")
        elif model.full_every and not 2 <= model.full_every <= model.num_layers:
            yield (
                f"model.full_every={model.full_every} must be 0 or 2 to model.num_layers={model.num_layers}; "
                "with 1 no layer would have the window"
            )
        yield from _without_rotary_problems(model)
        for key in ("window", "attention_chunk"):
            if head > MAX_MASKED_HEAD and (value := getattr(model, key)):
                yield (
                    f"model.{key}={value} has kernels for heads up to {MAX_MASKED_HEAD}, and "
                    f"model.head_dim={head}; use model.{key}=0, or model.head_dim={MAX_MASKED_HEAD}"
                )

    return AttentionFacts(
        head,
        head,
        rotary,
        (
            Weight("q_proj", width, heads * head * (2 if model.attention_gate else 1)),
            Weight("k_proj", width, groups * head),
            Weight("v_proj", width, groups * head),
            Weight("out_proj", heads * head, width),
        ),
        kv_heads=groups,
        normed_heads=heads + groups if model.qk_norm else 0,
        axes=("tp", "cp"),
        documents=True,
        kept=2 * heads * head if model.attention_gate else 0,  # the gate, and the result before it
        keys=(
            *("num_kv_heads", "head_dim", "rotary_fraction", *GROUPED_OPTIONS),
            *(
                "attention_temperature_scale",
                "linear_attention",
                *(DELTA_NET_KEYS if is_hybrid(model) else ()),
            ),
        ),
        problems=tuple(problems()),
    )


def _without_rotary_problems(model: ModelConfig) -> Iterator[str]:
    every, floor, scale = (
        model.nope_every, model.attention_temperature_floor, model.attention_temperature_scale,
    )  # fmt: skip
    if not model.qk_norm_weight and not model.qk_norm:
        yield no_effect("qk_norm_weight=false", "qk_norm=false", "true")
    if not model.qk_norm_weight and model.qk_norm_whole:
        yield "model.qk_norm_whole=true has weights, and model.qk_norm_weight=false none; use one of them"
    if model.attention_chunk and model.window:
        yield (
            f"model.attention_chunk={model.attention_chunk} and model.window={model.window} both limit the "
            "keys; use model.attention_chunk=0 or model.window=0"
        )
    if every and not 2 <= every <= model.num_layers:
        yield (
            f"model.nope_every={every} must be 0 or 2 to model.num_layers={model.num_layers}; with 1 no "
            "layer would have rotary embedding"
        )
    if floor and not every:
        yield no_effect(f"attention_temperature_floor={floor}", "nope_every=0", "0")
    usual = type(model).attention_temperature_scale
    if scale != usual and not floor:
        given = f"attention_temperature_scale={scale:g}"
        yield no_effect(given, "attention_temperature_floor=0", f"{usual:g}")


DELTA_NET_KEYS = (
    *("linear_key_heads", "linear_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_taps", "delta_net_backend"),
)


def _delta_net_problems(model: ModelConfig) -> Iterator[str]:
    keys, values = model.linear_key_heads, model.linear_value_heads
    if values % max(keys, 1):
        below = values - values % keys
        yield (
            f"model.linear_value_heads={values} is not a multiple of model.linear_key_heads={keys}; "
            f"use model.linear_value_heads={below or keys}"
        )
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        if (size := getattr(model, key)) not in LINEAR_HEADS:
            yield f"model.{key}={size} has no kernels; use {', '.join(map(str, LINEAR_HEADS))}"
    kind = f"model.linear_attention={model.linear_attention.value}"
    if not 2 <= model.full_every <= model.num_layers:
        yield (
            f"model.full_every={model.full_every} must be 2 to model.num_layers={model.num_layers} with "
            f"{kind}, so that there are layers of both kinds"
        )
    if model.window:
        yield f"model.window={model.window} has no layer to apply to with {kind}; use model.window=0"


def _delta_net(model: ModelConfig) -> AttentionFacts:
    width, key, value = model.hidden_size, model.linear_key_head_dim, model.linear_value_head_dim
    keys, heads = model.linear_key_heads * key, model.linear_value_heads
    values = heads * value
    return AttentionFacts(
        key,
        value,
        0,
        (
            Weight("q_proj", width, keys),
            Weight("k_proj", width, keys),
            Weight("v_proj", width, values),
            Weight("gate_proj", width, values),
            Weight("beta_proj", width, heads),
            Weight("decay_proj", width, heads),
            Weight("out_proj", values, width),
        ),
        axes=("tp",),
        documents=True,
        # before and after the convolution, the gate; then norms, decays and beta, some of them in fp32
        kept=2 * (2 * keys + values) + values + 4 * model.linear_key_heads + 7 * heads,
        recurrence=heads * key * value * 6,
        keys=DELTA_NET_KEYS,
    )


# delta_net is the kind of some layers only (`model_of_layer`)
FACTS: dict[str, Callable[[ModelConfig], AttentionFacts]] = {
    "mla": _latent, "gqa": _grouped, "delta_net": _delta_net
}  # fmt: skip
