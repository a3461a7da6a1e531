"""Estimated times of segments, and of model parts (to balance pipelines), for one micro-batch on a rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from graphmoe.config.schema import ComputeDtype, ModelConfig, RunConfig
from graphmoe.plan.attention import is_linear
from graphmoe.plan.costs.activations import DENSE_SEGMENTS, MOE_SEGMENTS, Bytes, layer_activations
from graphmoe.plan.costs.hardware import H200
from graphmoe.plan.costs.layer_parts import (
    adapted,
    along_tp,
    attention_parts,
    dense_ffn_size,
    dispatched_bytes,
    exchange,
    experts,
    fullest,
    gate,
    hidden,
    swiglu,
    weight_forms,
)
from graphmoe.plan.costs.rates import FP32, Product, Speeds, default_rates
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.experts import adapts_experts, is_moe
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.recompute import Recompute

MOVED = 1.5  # times that each saved byte is read or written in the forward


# seconds to plan replicas: measured on an H200, 8 ranks, 256 experts, without gathering counts
REPLICA_PLAN = 50e-6
# replicas of a rank in a layer: 12 of 2 ranks and 11 layers, measured with the load `early`
REPLICAS = 0.5


@dataclass(frozen=True)
class SegmentTime:
    """Seconds of a segment, model part or stage for one micro-batch."""

    name: str
    """Name of the segment, or letters of a layout."""
    forward: float = 0.0
    inputs: float = 0.0
    """Seconds of dgrad, with its communication and recomputation."""
    weights: float = 0.0
    exchange: float = 0.0
    """Seconds of exposed communication, part of ``forward`` and ``inputs``."""

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights

    def scaled(self, by: float) -> SegmentTime:
        times = (self.forward, self.inputs, self.weights, self.exchange)
        return SegmentTime(self.name, *(time * by for time in times))


def sum_of(name: str, times: Iterable[SegmentTime]) -> SegmentTime:
    values = [(time.forward, time.inputs, time.weights, time.exchange) for time in times]
    return SegmentTime(name, *map(sum, zip(*values, strict=True)))


def times_of_layers(
    sizes: Sizes, speeds: Speeds, recompute: Recompute, indices: Sequence[int]
) -> list[list[SegmentTime]]:
    """Return the times of several layers' segments; equal layers share one list."""
    model, firsts = sizes.model, dict[tuple[bool, ...], int]()
    kinds = [
        (is_moe(model, i), i in recompute.layers, i in sizes.fp8_skips, is_linear(model, i)) for i in indices
    ]
    alike = [firsts.setdefault(kind, index) for kind, index in zip(kinds, indices, strict=True)]
    return [_times_of_layer(sizes, speeds, recompute, index) for index in alike]


@functools.lru_cache(maxsize=4096)
def _times_of_layer(sizes: Sizes, speeds: Speeds, recompute: Recompute, index: int) -> list[SegmentTime]:
    # each tensor is written in bf16 too, before it is rounded
    kept = layer_activations(sizes.plain, Recompute(), index)
    of_steps = layer_activations(sizes, Recompute(), index)["moe_experts"] * adapts_experts(sizes.model)
    sizes = sizes.of_layer(index)
    again = second_forward(sizes, speeds, recompute, index) if recompute else {}
    if is_moe(sizes.model, index):
        times = [*_moe(sizes, speeds, kept, of_steps)]
    else:
        times = [_attention(sizes, speeds, kept), _mlp("mlp", sizes, speeds, kept)]
    return [
        replace(
            time,
            forward=time.forward + weight_forms(sizes, speeds, time.name),
            inputs=time.inputs + again.get(time.name, 0.0),
        )
        for time in times
    ]


def stage_times(config: RunConfig, sizes: Sizes, speeds: Speeds, pieces: StagePieces) -> list[SegmentTime]:
    """Return the times of all segments of a stage, layer by layer in the order of the model."""
    model, found = config.model, list[SegmentTime]()
    if pieces.embed:
        found.append(embed_time(sizes, speeds))
    recompute = Recompute.of(config.recompute)
    of_mtp = [model.num_layers + k for k in pieces.mtp]
    indices = (*pieces.layers, *of_mtp)
    for times in times_of_layers(sizes, speeds, recompute, indices):
        found += times
    found += [join_time(sizes, speeds)] * len(of_mtp)
    if pieces.loss:
        found.append(head_time(sizes, speeds, model.mtp_depth + 1))
    return found


