"""Memory of each rank by kind: state, activations, and buffers by purpose."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from graphmoe.config.schema import GraphConfig, MoEConfig
from graphmoe.model.sizes import STATE_KINDS, Owned, host_bytes, state_bytes
from graphmoe.ops.grouped_mlp.tuning import BLOCK_R
from graphmoe.ops.linear_cross_entropy import rows_per_chunk
from graphmoe.optim.storage import kept_of
from graphmoe.plan.attention import LINEAR_CHUNK, is_linear
from graphmoe.plan.costs.activations import (
    DENSE_SEGMENTS,
    MOE_SEGMENTS,
    Bytes,
    made_again,
    offloaded,
    stage_activations,
)
from graphmoe.plan.costs.layer_parts import fp8_weights
from graphmoe.plan.costs.rates import ROWWISE
from graphmoe.plan.costs.sizes import Sizes, deferred_bytes
from graphmoe.plan.experts import is_moe
from graphmoe.plan.layout import AXES, SUMMED_OVER, Axis, ranks_of
from graphmoe.plan.pipeline.check import peaks
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.plan import Plan
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.dispatch import shared_bytes
from graphmoe.segments import FULL_ITERATION, segments_of
from graphmoe.training.floors import owned_of

log = logging.getLogger(__name__)

MEMORY_KINDS = (*STATE_KINDS, "activations", "buffers", "total")
# buffers outside torch's allocator: communicators', and memory that ranks share
OUTSIDE_ALLOCATOR = ("communication", "dispatch")
MEMORY_ERROR = 0.05
"""Share of a peak by which a projection may be wrong; the bench suite projection calls more a miss."""


def has_margin(total: float, memory: float) -> bool:
    """Return whether a projected total fits a device's memory also if it is too low by `MEMORY_ERROR`."""
    return total <= (1 - MEMORY_ERROR) * memory


COMMUNICATOR_BYTES = 128 * 2**20  # assumed: buffers of NCCL and RCCL depend on topology and version
CHANNEL_BYTES = 32 * 2**20  # assumed for a channel between two pipeline ranks
# rows of an expert from which moe.experts=auto chose torch's wgrad, which returns bf16: measured on an H200
TORCH_ROWS = 1024
MESSAGES_UNDER_WAY = 2  # messages of a channel in flight: one sent, one received ahead


@dataclass(frozen=True)
class PlaceMemory:
    """Bytes of each rank at one pipeline position, by kind of memory."""

    place: int
    state: dict[str, float]
    activations: float  # peak of all micro-batches in flight
    by_segment: Bytes  # activations of one micro-batch on all stages of the position
    by_part: dict[str, Bytes]  # the same by layer
    buffers: dict[str, float]
    owned: Owned  # parameters that each rank updates

    @property
    def total(self) -> float:
        return sum(self.state.values()) + self.activations + sum(self.buffers.values())

    def kinds(self, unit: float = 1e9, apart: Sequence[str] = ()) -> dict[str, float]:
        """Return sizes by kind, divided by ``unit``; buffers in ``apart`` are kinds of their own."""
        others = {name: self.buffers[name] for name in apart}
        buffers = sum(size for name, size in self.buffers.items() if name not in others)
        sizes = {**self.state, "activations": self.activations, "buffers": buffers, **others}
        return {kind: size / unit for kind, size in {**sizes, "total": self.total}.items()}


