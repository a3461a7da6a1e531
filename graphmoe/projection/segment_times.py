"""How long a rank takes for the segments of a layer, of one micro-batch: products, memory and exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graphmoe.config import AttentionKind, RecomputeConfig
from graphmoe.parameters import attention_weights, swiglu_weights
from graphmoe.projection.activations import Bytes, layer_activations, made_again
from graphmoe.projection.hardware import GPUS_PER_NODE, Card
from graphmoe.projection.rates import Rates
from graphmoe.projection.sizes import Sizes


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


@dataclass(frozen=True)
class Speeds:
    """What a card reaches, in FLOP/s and bytes/s."""

    card: Card
    rates: Rates

    def flops(self, share: float) -> float:
        return self.card.tflops * 1e12 * share

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
    """Final norm, head and loss, once for each depth; logits are written and read a few times."""
    model, tp = sizes.model, sizes.layout.tp
    product = 2 * sizes.tokens * model.vocab_size * model.hidden_size / speeds.flops(speeds.rates.dense)
    moved = 4 * sizes.element_bytes * sizes.gathered * model.vocab_size / tp / speeds.hbm
    gather = speeds.exchange(sizes.state * tp, tp)
    once = SegmentTime("loss", product + moved + gather, product + gather, product, 2 * gather)
    return _scaled(once, depths)


def join_time(sizes: Sizes, speeds: Speeds) -> SegmentTime:
    """The product that joins a state and the embedding of a later token."""
    product = 4 * sizes.tokens * sizes.model.hidden_size**2 / speeds.flops(speeds.rates.dense)
    return SegmentTime("embed", product + 4 * sizes.state / speeds.hbm, product, product)


def embed_time(sizes: Sizes, speeds: Speeds) -> SegmentTime:
    """The lookup, and its gradient's sum into the weight."""
    moved = 2 * sizes.state / speeds.hbm
    gather = speeds.exchange(sizes.state * sizes.layout.tp, sizes.layout.tp)
    return SegmentTime("embed", moved + gather, gather, 2 * moved, 2 * gather)


def _attention(sizes: Sizes, speeds: Speeds, kept: Bytes) -> SegmentTime:
    model, layout, rates = sizes.model, sizes.layout, speeds.rates
    product = 2 * sizes.tokens * attention_weights(model) / speeds.flops(rates.dense)
    scores = sizes.tokens * _score_flops(sizes)
    tp = 2 * speeds.exchange(sizes.state * layout.tp, layout.tp)
    cp = speeds.exchange(_exchanged(sizes), layout.cp, layout.tp)
    return _segment(
        "attn",
        (product, product),
        scores / speeds.flops(rates.attention_forward),
        2 * scores / speeds.flops(rates.attention_backward),
        kept["attn"],
        tp + cp,
        speeds,
    )


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
    product = 2 * sizes.tokens * swiglu_weights(sizes.model, inner) / speeds.flops(speeds.rates.dense)
    gather = 2 * speeds.exchange(sizes.state * tp, tp)
    return _segment(name, (product, product), 0, 0, kept[name], gather, speeds)


def _moe(
    sizes: Sizes, speeds: Speeds, kept: Bytes, *, weights_apart: bool, hidden: float
) -> Iterator[SegmentTime]:
    model, rates = sizes.model, speeds.rates
    yield _attention(sizes, speeds, kept)
    gate = 2 * sizes.tokens * model.hidden_size * model.num_experts / speeds.flops(rates.dense)
    yield _segment("moe_router", (gate, gate), 0, 0, kept["moe_router"], 0, speeds)
    yield _segment("moe_preprocess", (0, 0), 0, 0, kept["moe_preprocess"], 0, speeds)
    ranks = sizes.layout.size("ep_etp")
    # by the size of what arrives, balanced; the sums go the same way back
    rows = sizes.room.rows if not sizes.is_planned else _balanced_rows(sizes)
    row_bytes = sizes.element_bytes * sizes.model.hidden_size * rows
    travel = speeds.exchange(row_bytes, ranks) * (1 - hidden)
    yield _segment("moe_dispatch", (0, 0), 0, 0, row_bytes if ranks > 1 else 0, travel, speeds)
    if model.shared_ffn_size:
        yield _mlp("shared_experts", sizes, speeds, kept, model.shared_ffn_size)
    of_slots = 2 * sizes.tokens * model.top_k * swiglu_weights(model, model.expert_ffn_size)
    product = of_slots / speeds.flops(rates.grouped)
    moved = kept["moe_experts"] + sizes.element_bytes * sizes.room.slots * model.hidden_size
    inputs, weights = (product, product) if weights_apart else (2 * product, 0.0)
    yield _segment("moe_experts", (product, weights), 0, inputs - product, moved, 0, speeds)
    back = row_bytes if ranks > 1 else 0
    yield _segment("moe_combine", (0, 0), 0, 0, back + 2 * sizes.state, travel, speeds)


def _balanced_rows(sizes: Sizes) -> float:
    blocks = min(sizes.model.top_k, sizes.layout.ep)
    return sizes.tokens * blocks * sizes.layout.etp


def _segment(
    name: str,
    products: tuple[float, float],
    forward: float,
    backward: float,
    kept: float,
    exchange: float,
    speeds: Speeds,
) -> SegmentTime:
    """``products``: forward, which gradients of inputs take too, and gradients of weights.

    What is kept is written once and read twice over forward and backward, and so are its gradients.
    """
    moved, launch = kept / speeds.hbm, speeds.rates.segment_us * 1e-6
    product, weights = products
    return SegmentTime(
        name,
        product + forward + 1.5 * moved + exchange + launch,
        product + backward + 2 * moved + exchange + launch,
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