@functools.lru_cache(maxsize=1024)
def head_time(sizes: Sizes, speeds: Speeds, depths: int) -> SegmentTime:
    model, tp = sizes.model, sizes.layout.tp
    d, vocabulary = model.hidden_size, model.vocab_size
    # the forward computes both gradients, the backward scales them
    is_frozen, moved = model.lora_rank > 0, tp * sizes.state / speeds.hbm
    flops = (3 - is_frozen) * 2 * sizes.tokens * d * vocabulary
    gather = along_tp(sizes, speeds)
    forward = speeds.seconds(flops, "head", d, sizes.gathered) + 2 * moved + gather
    scaled = speeds.stored(d * vocabulary / tp) * (not is_frozen) + 3 * moved + gather
    return SegmentTime("loss", forward, scaled, exchange=2 * gather).scaled(depths)


@functools.lru_cache(maxsize=1024)
def join_time(sizes: Sizes, speeds: Speeds) -> SegmentTime:
    d = sizes.model.hidden_size
    product = adapted(sizes, speeds, "embed", speeds.dense(sizes.tokens, [(2 * d, d)]), sizes.tokens, ())
    return SegmentTime(
        "embed", product.forward + 4 * sizes.state / speeds.hbm, product.inputs, product.weights
    )


@functools.lru_cache(maxsize=1024)
def embed_time(sizes: Sizes, speeds: Speeds) -> SegmentTime:
    model, tp = sizes.model, sizes.layout.tp
    moved = 2 * sizes.state / speeds.hbm
    gather = along_tp(sizes, speeds)
    if model.lora_rank:
        return SegmentTime("embed", moved + gather, exchange=gather)
    # the whole gradient is written in fp32 and read once
    gradient = speeds.stored(model.vocab_size * model.hidden_size / tp)
    return SegmentTime("embed", moved + gather, gather, 2 * moved + gradient, 2 * gather)


def _attention(sizes: Sizes, speeds: Speeds, kept: Bytes) -> SegmentTime:
    parts = attention_parts(sizes, speeds)
    products = [parts.before, parts.scores, parts.after]
    return _segment("attn", products, kept["attn"], parts.exchange, speeds)


def _mlp(name: str, sizes: Sizes, speeds: Speeds, kept: Bytes) -> SegmentTime:
    exchange = 2 * along_tp(sizes, speeds) * (sizes.ranks_of(name) > 1)
    return _segment(name, swiglu(sizes, speeds, name), kept[name], (exchange, exchange), speeds)


def _moe(sizes: Sizes, speeds: Speeds, kept: Bytes, of_steps: float) -> Iterator[SegmentTime]:
    model, none, rates = sizes.model, (0.0, 0.0), speeds.rates
    yield _attention(sizes, speeds, kept)
    yield _segment("moe_router", [gate(sizes, speeds)], kept["moe_router"], none, speeds)
    has_replicas, barrier = bool(sizes.replica_slots), rates.barrier_us * 1e-6
    # counts of all ranks are gathered between two barriers
    planning = has_replicas * (REPLICA_PLAN + 2 * barrier)
    yield _segment("moe_preprocess", [], kept["moe_preprocess"], (planning, 0.0), speeds)
    arriving = dispatched_bytes(sizes) if sizes.layout.size("ep_etp") > 1 else 0.0
    sums = exchange(sizes, speeds, arriving)
    dispatch_s = exchange(sizes, speeds, dispatched_bytes(sizes, fp8=sizes.fp8_rows))
    dispatch = _segment("moe_dispatch", [], arriving, (dispatch_s, sums), speeds)
    counts_on_host = sizes.dispatcher == "alltoall"
    yield replace(dispatch, forward=dispatch.forward + counts_on_host * rates.host_us * 1e-6)
    if model.shared_ffn_size:
        yield _mlp("shared_experts", sizes, speeds, kept)
    products = Product(*(seconds * fullest(sizes, speeds) for seconds in experts(sizes, speeds)))
    if counts_on_host:  # its backward is one node, so dgrad includes the experts' wgrad
        products = Product(products.forward, products.inputs + products.weights)
    # weights that are sent with the rows need no barrier, and overlap as they do
    sent_with = sizes.sends_weights
    shown = REPLICAS * ((1 - hidden(sizes, speeds)) if sent_with else 1.0)
    pulled = shown * speeds.pass_on(sizes.pulled_bytes, in_node=True) + (0 if sent_with else 2) * barrier
    home = shown * speeds.pass_on(sizes.expert_elements * FP32, in_node=True) + (2 - sent_with) * barrier
    pulled, home = has_replicas * pulled, has_replicas * home
    again = 0.0 if sizes.keeps_replicas else pulled
    # rates of the fused op include what it moves, unlike steps of experts with adapters
    of_experts = _segment("moe_experts", [products], of_steps, (pulled, again), speeds)
    yield replace(of_experts, weights=of_experts.weights + home)
    yield _segment("moe_combine", [], arriving + 2 * sizes.state, (sums, dispatch_s), speeds)


