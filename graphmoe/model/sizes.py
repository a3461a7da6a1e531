"""Parameter counts, state bytes and FLOPs: sums over a model on the meta device.

FLOPs: two per multiply-add; a backward GEMM costs twice its forward, so a weight costs 6 FLOPs a token;
causal attention counts S / 2 keys for each query; embedding, router, the shared experts' gate, norms and
recomputation count 0. A frozen weight costs 4 FLOPs a token, as it has no wgrad.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.config.schema import ModelConfig, MoEConfig
from graphmoe.model.transformer import Transformer
from graphmoe.plan.attention import is_hybrid, is_linear, model_of_layer
from graphmoe.plan.buckets import (
    ALIGNMENT,
    PIECE_ELEMENTS,
    SLOT_SLACK,
    SLOTS,
    BufferLayout,
    Kept,
    Matrices,
    batches,
    matrices_of,
)
from graphmoe.plan.costs.layer_parts import attention_scores, swiglu_weights
from graphmoe.plan.experts import is_moe, moe_layers
from graphmoe.plan.layout import ALONE, Axis, Layout, layout_of, ranks_of
from graphmoe.plan.pipeline.layouts import StagePieces, all_pieces, needs_embedding, normalises
from graphmoe.plan.slots import Slots, gradient_slots

# component by the first of these substrings in a parameter's name; others are norms
COMPONENTS = {
    "lora_": "adapters",
    "mtp.": "mtp",
    "norm": "norms",
    "embed.": "embedding",
    "head.weight": "head",
    "attn.": "attention",
    "mlp.": "dense_mlp",
    "moe_router.": "router",
    "moe_experts.": "routed_experts",
    "shared_experts.": "shared_experts",
}
STATE_KINDS = ("params", "grads", "main_params", "moments")
FP32 = 4

BODY = ("attention", "dense_mlp", "router", "routed_experts", "shared_experts")


def count_parameters(model: ModelConfig) -> dict[str, dict[str, int]]:
    """Count parameters by component: ``full`` (all), ``body`` (no embedding, head, norms, mtp, adapters).

    With ``lora_rank`` adapters are what trains, and all others are frozen.
    ``active``: parameters that one token uses, with the whole embedding, as in published figures. A tied head
    and the selection bias, a buffer, count 0.
    """
    counts = {"total": Counter[str](), "active": Counter[str]()}
    for name, weight in _named_weights(model, ALONE, [all_pieces(model.num_layers, model.mtp_depth)]):
        component = next((component for part, component in COMPONENTS.items() if part in name), "norms")
        size, of_experts = weight.numel(), "moe_experts." in name
        counts["total"][component] += size
        counts["active"][component] += size * model.top_k // model.num_experts if of_experts else size

    def summed(found: Counter[str]) -> dict[str, int]:
        parts = {name: found[name] for name in ("embedding", "head", *BODY, "norms", "mtp", "adapters")}
        return {**parts, "full": found.total(), "body": sum(found[name] for name in BODY)}

    return {kind: summed(found) for kind, found in counts.items()}


def attention_weights(model: ModelConfig, *, linear: bool = False) -> int:
    """Count weights of one layer's attention projections, without norms; ``linear``: of linear attention."""
    kinds = ("linear dense", "linear moe") if linear else ("dense", "moe", "mtp")
    layer = next(part for kind, part in _parts(model, ALONE).items() if kind in kinds)
    weights = (w for name, w in layer.items() if "attn." in name and "lora_" not in name and w.dim() == 2)
    return sum(weight.numel() for weight in weights)


def rank_weights(model: ModelConfig, layout: Layout, stages: Iterable[StagePieces]) -> list[Tensor]:
    """Return meta parameters of a rank with these stages, in order; equal layers share theirs."""
    return [weight for _, weight in _named_weights(model, layout, stages)]


def layer_weights(model: ModelConfig, layout: Layout, layer: int) -> dict[str, Tensor]:
    """Return a rank's parameters of one layer by name; MTP layers are last."""
    return _parts(model, layout)[_kind_of(model, layer)]


def _kind_of(model: ModelConfig, layer: int) -> str:
    if layer >= model.num_layers:
        return "mtp"
    return ("linear " if is_linear(model, layer) else "") + ("moe" if is_moe(model, layer) else "dense")