def memory_of_places(plan: Plan, *, on_nvidia: bool) -> list[PlaceMemory]:
    """Return the memory of each pipeline position; `refuse_unknown` rejects what this does not model."""
    sizes, of_run = plan.sizes(on_nvidia=on_nvidia), (plan.recompute, plan.moe, plan.graph)
    stages = [stage_activations(sizes, plan.recompute, own) for own in plan.stages]
    saved = [float(sum(kept.total() for kept in parts.values())) for parts in stages]
    activations = in_flight(plan, saved, [*map(partial(deferred_bytes, sizes), plan.stages, saved)])
    slots = num_slots(plan.pipeline is not None, plan.ep_overlap)
    lanes = [slots] if slots > 1 else in_flight(plan, [1] * len(stages))
    places, communication = [], communication_bytes(sizes)
    for place in range(plan.layout.pp):
        own, by_part = plan.own_stages(place), dict[str, Bytes]()
        for part, kept in (item for number in plan.stage_numbers(place) for item in stages[number].items()):
            by_part[part] = by_part.get(part, Counter()) + kept
        by_segment = sum(by_part.values(), Counter())
        beside = beside_bytes(by_part, plan.captured)
        places.append(
            PlaceMemory(
                place,
                state_of_place(plan, place),
                activations[place] + (slots - 1) * beside,
                by_segment,
                by_part,
                {**own_buffer_bytes(*of_run, sizes, own, lanes[place]), "communication": communication},
                owned_of(plan.optim, plan.model, plan.layout, own),
            )
        )
    return places


def num_slots(is_pipelined: bool, overlaps: bool) -> int:
    """Return the micro-batch slots of a rank without a pipeline, each with graphs that keep their results."""
    return 2 if overlaps and not is_pipelined else 1


def beside_bytes(by_part: Mapping[str, Bytes], captured: Iterable[str]) -> float:
    """Return what a second micro-batch slot holds: results of captured segments, or a layer's activations."""
    of_segments = sum(sum(kept[name] for kept in by_part.values()) for name in captured)
    return max(of_segments, *(kept.total() for kept in by_part.values()), 0.0)


def in_flight(
    plan: Plan, of_stages: Sequence[float], deferred: Sequence[float] | None = None
) -> Sequence[float]:
    """Return the step's peak at each pipeline position; ``of_stages``: what a micro-batch adds per stage.

    ``deferred``: what it holds from dgrad to wgrad, otherwise the same.
    """
    return peaks(plan.pipeline.table, of_stages, deferred) if plan.pipeline else of_stages


def state_of_place(plan: Plan, place: int) -> dict[str, float]:
    """Return a rank's bytes of weights, gradients and moments on its device at a pipeline position."""
    return state_bytes(
        plan.model, plan.layout, plan.own_stages(place), bucket_mb=plan.optim.bucket_mb,
        element_bytes=plan.dtype.itemsize, kept=kept_of(plan.optim), grad_shard=plan.optim.grad_shard,
        weight_places=plan.weight_places, offload=plan.optim.offload,
    )  # fmt: skip


def activations_on_host(plan: Plan, *, on_nvidia: bool) -> Sequence[float]:
    """Return the most bytes of ``recompute.offload`` in host memory by pipeline position."""
    sizes, depth = plan.sizes(on_nvidia=on_nvidia), plan.model.num_layers
    layers = ([*stage.layers, *(depth + k for k in stage.mtp)] for stage in plan.stages)
    return in_flight(plan, [sum(offloaded(sizes, plan.recompute, i) for i in own) for own in layers])


def host_of_places(plan: Plan) -> list[float]:
    """Return a rank's bytes in host memory by pipeline position: optimizer state of ``optim.offload``."""
    named = {"bucket_mb": plan.optim.bucket_mb, "element_bytes": plan.dtype.itemsize}
    own = [plan.own_stages(place) for place in range(plan.layout.pp) if plan.optim.offload]
    found = [host_bytes(plan.model, plan.layout, each, **named, kept=kept_of(plan.optim)) for each in own]
    return found or [0.0] * plan.layout.pp


