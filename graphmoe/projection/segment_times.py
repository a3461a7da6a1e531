"""How long a rank takes for the segments of a layer, of one micro-batch: products, memory and exchange."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from graphmoe.config import AttentionKind, RecomputeConfig
from graphmoe.parameters import swiglu_weights
from graphmoe.projection.activations import Bytes, layer_activations, made_again
from graphmoe.projection.hardware import GPUS_PER_NODE, Card
from graphmoe.projection.products import Sides, attention_products, swiglu_products
from graphmoe.projection.rates import Rates, Share, share_at
from graphmoe.projection.sizes import Sizes

FP32 = 4
"""Bytes of an element."""


@dataclass(frozen=True)
class SegmentTime:
    """Seconds of a segment for one micro-batch."""

    name: str
    forward: float = 0.0
    inputs: float = 0.0
    """Gradients of what it reads, exchange and what is made again included."""
    weights: float = 0.0
    """Gradients of its weights."""
    exchange: float = 0.0
    """Of the forward and inputs: what waits for other ranks."""

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


class Product(NamedTuple):
    """Seconds of products: forward, and gradients of what they read and of weights."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0


@dataclass(frozen=True)
class Speeds:
    """What a card reaches, in FLOP/s and bytes/s."""

    card: Card
    rates: Rates
    adding: float = 0.0
    """Share of a step's micro-batches that add their weight gradients to those of others, 0 to 1."""

    def weights_seconds(self, flops: float, name: str, kind: float, size: float) -> float:
        """Of a product that makes weight gradients, by the rate of that name, on average of a step."""
        stored, added = (getattr(self.rates, rate) for rate in (name, f"{name}_added"))
        return (1 - self.adding) * self.seconds(flops, stored, kind, size) + self.adding * self.seconds(
            flops, added, kind, size
        )

    def stored(self, elements: float) -> float:
        """Seconds to write a weight's gradient in fp32 after it was read in fp32, and so the sum so far."""
        return (2 + self.adding) * FP32 * elements / self.hbm

    def seconds(self, flops: float, share: Share, kind: float, size: float) -> float:
        """Of a product with the sizes of `graphmoe.projection.rates.CLASSES`."""
        return flops / (self.card.tflops * 1e12 * share_at(share, kind, size))

    def dense(self, rows: float, products: Iterable[Sides]) -> Product:
        """Of products of so many rows with weights of these sides."""
        forward = weights = 0.0
        for first, second in products:
            flops, width = 2 * rows * first * second, (first * second) ** 0.5
            forward += self.seconds(flops, self.rates.dense, width, rows)
            weights += self.weights_seconds(flops, "dense_weights", width, rows)
        return Product(forward, forward, weights)

    @property
    def hbm(self) -> float:
        return self.card.hbm_tb_per_s * 1e12 * self.rates.hbm

    def exchange(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds to send so many bytes to ``ranks`` ranks alike, this one among them, ``stride`` apart."""
        if ranks == 1:
            return 0.0
        in_node = max(min(ranks, GPUS_PER_NODE // stride), 1)
        to_node = num_bytes * (in_node - 1) / ranks
        to_others = num_bytes * (ranks - in_node) / ranks
        return max(
            to_node / (self.card.node_gb_per_s * 1e9 * self.rates.node),
            to_others / (self.card.network_gb_per_s * 1e9 * self.rates.network),
        )


def layer_times(
    sizes: Sizes,
    speeds: Speeds,
    recompute: RecomputeConfig,
    index: int,
    *,
    weights_apart: bool,
    hidden: float,
) -> list[SegmentTime]:
    """Those of a layer. ``hidden``: the share of the experts' exchange that other work covers.

    ``weights_apart``: whether the experts' weight gradients are a graph of their own.
    """
    model = sizes.model
    kept = layer_activations(sizes, RecomputeConfig(), index)
    if index < model.num_dense_layers:
        times = [_attention(sizes, speeds, kept), _mlp("mlp", sizes, speeds, kept, model.dense_ffn_size)]
    else:
        times = [*_moe(sizes, speeds, kept, weights_apart=weights_apart, hidden=hidden)]
    again = made_again(sizes, recompute, index) / max(kept.total(), 1)
    return [_with_second_forward(time, again, recompute, index) for time in times] if again else times


def head_time(sizes: Sizes, speeds: Speeds, depths: int) -> SegmentTime:
    """Final norm, head and loss, once for each depth.

    Where a rank has the whole vocabulary the forward makes both gradients, and the backward scales them.
    Where ranks of tp share it, logits are written and read a few times.
    """
    model, tp, rates = sizes.model, sizes.layout.tp, speeds.rates
    d, vocabulary = model.hidden_size, model.vocab_size
    if tp == 1:
        flops = 3 * 2 * sizes.tokens * d * vocabulary
        forward = speeds.seconds(flops, rates.head, d, sizes.tokens) + 2 * sizes.state / speeds.hbm
        scaled = speeds.stored(d * vocabulary) + 3 * sizes.state / speeds.hbm
        return _scaled(SegmentTime("loss", forward, scaled), depths)
    product = speeds.dense(sizes.gathered, [(d, vocabulary / tp)])
    moved = 4 * sizes.element_bytes * sizes.gathered * vocabulary / tp / speeds.hbm
    gather = speeds.exchange(sizes.state * tp, tp)
    once = SegmentTime(
        "loss", product.forward + moved + gather, product.inputs + gather, product.weights, 2 * gather
    )
    return _scaled(once, depths)


def join_time(sizes: Sizes, speeds: Speeds) -> SegmentTime:
    """The product that joins a state and the embedding of a later token."""
    d = sizes.model.hidden_size
    product = speeds.dense(sizes.tokens, [(2 * d, d)])
    return SegmentTime(
        "embed", product.forward + 4 * sizes.state / speeds.hbm, product.inputs, product.weights
    )


def embed_time(sizes: Sizes, speeds: Speeds) -> SegmentTime:
    """The lookup, and its gradient's sum into the weight, all of which is written in fp32 and read once."""
    model, tp = sizes.model, sizes.layout.tp
    moved = 2 * sizes.state / speeds.hbm
    gather = speeds.exchange(sizes.state * tp, tp)
    gradient = speeds.stored(model.vocab_size * model.hidden_size / tp)
    return SegmentTime("embed", moved + gather, gather, 2 * moved + gradient, 2 * gather)


def _attention(sizes: Sizes, speeds: Speeds, kept: Bytes) -> SegmentTime:
    model, layout, rates = sizes.model, sizes.layout, speeds.rates
    product = speeds.dense(sizes.gathered, attention_products(model, layout.tp))
    scores = sizes.tokens * _score_flops(sizes)
    head = model.head_dim
    if model.attention is AttentionKind.mla:
        head = model.qk_nope_head_dim + model.qk_rope_head_dim
    scored = Product(
        speeds.seconds(scores, rates.attention_forward, head, sizes.seq_len),
        speeds.seconds(2 * scores, rates.attention_backward, head, sizes.seq_len),
    )
    tp = 2 * speeds.exchange(sizes.state * layout.tp, layout.tp)
    cp = speeds.exchange(_exchanged(sizes), layout.cp, layout.tp)
    return _segment("attn", [product, scored], kept["attn"], tp + cp, speeds)


def _exchanged(sizes: Sizes) -> float:
    """Bytes that a rank sends to others of cp: heads there and back, or keys and values round the ring."""
    model, layout = sizes.model, sizes.layout
    if layout.cp == 1:
        return 0.0
    if model.attention is AttentionKind.gqa:
        size, groups = model.head_dim, model.num_kv_heads
        of_heads, of_values = size, size
    else:
        size, groups = model.qk_nope_head_dim + model.qk_rope_head_dim, model.num_heads
        of_heads, of_values = size, model.v_head_dim
    here = sizes.gathered * sizes.element_bytes / layout.tp
    if layout.ring:
        return here * groups * (of_heads + of_values) * layout.cp
    keys = groups * (of_heads + of_values) if model.attention is AttentionKind.gqa else 0
    return here * (model.num_heads * (of_heads + of_values) + keys)


def _score_flops(sizes: Sizes) -> float:
    """Of one token, forward, causal."""
    model = sizes.model
    if model.attention is AttentionKind.gqa:
        return 2 * model.num_heads * 2 * model.head_dim * sizes.seq_len / 2
    head = model.qk_nope_head_dim + model.qk_rope_head_dim
    return 2 * model.num_heads * (head + model.v_head_dim) * sizes.seq_len / 2


def _mlp(name: str, sizes: Sizes, speeds: Speeds, kept: Mapping[str, float], inner: int) -> SegmentTime:
    tp = sizes.layout.tp
    product = speeds.dense(sizes.gathered, swiglu_products(sizes.model, inner, tp))
    gather = 2 * speeds.exchange(sizes.state * tp, tp)
    return _segment(name, [product], kept[name], gather, speeds)


def _moe(
    sizes: Sizes, speeds: Speeds, kept: Bytes, *, weights_apart: bool, hidden: float
) -> Iterator[SegmentTime]:
    model, rates = sizes.model, speeds.rates
    yield _attention(sizes, speeds, kept)
    gate = speeds.seconds(
        2 * sizes.tokens * model.hidden_size * model.num_experts,
        rates.router,
        model.num_experts,
        sizes.tokens,
    )
    yield _segment("moe_router", [Product(gate, gate, gate)], kept["moe_router"], 0, speeds)
    yield _segment("moe_preprocess", [], kept["moe_preprocess"], 0, speeds)
    ranks = sizes.layout.size("ep_etp")
    # by the size of what arrives, balanced; the sums go the same way back
    rows = sizes.room.rows if not sizes.is_planned else _balanced_rows(sizes)
    row_bytes = sizes.element_bytes * sizes.model.hidden_size * rows
    travel = speeds.exchange(row_bytes, ranks) * (1 - hidden)
    moved = row_bytes if ranks > 1 else 0
    yield _segment("moe_dispatch", [], moved, travel, speeds)
    if model.shared_ffn_size:
        yield _mlp("shared_experts", sizes, speeds, kept, model.shared_ffn_size)
    experts = _experts(sizes, speeds)
    if not weights_apart:
        experts = Product(experts.forward, experts.inputs + experts.weights)
    yield _segment("moe_experts", [experts], 0, 0, speeds)
    yield _segment("moe_combine", [], moved + 2 * sizes.state, travel, speeds)


def _experts(sizes: Sizes, speeds: Speeds) -> Product:
    """What a rank's experts compute of the slots that it gets, balanced."""
    model, rates = sizes.model, speeds.rates
    flops = 2 * sizes.tokens * model.top_k * swiglu_weights(model, model.expert_ffn_size)
    inner = model.expert_ffn_size / sizes.layout.etp
    slots = sizes.tokens * model.top_k * sizes.layout.size("ep_etp")
    of_expert = slots / model.num_experts
    forward = speeds.seconds(flops, rates.grouped, inner, of_expert)
    weights = speeds.weights_seconds(flops, "grouped_weights", inner, of_expert)
    return Product(forward, forward, weights)


def _balanced_rows(sizes: Sizes) -> float:
    blocks = min(sizes.model.top_k, sizes.layout.ep)
    return sizes.tokens * blocks * sizes.layout.etp


def _segment(
    name: str, products: Iterable[Product], kept: float, exchange: float, speeds: Speeds
) -> SegmentTime:
    """What is kept is written once and read twice over forward and backward, and so are its gradients."""
    moved, launch = kept / speeds.hbm, speeds.rates.segment_us * 1e-6
    forward, inputs, weights = (sum(seconds) for seconds in zip(Product(), *products, strict=True))
    return SegmentTime(
        name,
        forward + 1.5 * moved + exchange + launch,
        inputs + 2 * moved + exchange + launch,
        weights,
        2 * exchange,
    )


def _with_second_forward(
    time: SegmentTime, again: float, recompute: RecomputeConfig, index: int
) -> SegmentTime:
    """The backward with what it computes again: a segment named, or else the share of what is not kept."""
    if time.name in ("moe_dispatch", "moe_combine"):
        return time
    if recompute.segments:
        share = 1.0 if time.name in recompute.segments else 0.0
    elif recompute.ops:
        share = again
    else:
        share = 1.0
    extra = share * (time.forward - time.exchange / 2)
    return SegmentTime(time.name, time.forward, time.inputs + extra, time.weights, time.exchange)


def _scaled(time: SegmentTime, by: int) -> SegmentTime:
    return SegmentTime(time.name, time.forward * by, time.inputs * by, time.weights * by, time.exchange * by)