def _named_weights(
    model: ModelConfig, layout: Layout, stages: Iterable[StagePieces]
) -> list[tuple[str, Tensor]]:
    stages, parts = [*stages], _parts(model, layout)
    layers = sorted(i for stage in stages for i in stage.layers)
    kinds = [(_kind_of(model, i), f"layers.{number}") for number, i in enumerate(layers)]
    if any(needs_embedding(stage, tied=model.tie_embeddings) for stage in stages):
        kinds.insert(0, ("embed", ""))
    if any(normalises(stage, model.mtp_depth) for stage in stages):
        kinds.append(("norm", ""))
    if any(stage.loss for stage in stages) and not model.tie_embeddings:
        kinds.append(("head", ""))
    kinds += [("mtp", f"mtp.{number}") for number in range(sum(len(stage.mtp) for stage in stages))]
    # parts of equal layers have the names of one; estimates list a layer for all that are like it
    return [
        (f"{own}.{name.split('.', 2)[2]}" if own else name, weight)
        for kind, own in kinds
        for name, weight in parts[kind].items()
    ]


def state_bytes(
    model: ModelConfig,
    layout: Layout,
    stages: Sequence[StagePieces] = (),
    *,
    bucket_mb: float,
    element_bytes: int = 2,
    kept: Sequence[Kept] = (Kept(FP32, 2 * FP32),),
    grad_shard: bool = False,
    weight_places: int = 0,
    offload: bool = False,
) -> dict[str, float]:
    """Return bytes of state by kind, on each rank that has these stages (by default all).

    ``kept``: state of an element, and if matrices are updated whole, of theirs. With ``offload``, they
    are in host memory (``host_bytes``), and "moments" are the device's slots for pieces of them.

    Flat buffers hold whole weights and gradients, and a rank's shard of all. With ``grad_shard`` slots hold
    the gradients of several layers, with `graphmoe.plan.slots.weight_places` weights too. bf16 weights have
    fp32 master weights. Frozen weights are ``params`` only, once.
    """
    found = dict.fromkeys(STATE_KINDS, 0.0)
    weights = rank_weights(model, layout, stages or [all_pieces(model.num_layers, model.mtp_depth)])
    found["params"] += element_bytes * sum(w.numel() for w in weights if not w.requires_grad)
    buffers, slot = [*_flat_buffers(model, layout, stages, bucket_mb, len(kept) > 1)], 0
    has_slots = grad_shard or weight_places > 0
    if has_slots:
        slots = _slots(model, layout, stages, buffers)
        found["grads"] += kept[0].gradient * sum(slots.lengths)
        found["params"] += element_bytes * slots.weight_length(weight_places) * (weight_places > 0)
    if kept[0].gradient != FP32:  # a bucket at a time is reduced in fp32
        buckets = [bucket for each in buffers if each.ranks > 1 for bucket in each.layout.buckets]
        found["grads"] += FP32 * max((b.whole.stop - b.whole.start for b in buckets), default=0)
    for _, buffer, ranks, matrices, pieces in buffers:
        size, shard = buffer.size, buffer.shard_size
        own_shard, whole = (shard, 0 if has_slots else size) if ranks > 1 else (0, size)
        found["params"] += element_bytes * (own_shard + (size if whole or not weight_places else 0))
        found["grads"] += FP32 * own_shard + kept[0].gradient * whole
        own, rows = kept[0], shard // ALIGNMENT
        if matrices is not None:
            own, rows = kept[1], sum(count * shape.rows for shape, count in matrices.items())
        main = own.main if element_bytes != FP32 else 0
        found["main_params"] += main * shard
        found["moments"] += own.moments * shard + own.row * rows
        of_pieces = ((main + own.moments) * size + own.row * rows for size, rows in pieces)
        slot = max([slot, *of_pieces])
    return found | {"main_params": 0.0, "moments": SLOTS * (slot + SLOT_SLACK)} if offload else found


def host_bytes(model: ModelConfig, layout: Layout, stages: Sequence[StagePieces] = (), **named: Any) -> float:
    """Return bytes of master weights and moments, in host memory with ``optim.offload``, as `state_bytes`."""
    kinds = state_bytes(model, layout, stages, **named)
    return kinds["main_params"] + kinds["moments"]