def own_buffer_bytes(
    recompute: Recompute, moe: MoEConfig, graph: GraphConfig, sizes: Sizes, stages: Sequence[StagePieces],
    lanes: float,
) -> dict[str, float]:  # fmt: skip
    """Return bytes of buffers by purpose, without communication; ``lanes``: most micro-batches in flight."""
    layers, model = _layers(sizes, stages), sizes.model
    num_moe, scope = sum(is_moe(model, i) for i in layers), graph.scope
    working = of_lane = _working_bytes(sizes, recompute, stages)
    embedding = max((_embedding_work(sizes, recompute, stage) for stage in stages), default=0.0)
    if embedding > working:
        working, of_lane = embedding, embedding if "embed" in segments_of(scope) else working
    of_rotation = 4 * sizes.seq_len * sizes.attention.rotary
    of_router = 4 * model.num_experts * (2 if model.selection_bias else 1)  # counts and biases
    return {
        "tables": of_rotation + of_router * num_moe,
        "fp8_weights": fp8_weight_bytes(sizes, layers),
        "dispatch": shared_bytes(sizes, moe, graph),
        "working": working,
        "graph_pool": _graph_pool(
            scope, sizes, num_moe, len(layers) - num_moe, lanes, max(len(stages), 1), of_lane
        ),
    }


def fp8_weight_bytes(sizes: Sizes, layers: Iterable[int]) -> int:
    """Return bytes of two quantized copies of layers' weights, with scales, beside those in bf16."""

    def beside(axis: Axis) -> bool:
        return sizes.layout.size(axis) > 1 or sizes.element_bytes != 2 or not sizes.has_masters

    return sum(
        count * (2 * rows * columns * beside(axis) + ROWWISE.scale_bytes * (rows + columns))
        for index in layers
        for name in (MOE_SEGMENTS if is_moe(sizes.model, index) else DENSE_SEGMENTS)
        for axis, count, rows, columns in fp8_weights(sizes.of_layer(index), name)
    )


def _working_bytes(sizes: Sizes, recompute: Recompute, stages: Sequence[StagePieces]) -> float:
    # A backward needs gradients of saved activations and recomputed ones. Fused code needs less.
    model, e = sizes.model, sizes.element_bytes
    found = [0.0]
    layers = _layers(sizes, stages)
    if not (recompute.layers or sizes.fp8_skips):  # layers of a kind are alike
        layers = [*{(is_moe(model, index), is_linear(model, index)): index for index in layers}.values()]
    for index in layers:
        own = sizes.of_layer(index)
        mlp = _experts_work(own)
        if not is_moe(model, index):
            mlp = e * sizes.gathered * 3 * model.dense_ffn_size // sizes.layout.tp + 3 * sizes.state
        # besides what this layer's backward reads, the next one's is fetched
        again = made_again(sizes, recompute, index) + offloaded(sizes, recompute, index)
        found.append(max(_attention_work(own), mlp) + again)
    if any(stage.loss for stage in stages):
        found.append(_loss_work(sizes))
    return max(found)


def _attention_work(sizes: Sizes) -> float:
    if sizes.attention.recurrence:
        return _states_work(sizes)
    heads = sizes.heads(sizes.model.num_heads + sizes.kv_heads)
    width = heads * (sizes.attention.head + sizes.value_head)
    return sizes.element_bytes * sizes.attended * width + 3 * sizes.state


