"""Facts of the kinds of attention, a table: rules, costs, projections and formats ask it.

The modules stand in the table `graphmoe.model.attention.KINDS`. The defaults of the facts are those of a
user's own attention, which says only what it has and can.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from graphmoe.config.choices import look_up
from graphmoe.config.schema import ModelConfig
from graphmoe.plan.layout import divisors


class Weight(NamedTuple):
    """A matrix of attention: a product of each token."""

    name: str
    rows: int
    """Elements that it reads of a token; in the last product those of all value heads."""
    columns: int
    """Elements that it makes of a token; but for the last product ranks of tp share them."""


class Latents(NamedTuple):
    """Compressed states, which ranks gather in place of the normed input, or of keys and values along cp."""

    queries: int
    """Elements that queries are made of; 0 where they are made of the normed input."""
    keys: int
    """Elements that keys and values are made of. The rotated part of a key, which heads share, is beside."""


@dataclass(frozen=True)
class AttentionFacts:
    """Sizes and abilities of a model's attention."""

    head: int
    """Elements of a query or key head."""
    value: int
    """Elements of a value head."""
    rotary: int
    """Elements of a head that the rotary embedding turns."""
    weights: tuple[Weight, ...]
    """The last makes the result of the values of all heads, the others queries, keys and values."""
    kv_heads: int | None = None
    """``model.num_kv_heads``; None where there are as many heads of keys and values as of queries."""
    normed_heads: int = 0
    """Heads of queries and keys with norms of their own, whose inputs are kept for the backward too."""
    latents: Latents | None = None
    up: tuple[str, ...] = ()
    """Weights that make heads of latents: ``recompute.ops=[mla_up_proj]`` computes these heads again."""
    axes: tuple[str, ...] = ()
    """Axes, of tp and cp, whose ranks can share it."""
    kept: int | None = None
    """Elements of a token, shared along tp, that its backward reads beside queries, keys, values, result and
    those of `normed_heads`; None where it is not known, and no memory is projected."""
    keys: tuple[str, ...] = ()
    """Keys of ``model`` that not all kinds read, and this one does."""
    problems: tuple[str, ...] = ()
    """Violated rules of the model."""


def attention_facts(model: ModelConfig) -> AttentionFacts:
    """Return the facts of a model's attention."""
    return look_up(FACTS, model.attention, "model.attention", attribute="facts")(model)


def keys_of_others(model: ModelConfig) -> set[str]:
    """Return the keys that only other kinds of attention read; of a user's own all may be its."""
    if model.attention not in FACTS:
        return set()
    every = {key for facts in FACTS.values() for key in facts(model).keys}
    return every - {*attention_facts(model).keys}


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
        if model.qk_norm:
            yield "model.qk_norm=true applies to model.attention=gqa only; use qk_norm=false"

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
        kept=0,
        keys=("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        problems=tuple(problems()),
    )


def _grouped(model: ModelConfig) -> AttentionFacts:
    width, heads, groups, head = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim

    def problems() -> Iterator[str]:
        if groups < 1 or heads % max(groups, 1):
            yield (
                f"model.num_kv_heads={groups} does not divide model.num_heads={heads}; "
                f"use one of {divisors(heads)}"
            )
        if head % 2:
            yield f"model.head_dim={head} must be even for the rotary embedding"

    return AttentionFacts(
        head,
        head,
        head,
        (
            Weight("q_proj", width, heads * head),
            Weight("k_proj", width, groups * head),
            Weight("v_proj", width, groups * head),
            Weight("out_proj", heads * head, width),
        ),
        kv_heads=groups,
        normed_heads=heads + groups if model.qk_norm else 0,
        axes=("tp", "cp"),
        kept=0,
        keys=("num_kv_heads", "head_dim", "qk_norm"),
        problems=tuple(problems()),
    )


FACTS: dict[str, Callable[[ModelConfig], AttentionFacts]] = {
    "mla": _latent,
    "gqa": _grouped,
}