class Owned(NamedTuple):
    """Parameters that a rank's optimizer updates."""

    elements: int
    """Number of those that are updated by element."""
    matrices: Counter[Matrices]
    """Number of whole matrices of each shape, on the rank that owns most."""


def owned_parameters(
    model: ModelConfig, layout: Layout, stages: Sequence[StagePieces], bucket_mb: float, *, whole: bool
) -> Owned:
    """Count the parameters that a rank's optimizer updates; ``whole``: matrices are updated whole."""
    elements, found = 0, Counter[Matrices]()
    for _, buffer, _, matrices, _ in _flat_buffers(model, layout, stages, bucket_mb, whole):
        if matrices is None:
            elements += buffer.shard_size
        else:
            found += matrices
    return Owned(elements, found)


def reduced_elements(
    model: ModelConfig, layout: Layout, stages: Sequence[StagePieces], bucket_mb: float, *, whole: bool
) -> Counter[Axis]:
    """Count, by axis, gradients reduced in each micro-batch with ``grad_shard``; others once in a step."""
    found, buffers = Counter[Axis](), [*_flat_buffers(model, layout, stages, bucket_mb, whole)]
    slots, number = _slots(model, layout, stages, buffers), 0
    for weights, buffer, ranks, *_ in buffers:
        axis = layout_of(next(iter(weights.values()))).summed_over
        for bucket in buffer.buckets if ranks > 1 else ():
            found[axis] += (bucket.whole.stop - bucket.whole.start) * slots.is_shared(number)
            number += 1
    return found


class _Buffer(NamedTuple):
    """Buffers of the first rank."""

    weights: dict[str, Tensor]
    layout: BufferLayout
    ranks: int
    matrices: Counter[Matrices] | None
    """That the rank owns, if they are updated whole."""
    pieces: list[tuple[int, int]]
    """Elements and rows, by which ``optim.offload`` updates."""


def _slots(
    model: ModelConfig, layout: Layout, stages: Sequence[StagePieces], buffers: Sequence[_Buffer]
) -> Slots:
    stages = stages or [all_pieces(model.num_layers, model.mtp_depth)]
    sharded = [(buffer.layout, buffer.weights) for buffer in buffers if buffer.ranks > 1]
    return gradient_slots(sharded, (name for name, _ in _named_weights(model, layout, stages)))


