"""Seconds of the products, scores and exchange in a layer's segments, for one micro-batch."""

import functools
from dataclasses import dataclass

from graphmoe.config.schema import ModelConfig
from graphmoe.plan.attention import attention_facts
from graphmoe.plan.costs.hardware import GPUS_PER_NODE
from graphmoe.plan.costs.rates import FP32, Product, Speeds
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.experts import balanced_load


@dataclass(frozen=True)
class AttentionParts:
    """Seconds of the parts of attn.

    Exchange counts as far as ranks wait for it; one number stands for the forward and for the backward.
    """

    before: Product
    """Products that make queries, keys and values."""
    up: Product
    """Products among those of ``before`` that are ``mla_up_proj``."""
    scores: Product
    """Attention's own products."""
    after: Product
    """The last product."""
    gather: float
    """Exchange before the products: along tp, and of latents along cp where heads are exchanged."""
    scatter: float
    """Exchange after the last product, along tp."""
    heads: float
    """Exchange of positions for heads along cp, and back."""
    ring: tuple[float, float]
    """Exchange round the ring, forward and backward, that the products of blocks do not cover."""

    @property
    def exchange(self) -> tuple[float, float]:
        """Seconds of all exchange, forward and backward."""
        both = self.gather + self.scatter + self.heads
        return both + self.ring[0], both + self.ring[1]


@functools.lru_cache(maxsize=1024)
def attention_parts(sizes: Sizes, speeds: Speeds) -> AttentionParts:
    """Compute the parts of attn.

    A rank multiplies its own tokens by the whole weight of latents; here all tokens are multiplied by a part
    of that weight, which is the same work.
    """
    facts, rates, tp = sizes.attention, speeds.rates, sizes.layout.tp
    *weights, last = facts.weights
    before = {name: (rows, columns / tp) for name, rows, columns in weights}
    up = [sides for name, sides in before.items() if name in facts.up]
    flops = sizes.tokens * attention_scores(sizes.model, sizes.seq_len)
    scores = Product(
        speeds.seconds(flops, rates.attention_forward, facts.head, sizes.seq_len),
        speeds.seconds(2 * flops, rates.attention_backward, facts.head, sizes.seq_len),
    )
    return AttentionParts(
        speeds.dense(sizes.gathered, before.values()),
        speeds.dense(sizes.gathered, up),
        scores,
        speeds.dense(sizes.gathered, [(last.rows / tp, last.columns)]),
        _latents_gathered(sizes, speeds) if facts.latents else along_tp(sizes, speeds),
        along_tp(sizes, speeds),
        _heads_exchanged(sizes, speeds),
        _ring(sizes, speeds, scores),
    )


def along_tp(sizes: Sizes, speeds: Speeds) -> float:
    """Seconds to gather the residual stream along tp, or to sum and scatter it."""
    return speeds.gather(sizes.state * sizes.layout.tp, sizes.layout.tp)


@functools.lru_cache(maxsize=1024)
def swiglu(sizes: Sizes, speeds: Speeds, inner: int) -> tuple[Product, Product]:
    """Time gate and up, and down, of a dense MLP or the shared experts."""
    width, own = sizes.model.hidden_size, inner / sizes.layout.tp
    gate_up, down = (width, 2 * inner / sizes.layout.tp), (own, width)
    return speeds.dense(sizes.gathered, [gate_up]), speeds.dense(sizes.gathered, [down])


@functools.lru_cache(maxsize=1024)
def gate(sizes: Sizes, speeds: Speeds) -> Product:
    """Time the router's product, in fp32."""
    model = sizes.model
    flops = 2 * sizes.tokens * model.hidden_size * model.num_experts
    seconds = speeds.seconds(flops, speeds.rates.router, model.num_experts, sizes.tokens)
    return Product(seconds, seconds, seconds)


@functools.lru_cache(maxsize=1024)
def experts(sizes: Sizes, speeds: Speeds) -> Product:
    """Time the products of a rank's experts under balanced routing; gate and up take two thirds."""
    model, rates = sizes.model, speeds.rates
    flops = 2 * sizes.tokens * model.top_k * swiglu_weights(model, model.expert_ffn_size)
    inner = model.expert_ffn_size / sizes.layout.etp
    of_expert = sizes.tokens * model.top_k * sizes.layout.size("ep_etp") / model.num_experts
    forward = speeds.seconds(flops, rates.grouped, inner, of_expert)
    weights = speeds.weights_seconds(flops, "grouped_weights", inner, of_expert)
    return Product(forward, forward, weights)


def travelling_bytes(sizes: Sizes) -> float:
    """Bytes of the tokens that arrive at a rank under balanced routing, its own among them.

    The sums that go back are as large. Blocks of copy engines travel whole.
    """
    ranks = sizes.layout.size("ep_etp")
    rows = balanced_load(sizes.model, sizes.layout, sizes.tokens).rows
    return sizes.element_bytes * sizes.model.hidden_size * (ranks * sizes.block if sizes.block else rows)


def _latents_gathered(sizes: Sizes, speeds: Speeds) -> float:
    tp, latents = sizes.layout.tp, sizes.attention.latents
    assert latents is not None
    of_queries, of_keys = latents.queries or sizes.model.hidden_size, latents.keys + sizes.attention.rotary
    if sizes.exchanging == 1:
        return speeds.gather(sizes.element_bytes * sizes.gathered * (of_queries + of_keys), tp)
    return speeds.gather(sizes.element_bytes * sizes.gathered * of_queries, tp) + speeds.gather(
        sizes.element_bytes * sizes.attended * of_keys, tp * sizes.exchanging
    )


def _heads_exchanged(sizes: Sizes, speeds: Speeds) -> float:
    """Seconds to send queries and get results back; keys and values go too where no latents were gathered."""
    facts, tp = sizes.attention, sizes.layout.tp
    heads = sizes.model.num_heads + (0 if facts.latents else sizes.kv_heads)
    here = sizes.element_bytes * sizes.gathered / tp
    return speeds.exchange(here * (heads * (facts.head + facts.value)), sizes.exchanging, tp)


def _ring(sizes: Sizes, speeds: Speeds, scores: Product) -> tuple[float, float]:
    """Seconds of a ring, forward and backward, that its products do not cover.

    Each block goes on to the next rank while the products with it run; backward, its fp32 gradients go too.
    The last gradients go home when all products are done (`graphmoe.ops.ring_attention`).
    """
    facts, layout, e = sizes.attention, sizes.layout, sizes.element_bytes
    if not layout.ring:
        return 0.0, 0.0
    block = e * sizes.gathered / layout.tp * sizes.kv_heads * (facts.head + facts.value)
    passing = speeds.pass_on(block, in_node=layout.cp * layout.tp <= GPUS_PER_NODE)
    gradients, steps = passing * FP32 / e, layout.cp - 1
    forward = steps * max(passing - scores.forward / layout.cp, 0.0)
    backward = steps * max(passing + gradients - scores.inputs / layout.cp, 0.0) + gradients
    return forward, backward


def swiglu_weights(model: ModelConfig, ffn_size: int) -> int:
    """Weights of one SwiGLU MLP: gate, up and down."""
    return 3 * model.hidden_size * ffn_size


def attention_scores(model: ModelConfig, seq_len: int) -> int:
    """Forward FLOPs of one token's scores and weighted values in one layer, causal."""
    facts = attention_facts(model)
    return 2 * model.num_heads * (facts.head + facts.value) * seq_len // 2
