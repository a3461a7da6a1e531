"""Estimated seconds of GEMMs, attention scores and communication in a layer, for one micro-batch."""

import functools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from graphmoe.config.schema import ModelConfig
from graphmoe.plan.attention import (
    attention_facts,
    is_hybrid,
    keys_per_query,
    masks_of_layers,
    model_of_layer,
)
from graphmoe.plan.costs.rates import FP8, FP32, ROWWISE, Fp8Dense, Product, Sides, Speeds, fits_fp8
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.experts import SLACK, adapts, balanced_load
from graphmoe.plan.layout import Axis

# of alltoall in an exchange, on average: counts, rows, weights and numbers there; rows back; two gradients
COLLECTIVES = 2


@dataclass(frozen=True)
class AttentionParts:
    """Seconds of attention's parts; of communication the exposed time, equal in forward and backward."""

    before: Product
    up: Product
    """GEMMs of ``before`` that belong to ``mla_up_proj``."""
    scores: Product
    after: Product
    gather: float
    """All-gather before the GEMMs: over tp, and of latents over cp if heads are exchanged."""
    scatter: float
    """Reduce-scatter over tp after the last GEMM."""
    heads: float
    """All-to-all over cp from positions to heads, and back."""
    ring: tuple[float, float]
    """Ring communication, forward and backward, that GEMMs do not hide."""

    @property
    def exchange(self) -> tuple[float, float]:
        both = self.gather + self.scatter + self.heads
        return both + self.ring[0], both + self.ring[1]


@functools.lru_cache(maxsize=1024)
def attention_parts(sizes: Sizes, speeds: Speeds) -> AttentionParts:
    facts, tp, fp8 = sizes.attention, sizes.layout.tp, fp8_dense(sizes, "attn")
    *weights, last = facts.weights
    before = {name: (rows, columns / tp) for name, rows, columns in weights}
    in_fp8 = attention_sides(sizes)

    def timed(names: Collection[str]) -> Product:
        own, cut = ([before[name] for name in names if (name in in_fp8) is whole] for whole in (True, False))
        both = dense(sizes, speeds, "attn", own, fp8), dense(sizes, speeds, "attn", cut)
        return joined(*both)

    flops = sizes.tokens * attention_scores(sizes.model, sizes.seq_len)
    # states of all sequences and heads are computed beside each other, each along its sequence
    states = sizes.sequences * last.rows / facts.value / tp
    rate, size = ("delta_net", states) if facts.recurrence else ("attention", sizes.seq_len)
    scores = Product(
        speeds.seconds(flops, f"{rate}_forward", facts.head, size),
        speeds.seconds(2 * flops, f"{rate}_backward", facts.head, size),
    )
    return AttentionParts(
        timed(before),
        timed([name for name in before if name in facts.up]),
        scores,
        dense(sizes, speeds, "attn", [(last.rows / tp, last.columns)], fp8),
        _latents_gathered(sizes, speeds) if facts.latents else _input_gathered(sizes, speeds),
        along_tp(sizes, speeds),
        _heads_exchanged(sizes, speeds),
        _ring(sizes, speeds, scores),
    )


def joined(*products: Product) -> Product:
    return Product(*map(sum, zip(*products, strict=True)))


def dense(
    sizes: Sizes, speeds: Speeds, segment: str, matrices: Sequence[Sides], fp8: Fp8Dense | None = None
) -> Product:
    """Return the seconds of a segment's GEMMs on its tokens; frozen ones have no wgrad, but adapters."""
    rows = sizes.tokens * sizes.ranks_of(segment)
    return adapted(sizes, speeds, segment, speeds.dense(rows, matrices, fp8), rows, matrices)


def adapted(
    sizes: Sizes, speeds: Speeds, segment: str, whole: Product, rows: float, matrices: Iterable[Sides],
    count: int = 1,
) -> Product:  # fmt: skip
    """Return GEMMs' seconds without the wgrad of frozen weights, with those of LoRA's adapters.

    Adapters are bound by memory. Forward: x is read, B's output written, and added to the matrix's; dgrad: dy
    is read, A's gradient written, and added; wgrad reads x and dy. ``count``: adapters of each matrix.
    """
    if not sizes.model.lora_rank:
        return whole
    found = [whole._replace(weights=0.0)]
    for inputs, outputs in matrices if adapts(sizes.model, segment) else ():
        x_s, y_s = (sizes.element_bytes * rows * width / speeds.hbm for width in (inputs, outputs))
        stored = speeds.stored(count * sizes.model.lora_rank * (inputs + outputs))
        found.append(Product(x_s + 4 * y_s, 4 * x_s + y_s, x_s + y_s + stored))
    return joined(*found)


def _input_gathered(sizes: Sizes, speeds: Speeds) -> float:
    tp = sizes.layout.tp
    # one norm for all heads needs a mean from each rank, of queries and of keys
    means = 2 * speeds.gather(FP32 * sizes.gathered * tp, tp) if sizes.model.qk_norm_whole else 0.0
    return along_tp(sizes, speeds) + means