def _segment(
    name: str, products: Iterable[Product], kept: float, exchange: tuple[float, float], speeds: Speeds
) -> SegmentTime:
    # three of seven passes are of the forward
    moved, launch = speeds.rates.passes / 7 * kept / speeds.hbm, speeds.rates.segment_us * 1e-6
    forward, inputs, weights = (sum(seconds) for seconds in zip(Product(), *products, strict=True))
    there, back = exchange
    return SegmentTime(
        name, forward + 3 * moved + there + launch, inputs + 4 * moved + back + launch, weights, there + back
    )


def second_forward(sizes: Sizes, speeds: Speeds, recompute: Recompute, index: int) -> dict[str, float]:
    """Return the seconds that a layer's backward spends to recompute each segment."""
    model, segments = sizes.model, MOE_SEGMENTS if is_moe(sizes.model, index) else DENSE_SEGMENTS
    whole = {name for name in segments if recompute.covers(name, index)}
    parts = recompute.parts_of(index)
    # a recomputed segment skips its last GEMM, which nothing reads, and dispatch and combine
    kept, kept_now = (
        layer_activations(sizes.plain, way, index) for way in (Recompute(), recompute.on_device)
    )
    sizes = sizes.of_layer(index)
    found = {
        name: MOVED * max(kept[name] - kept_now[name], 0) / speeds.hbm
        + (speeds.rates.segment_us * 1e-6 if name in whole else 0.0)
        for name in segments
        if kept[name]
    }

    def add(name: str, seconds: float) -> None:
        found[name] = found.get(name, 0.0) + seconds

    attention = attention_parts(sizes, speeds)
    if "attn" in whole:
        add("attn", attention.before.forward + attention.scores.forward)
        add("attn", attention.gather + attention.heads + attention.ring[0])
        if segments[1] in whole:  # reads the last GEMM's output
            add("attn", attention.after.forward + attention.scatter)
    else:
        if "mla_up_proj" in parts:
            add("attn", attention.up.forward)
        if "core_attn" in parts:
            add("attn", attention.scores.forward + attention.ring[0])
    for name in ("mlp", "shared_experts"):
        if name in segments and dense_ffn_size(model, name) and name in whole | parts:
            first, _ = swiglu(sizes, speeds, name)
            gathers = sizes.ranks_of(name) > 1 and name in whole
            add(name, first.forward + gathers * along_tp(sizes, speeds))
    if "moe_router" in whole:
        add("moe_router", gate(sizes, speeds).forward)
    if "moe_experts" in whole:
        add("moe_experts", experts(sizes, speeds).forward * 2 / 3)
    return found


NOTHING_AGAIN = Recompute()


def modelled_parts(
    model: ModelConfig,
    seq_len: int,
    recompute: Recompute = NOTHING_AGAIN,
    *,
    expert_ranks: int = 1,
    joint_experts: bool = False,
) -> list[SegmentTime]:
    """Return one sequence's seconds on an H200: embedding, each layer, each MTP layer, loss.

    ``expert_ranks``: ranks that share the experts. ``joint_experts``: dgrad includes experts' wgrad.
    """
    dispatcher = "alltoall" if joint_experts else "local" if expert_ranks == 1 else "symm"
    sizes, speeds = _on_a_card(model, seq_len, expert_ranks, dispatcher)
    depths, indices = model.mtp_depth, range(model.num_layers + model.mtp_depth)
    layers = times_of_layers(sizes, speeds, recompute, indices)
    return [
        sum_of("E", [embed_time(sizes, speeds)]),
        *(sum_of("t", times) for times in layers[: model.num_layers]),
        *(sum_of("m", [*times, join_time(sizes, speeds)]) for times in layers[model.num_layers :]),
        sum_of("L", [head_time(sizes, speeds, depths + 1)]),
    ]


def modelled_message(model: ModelConfig, seq_len: int) -> float:
    """Return the seconds to send one sequence's residual stream from an H200 to another node."""
    sizes, speeds = _on_a_card(model, seq_len)
    return speeds.pass_on(sizes.state, in_node=False)


def _on_a_card(
    model: ModelConfig, seq_len: int, expert_ranks: int = 1, dispatcher: str = "local"
) -> tuple[Sizes, Speeds]:
    run = RunConfig(model=model)
    run.data.seq_len, run.train.micro_batch_size = seq_len, 1
    run.precision.compute, run.moe.dispatcher = ComputeDtype.bf16, dispatcher
    run.pipeline.ep_overlap = False
    speeds = Speeds(H200, default_rates(is_nvidia=True), adding=1.0)
    return Sizes.from_config(run, Layout(ep=expert_ranks), on_nvidia=True), speeds


def stage_costs(pieces: Sequence[str], parts: Sequence[SegmentTime]) -> list[SegmentTime]:
    assert "".join(pieces) == "".join(part.name for part in parts)
    rest = iter(parts)
    return [sum_of(piece, itertools.islice(rest, len(piece))) for piece in pieces]