def _states_work(sizes: Sizes) -> float:
    # of the kernels' backward, that holds what each makes until it returns
    facts, tp = sizes.attention, sizes.layout.tp
    keys, values = facts.weights[0].columns // tp, facts.weights[-1].rows // tp
    heads = values // facts.value
    by_head, chunks = heads * facts.head, sizes.sequences * -(-sizes.seq_len // LINEAR_CHUNK)
    # inverses and scores; states and their gradients
    of_chunk = 2 * heads * (LINEAR_CHUNK**2 + facts.head * facts.value)
    # corrections, gradients of these, of values, result and gate; of queries, keys, by value head and summed
    of_token = 5 * values + 2 * (by_head + keys * (by_head > keys))
    return sizes.element_bytes * (chunks * of_chunk + sizes.gathered * of_token) + 3 * sizes.state


def _experts_work(sizes: Sizes) -> float:
    model, e, (rows, slots) = sizes.model, sizes.element_bytes, sizes.room
    inner = model.expert_ffn_size // sizes.layout.etp
    dispatched = 2 * rows if sizes.layout.size("ep_etp") > 1 else 0
    work = e * model.hidden_size * (dispatched + slots) + e * slots * 3 * inner + 4 * sizes.state
    local = model.num_experts // sizes.layout.ep
    if "experts" in sizes.fp8:  # rows of each expert fill whole tiles of a wgrad
        work += (local + sizes.replica_slots) * (BLOCK_R - 1) * (3 * inner + 2 * model.hidden_size)
    by_torch = "experts" not in sizes.fp8 and sizes.on_nvidia and slots >= TORCH_ROWS * local
    if (by_torch or sizes.rounds_sums) and not model.lora_rank:  # a gradient that is added later
        in_fp32 = sizes.rounds_sums and ("experts" in sizes.fp8 or sizes.replica_slots)
        work += (4 if in_fp32 else e) * local * sizes.expert_elements
    return work + sizes.replica_slots * sizes.pulled_bytes  # weights of the slots


def _loss_work(sizes: Sizes) -> float:
    model, tp = sizes.model, sizes.layout.tp
    # The backward scales the gradients of states and head, which the forward computed; the norm's is in fp32.
    of_head = 0 if model.lora_rank else 4 * model.vocab_size / tp * model.hidden_size
    return max(chunk_bytes(sizes), of_head + (tp + 8) * sizes.state)


def chunk_bytes(sizes: Sizes) -> int:
    """Return bytes of the logits that a fused loss holds at once."""
    vocabulary, size = sizes.model.vocab_size // sizes.layout.tp, sizes.element_bytes
    return min(rows_per_chunk(sizes.gathered, vocabulary, size), sizes.gathered) * vocabulary * size


def _embedding_work(sizes: Sizes, recompute: Recompute, stage: StagePieces) -> float:
    # The embedding's gradient of a micro-batch in fp32, less the activations that layers have freed by then.
    if stage.loss or sizes.model.lora_rank or not (stage.embed or len(stage.mtp)):
        return 0.0  # the head's gradient is as large, or neither has one
    model, tp = sizes.model, sizes.layout.tp
    freed = sum(
        kept.total()
        for part, kept in stage_activations(sizes, recompute, stage).items()
        if part != "embed" and (stage.embed or part.startswith("mtp"))
    )
    return 4 * model.vocab_size * model.hidden_size / tp + (tp + 1) * sizes.state - freed


def _graph_pool(
    scope: str | list[str], sizes: Sizes, moe: int, dense: int, lanes: float, stages: int, working: float
) -> float:
    # Each lane has working memory, and copies of states and gradients that captured segments read from
    # uncaptured ones.
    if scope == FULL_ITERATION or not segments_of(scope):
        return 0.0
    captured = segments_of(scope)
    borders = sum(
        count for count, last in ((moe, "moe_combine"), (dense, "mlp")) if not {last, "attn"} <= {*captured}
    )
    return 2 * sizes.state * lanes / stages * borders + max(lanes - 1, 0) * working


def communication_bytes(sizes: Sizes) -> float:
    """Return bytes of communicators, and of a pipeline's messages in flight."""
    layout = sizes.layout
    groups = {ranks_of(layout, axis) for axis in AXES if layout.size(axis) > 1}
    for axis in SUMMED_OVER if layout.shard_size else ():
        groups |= {layout.shard_groups(axis)[0], layout.replica_groups(axis)[0]}
    channels = min(layout.pp - 1, 2) * 2  # a channel for each direction to the neighbours
    messages = channels * MESSAGES_UNDER_WAY * sizes.state
    return len(groups) * COMMUNICATOR_BYTES + channels * CHANNEL_BYTES + messages


def _layers(sizes: Sizes, stages: Sequence[StagePieces]) -> list[int]:
    of_mtp = [sizes.model.num_layers + k for stage in stages for k in stage.mtp]
    return [i for stage in stages for i in stage.layers] + of_mtp


def allocated_bytes(place: PlaceMemory) -> float:
    """Return bytes in torch's allocator, as torch.cuda.max_memory_allocated counts them."""
    return place.total - sum(place.buffers[kind] for kind in OUTSIDE_ALLOCATOR)