def along_tp(sizes: Sizes, speeds: Speeds) -> float:
    """Return the seconds to all-gather the residual stream over tp, or to reduce-scatter it."""
    return speeds.gather(sizes.state * sizes.layout.tp, sizes.layout.tp)


@functools.lru_cache(maxsize=1024)
def swiglu(sizes: Sizes, speeds: Speeds, name: str) -> tuple[Product, Product]:
    inner, fp8 = dense_ffn_size(sizes.model, name), fp8_dense(sizes, name)
    width, own = sizes.model.hidden_size, inner / sizes.ranks_of(name)
    first, last = (dense(sizes, speeds, name, [each], fp8) for each in ((width, 2 * own), (own, width)))
    return first, last


@functools.lru_cache(maxsize=1024)
def gate(sizes: Sizes, speeds: Speeds) -> Product:
    model = sizes.model
    flops = 2 * sizes.tokens * model.hidden_size * model.num_experts
    seconds = speeds.seconds(flops, "router", model.num_experts, sizes.tokens)
    return Product(seconds, seconds, 0.0 if model.lora_rank else seconds)


@functools.lru_cache(maxsize=1024)
def experts(sizes: Sizes, speeds: Speeds) -> Product:
    """Return the seconds of a rank's expert GEMMs under balanced routing; gate and up take two thirds."""
    model, eight = sizes.model, FP8 if "experts" in sizes.fp8 else ""
    flops = 2 * sizes.tokens * model.top_k * swiglu_weights(model, model.expert_ffn_size)
    inner = model.expert_ffn_size / sizes.layout.etp
    of_expert = sizes.tokens * model.top_k * sizes.layout.size("ep_etp") / model.num_experts
    forward = speeds.seconds(flops, f"{eight}grouped", inner, of_expert)
    weights = speeds.weights_seconds(flops, f"{eight}grouped_weights", inner, of_expert)
    # received rows and the combine's gradients are quantized on arrival
    if eight:
        rows = balanced_load(model, sizes.layout, sizes.tokens).rows
        forward += speeds.quantised(rows * model.hidden_size, sizes.element_bytes)
    matrices = [(model.hidden_size, 2 * inner), (inner, model.hidden_size)]
    rows, owned = sizes.tokens * model.top_k, model.num_experts // sizes.layout.ep
    return adapted(sizes, speeds, "moe_experts", Product(forward, forward, weights), rows, matrices, owned)


@functools.lru_cache(maxsize=1024)
def fullest(sizes: Sizes, speeds: Speeds) -> float:
    """Return the expected load of the fullest rank over the mean, which the others wait for.

    Experts' loads have the standard deviation ``load_spread`` under natural routing; the largest of n
    normal sums is by Blom's formula. Replicas even all ranks out, up to their slack.
    """
    ranks = sizes.layout.ep
    if ranks == 1:
        return 1.0
    if sizes.replica_slots:
        return 1 + 1 / SLACK
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return 1 + speeds.rates.load_spread * largest * math.sqrt(ranks / sizes.model.num_experts)


def hidden(sizes: Sizes, speeds: Speeds) -> float:
    """Return the share of an exchange that overlap saves: none if kernels take SMs from the GEMMs."""
    return speeds.rates.hidden_exchange if sizes.overlaps and sizes.block else 0.0