def _flat_buffers(
    model: ModelConfig, layout: Layout, stages: Sequence[StagePieces], bucket_mb: float, whole: bool
) -> Iterator[_Buffer]:
    families: dict[tuple[object, bool], dict[str, Tensor]] = {}
    stages = stages or [all_pieces(model.num_layers, model.mtp_depth)]
    for name, weight in _named_weights(model, layout, stages):
        if not weight.requires_grad:
            continue
        is_matrix = whole and matrices_of(name, weight) is not None
        key = ranks_of(layout, layout_of(weight).summed_over), is_matrix
        families.setdefault(key, {})[name] = weight
    for (_, is_matrix), named in families.items():
        names, weights = [*named], [*named.values()]
        axis = layout_of(weights[0]).summed_over
        ranks, shards = layout.size(axis), layout.num_shards(axis)
        if not is_matrix:
            buffer = BufferLayout.of(weights, shards, 0, bucket_mb * 1e6 / FP32)
            size = min(max(buffer.decayed, buffer.shard_size - buffer.decayed), PIECE_ELEMENTS)
            yield _Buffer(named, buffer, ranks, None, [(size, size // ALIGNMENT)])
            continue
        buffer, matrices = BufferLayout.of_matrices(weights, shards, 0), Counter[Matrices]()
        parts = list[tuple[slice, Matrices]]()
        for i, _, part in buffer.own_ranges(weights):
            shape = matrices_of(names[i], weights[i])
            assert shape is not None
            matrices[shape] += (part.stop - part.start) // shape.size
            parts.append((part, shape))
        sizes = [(part.stop - part.start, shape.columns) for part, shape in batches(parts)]
        yield _Buffer(named, buffer, ranks, matrices, [(size, size // columns) for size, columns in sizes])


def _parts(model: ModelConfig, layout: Layout) -> dict[str, dict[str, Tensor]]:
    moe = [is_moe(model, i) for i in range(model.num_layers)]
    dense = int(not all(moe))
    small = dataclasses.replace(
        model, num_layers=dense + any(moe), num_dense_layers=dense, moe_every=1,
        mtp_depth=min(model.mtp_depth, 1),
    )  # fmt: skip
    key = repr(small), layout.tp, layout.ep, layout.etp, len(layout.embed_on) > 1
    if key not in _built:
        places = (0, 1) if len(layout.embed_on) > 1 else (0,)
        ep, etp = layout.ep, layout.etp
        like = Layout(dp=ep * etp, tp=layout.tp, pp=len(places), ep=ep, etp=etp, embed_on=places)
        _built[key] = _build(small, like)
    return _built[key]


_built: dict[tuple[object, ...], dict[str, dict[str, Tensor]]] = {}


def _build(model: ModelConfig, layout: Layout) -> dict[str, dict[str, Tensor]]:
    if not is_hybrid(model):
        return _build_alike(model, layout)
    linear = _build_alike(model_of_layer(model, 0), layout)
    of_layers = {f"linear {kind}": part for kind, part in linear.items() if kind in ("dense", "moe")}
    return _build_alike(model_of_layer(model, model.num_layers), layout) | of_layers


def _build_alike(model: ModelConfig, layout: Layout) -> dict[str, dict[str, Tensor]]:
    with torch.device("meta"):
        built = Transformer(model, MoEConfig(), layout)
    layers = [*["dense"] * model.num_dense_layers, "moe"]
    kinds = {"embed": "embed", "loss_head.norm": "norm", "loss_head.head": "head", "mtp.0": "mtp"}
    kinds |= {f"layers.{number}": kind for number, kind in enumerate(layers)}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, parameter in built.named_parameters():
        kind = next(kind for prefix, kind in kinds.items() if name.startswith(f"{prefix}."))
        parts.setdefault(kind, {})[name] = parameter
    return parts


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    return sum(step_flops(model, seq_len).values())


def step_flops(model: ModelConfig, seq_len: int) -> dict[str, int]:
    """Return a token's FLOPs of forward and backward by part, with the unneeded dgrad of the first layer."""
    forward = forward_flops(model, seq_len)
    if not model.lora_rank:
        return {name: 3 * flops for name, flops in forward.items()}
    # attention's scores have two operands that are activations, in MTP layers too
    scores = model.mtp_depth * attention_scores(model_of_layer(model, model.num_layers), seq_len)
    whole = {"attention_scores": forward["attention_scores"], "mtp": scores, "adapters": forward["adapters"]}
    return {name: 2 * flops + whole.get(name, 0) for name, flops in forward.items()}


def forward_flops(model: ModelConfig, seq_len: int) -> dict[str, int]:
    """Return a token's forward FLOPs by part of the model, averaged over positions."""
    num_moe_layers = len(moe_layers(model)) - model.mtp_depth
    projections = 2 * attention_weights(model)
    scores = of_mtp = attention_scores(model, seq_len)
    linear = sum(is_linear(model, i) for i in range(model.num_layers))
    of_linear = linear * 2 * attention_weights(model, linear=True) if linear else 0
    if linear:
        of_mtp = attention_scores(model_of_layer(model, model.num_layers), seq_len)
    routed = 2 * model.top_k * swiglu_weights(model, model.expert_ffn_size)
    shared = 2 * swiglu_weights(model, model.shared_ffn_size)
    head = 2 * model.vocab_size * model.hidden_size
    mtp_projection = 2 * 2 * model.hidden_size**2
    adapters = {"adapters": 2 * count_parameters(model)["active"]["adapters"]} if model.lora_rank else {}
    return {
        "attention_projections": (model.num_layers - linear) * projections + of_linear,
        "attention_scores": model.num_layers * scores,
        "dense_mlp": 2 * (model.num_layers - num_moe_layers) * swiglu_weights(model, model.dense_ffn_size),
        "routed_experts": num_moe_layers * routed,
        "shared_experts": num_moe_layers * shared,
        "head": head,
        "mtp": model.mtp_depth * (mtp_projection + projections + of_mtp + routed + shared + head),
        **adapters,
    }