def exchange(sizes: Sizes, speeds: Speeds, num_bytes: float) -> float:
    """Return the exposed seconds of a dispatch or combine that sends ``num_bytes`` to a mean rank."""
    layout, rates = sizes.layout, speeds.rates
    ranks = layout.size("ep_etp")
    if ranks == 1:
        return 0.0
    in_node = speeds.in_node(ranks)
    near, far = num_bytes * (in_node - 1) / ranks, num_bytes * (ranks - in_node) / ranks
    if sizes.dispatcher == "symm":
        shares, latency_us = (rates.copy_engine if sizes.block else rates.pull, 1.0), rates.barrier_us
    elif sizes.dispatcher in ("deepep", "turbo"):
        shares, latency_us = (rates.deepep, rates.network), rates.deepep_us
        if ranks > in_node:  # a token is sent once to each node, and forwarded there
            nodes = replace(layout, ep=ranks // in_node, etp=1)
            rows = (balanced_load(sizes.model, each, sizes.tokens).rows for each in (nodes, layout))
            far = num_bytes * operator.truediv(*rows) * (1 - in_node / ranks)
    elif sizes.dispatcher == "nvshmem":
        shares, latency_us = (rates.pull, rates.network), 2 * rates.collective_us
    else:
        shares, latency_us = (rates.node, rates.network_alltoall), COLLECTIVES * rates.collective_us
    seconds = speeds.sent(near, far, *shares) * fullest(sizes, speeds)
    return seconds * (1 - hidden(sizes, speeds)) + latency_us * 1e-6


@functools.lru_cache(maxsize=1024)
def weight_forms(sizes: Sizes, speeds: Speeds, name: str) -> float:
    elements = sum(math.prod(matrices) for _, *matrices in fp8_weights(sizes, name))
    return speeds.weight_forms(elements, sizes.element_bytes)


def dispatched_bytes(sizes: Sizes, *, fp8: bool = False) -> float:
    """Return the bytes that a rank receives in dispatch under balanced routing, including its own tokens."""
    ranks = sizes.layout.size("ep_etp")
    rows = balanced_load(sizes.model, sizes.layout, sizes.tokens).rows
    D = sizes.model.hidden_size
    row = D + ROWWISE.scale_bytes if fp8 else sizes.element_bytes * D
    return row * (ranks * sizes.block if sizes.block else rows)


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
    facts, tp = sizes.attention, sizes.layout.tp
    # latents, if any, were gathered; otherwise keys and values are exchanged too
    heads = sizes.model.num_heads + (0 if facts.latents else sizes.kv_heads)
    here = sizes.element_bytes * sizes.gathered / tp
    return speeds.exchange(here * (heads * (facts.head + facts.value)), sizes.exchanging, tp)


def _ring(sizes: Sizes, speeds: Speeds, scores: Product) -> tuple[float, float]:
    facts, layout, e = sizes.attention, sizes.layout, sizes.element_bytes
    if not layout.ring:
        return 0.0, 0.0
    block = e * sizes.gathered / layout.tp * sizes.kv_heads * (facts.head + facts.value)
    # a block is sent while the GEMMs on it run; in the backward its fp32 gradients too
    passing = speeds.pass_on(block, in_node=layout.cp * layout.tp <= speeds.card.linked)
    gradients, steps = passing * FP32 / e, layout.cp - 1
    forward = steps * max(passing - scores.forward / layout.cp, 0.0)
    # the last gradients return to their owner after all GEMMs (`graphmoe.ops.ring_attention`)
    backward = steps * max(passing + gradients - scores.inputs / layout.cp, 0.0) + gradients
    return forward, backward


def fp8_weights(sizes: Sizes, name: str) -> Iterator[tuple[Axis, int, int, int]]:
    """Yield a segment's fp8 weights: sharding axis, number of equal matrices, rows, columns."""
    model, d = sizes.model, sizes.model.hidden_size
    found: list[tuple[Axis, int, float, float]] = []
    if name == "moe_experts" and "experts" in sizes.fp8:
        count, inner = model.num_experts // sizes.layout.ep, model.expert_ffn_size / sizes.layout.etp
        found = [("edp", count, 2 * inner, d), ("edp", count, d, inner)]
    elif name == "attn" and name in sizes.fp8:
        facts = sizes.attention
        for which, (rows, columns) in attention_sides(sizes).items():
            whole = facts.latents is not None and which not in (*facts.up, facts.weights[-1].name)
            found.append(("stage" if whole else "dp_cp", 1, columns, rows))
    elif name in sizes.fp8:
        inner = dense_ffn_size(model, name) / sizes.ranks_of(name)
        axis: Axis = "stage" if name == "shared_experts" else "dp_cp"
        found = [(axis, 1, 2 * inner, d), (axis, 1, d, inner)]
    for axis, count, rows, columns in found:
        if fits_fp8(rows, columns):
            yield axis, count, int(rows), int(columns)


def attention_sides(sizes: Sizes) -> dict[str, Sides]:
    """Return the (rows, columns) of attention's weights on a rank; tp shards heads, not latents."""
    facts, tp = sizes.attention, sizes.layout.tp
    *before, last = facts.weights
    found = {last.name: (last.rows / tp, float(last.columns))}
    for name, rows, columns in before:
        whole = facts.latents is not None and name not in facts.up
        # exchanging cp ranks use a slice of this weight, which stays in bf16
        is_cut = facts.latents is not None and sizes.exchanging > 1 and rows == facts.latents.keys
        if not is_cut:
            found[name] = rows, columns if whole else columns / tp
    return found


def fp8_dense(sizes: Sizes, name: str) -> Fp8Dense | None:
    return Fp8Dense(sizes.element_bytes, sizes.bf16_weight_grads) if name in sizes.fp8 else None


def dense_ffn_size(model: ModelConfig, name: str) -> int:
    return model.dense_ffn_size if name == "mlp" else model.shared_ffn_size


def swiglu_weights(model: ModelConfig, ffn_size: int) -> int:
    return 3 * model.hidden_size * ffn_size


def attention_scores(model: ModelConfig, seq_len: int) -> int:
    """Return forward FLOPs of one token's attention, the mean of all layers: q k^T, and the GEMM with v."""
    facts = attention_facts(model)
    if facts.recurrence:
        return facts.recurrence
    scores = 2 * model.num_heads * (facts.head + facts.value) * keys_per_query(model, seq_len)
    if is_hybrid(model):
        share = 1 - masks_of_layers(model, seq_len).total() / model.num_layers
        scores += share * attention_facts(model_of_layer(model, 0)).recurrence
    return round(scores)
