"""Bytes of activations saved for the backward of one micro-batch, by segment.

Tensors are those that compiled units save with all passes (docs/tuning.md). A tensor is not saved if its part
is recomputed, or if all its readers are in the same run of recomputed segments.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from graphmoe.config.choices import SEGMENT_NAMES
from graphmoe.plan.attention import Latents, is_linear, norms_heads
from graphmoe.plan.costs.rates import ROWWISE, fits_fp8
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.experts import adapts, is_moe
from graphmoe.plan.pipeline.layouts import StagePieces, normalises
from graphmoe.plan.recompute import Recompute

DENSE_SEGMENTS = ("attn", "mlp")
# segments of layers in order, as in `graphmoe.model.layer`
MOE_SEGMENTS = tuple(name for name in SEGMENT_NAMES if name not in ("embed", "mlp", "loss", "optimizer"))
Bytes = Counter[str]  # bytes by segment
RECEIVED = "received"  # key, beside segment names, of the input received from another stage


class Kept(NamedTuple):
    segment: str
    size: float
    readers: tuple[str, ...] = ()
    """Other segments of the layer that read the tensor, in forward or backward."""
    part: str = ""
    """Part, of `graphmoe.segments.PARTS`; if that is recomputed, the tensor is not saved."""


def stage_activations(sizes: Sizes, recompute: Recompute, pieces: StagePieces) -> dict[str, Bytes]:
    """Return a stage's saved bytes of a micro-batch by part: ``embed``, ``layer 3``, ``mtp 0``, ``loss``."""
    model, found = sizes.model, dict[str, Bytes]()
    if pieces.embed:
        # frozen weights before the first layer's adapters need no backward, so only a recomputation reads it
        again = recompute.covers("attn", 0) or "layernorm" in recompute.parts_of(0)
        is_read = not model.lora_rank or again
        found["embed"] = _sum(_embed(sizes)) if is_read else Counter()
    elif len(pieces.layers) or pieces.loss or len(pieces.mtp):
        found[RECEIVED] = Counter({RECEIVED: _carried(sizes, pieces)})
    like: dict[tuple[bool, ...], Bytes] = {}
    for i in pieces.layers:
        key = (
            *(is_moe(model, i), norms_heads(model, i), is_linear(model, i)),
            *(i in recompute.layers, i in sizes.fp8_skips),
        )
        if key not in like:
            like[key] = layer_activations(sizes, recompute, i)
        found[f"layer {i}"] = like[key].copy()
    ends_here = pieces.loss or len(pieces.mtp)
    if len(pieces.layers) and not ends_here:  # sent to the next stage, then freed
        last = pieces.layers[-1]
        found[f"layer {last}"]["moe_combine" if is_moe(model, last) else "mlp"] -= sizes.state
    for k in pieces.mtp:
        joined = _sum(_join(sizes))
        found[f"mtp {k}"] = joined + layer_activations(sizes, recompute, model.num_layers + k)
    if ends_here:
        found["loss"] = _loss(sizes, pieces)
    return found


def layer_activations(sizes: Sizes, recompute: Recompute, index: int) -> Bytes:
    """Return a layer's saved bytes per micro-batch, with its output, not its input. MTP layers are last."""
    is_dense, sizes = not is_moe(sizes.model, index), sizes.of_layer(index)
    segments = DENSE_SEGMENTS if is_dense else MOE_SEGMENTS
    again = frozenset(name for name in segments if recompute.covers(name, index))
    parts = recompute.parts_of(index)
    return _layer(sizes, is_dense, norms_heads(sizes.model, index), again, parts, recompute.offload).copy()


def offloaded(sizes: Sizes, recompute: Recompute, index: int) -> int:
    """Return the bytes of a layer's saved activations that are in host memory, per micro-batch."""
    if not recompute.offload:
        return 0
    kept, on_device = (layer_activations(sizes, way, index) for way in (recompute.on_device, recompute))
    return kept.total() - on_device.total()


def made_again(sizes: Sizes, recompute: Recompute, index: int) -> float:
    """Return the bytes of activations that a layer's backward recomputes, or fetches from the host."""
    whole = layer_activations(sizes, Recompute(), index)
    return max(whole.total() - layer_activations(sizes, recompute, index).total(), 0)


@functools.lru_cache(maxsize=8192)
def _layer(
    sizes: Sizes, is_dense: bool, normed: bool, again: frozenset[str], parts: frozenset[str],
    offload: frozenset[str],
) -> Bytes:  # fmt: skip
    if is_dense:
        dense = [*_attn(sizes, "mlp", normed), *_mlp(sizes)]
        return _kept(dense, DENSE_SEGMENTS, again, parts, offload)
    dispatched = sizes.layout.size("ep_etp") > 1
    shared_again = "shared_experts" in again | parts
    tensors = [*_attn(sizes, "moe_router", normed), *_router(sizes, dispatched, shared_again)]
    tensors += _shared(sizes, dispatched)
    tensors += _dispatched(sizes, "moe_experts" in again) if dispatched else _experts(sizes)
    tensors.append(Kept("moe_combine", sizes.state, ("next",)))
    once = {"moe_dispatch", "moe_combine"} if dispatched else set[str]()
    # results of units stay on the device; with dispatched tokens a layer has several units
    stay = [each for each in tensors if each.readers or each.segment == "moe_dispatch"] if dispatched else []
    return _kept(tensors, MOE_SEGMENTS, again - once, parts, offload, stay)


def _kept(
    tensors: Iterable[Kept], segments: Sequence[str], again: frozenset[str], parts: frozenset[str],
    offload: frozenset[str], stay: Sequence[Kept] = (),
) -> Bytes:  # fmt: skip
    regions: dict[str, int] = {}
    for number, (runs_again, run) in enumerate(itertools.groupby(segments, again.__contains__)):
        regions.update({name: number for name in run if runs_again})

    def is_kept(tensor: Kept) -> bool:
        if tensor.part and tensor.part in parts:
            return False
        if tensor.segment in offload and "next" not in tensor.readers and tensor not in stay:
            return False
        region = regions.get(tensor.segment)
        return region is None or any(regions.get(reader) != region for reader in tensor.readers)

    return _sum(tensor for tensor in tensors if is_kept(tensor))


def _read(
    sizes: Sizes, name: str, rows: int, width: int, made: Iterable[float], part: str = "", fp8_part: str = ""
) -> Iterator[Kept]:
    """Yield the saved input [rows, width] of a segment's GEMMs; ``made``: their output widths."""
    if sizes.model.lora_rank and not adapts(sizes.model, name):
        return  # frozen
    in_fp8 = [name in sizes.fp8 and fits_fp8(width, columns) for columns in made]
    # fp8 GEMMs save it quantized with a scale per row, bf16 GEMMs as it is
    if any(in_fp8):
        yield Kept(name, rows * (width + ROWWISE.scale_bytes), part=fp8_part)
    if not (in_fp8 and all(in_fp8)):
        yield Kept(name, sizes.element_bytes * rows * width, part=part)


def _adapters(sizes: Sizes, name: str, count: int, part: str = "") -> Iterator[Kept]:
    if adapts(sizes.model, name):  # outputs of A
        rows = sizes.tokens * sizes.ranks_of(name)
        yield Kept(name, sizes.element_bytes * rows * sizes.model.lora_rank * count, part=part)


def _attn(sizes: Sizes, next_segment: str, normed: bool) -> Iterator[Kept]:
    tokens, e, d, tp = sizes.tokens, sizes.element_bytes, sizes.model.hidden_size, sizes.layout.tp
    latents, own = sizes.attention.latents, sizes.attention.kept or 0
    yield Kept("attn", 4 * tokens, part="layernorm")
    yield Kept("attn", e * sizes.gathered * own // tp)
    num_up = len(sizes.attention.up)
    yield from _adapters(sizes, "attn", len(sizes.attention.weights) - num_up)
    yield from _adapters(sizes, "attn", num_up, "mla_up_proj")
    of_input = [each for each in sizes.attention.weights[:-1] if each.rows == d]
    if latents or tp == 1:  # with latents, tp ranks gather those instead of the input
        made = [each.columns for each in of_input if tp == 1 or each.name not in sizes.attention.up]
        yield from _read(sizes, "attn", tokens, d, made, "layernorm")
    else:
        yield from _read(sizes, "attn", sizes.gathered, d, [each.columns / tp for each in of_input])
    if sizes.attention.recurrence:
        yield from _results_of_states(sizes)
    else:
        yield from _latent_heads(sizes, latents) if latents else _heads(sizes, normed)
    yield Kept("attn", sizes.state, (next_segment,))


def _results_of_states(sizes: Sizes) -> Iterator[Kept]:
    width = sizes.attention.weights[-1].rows // sizes.layout.tp
    yield Kept("attn", sizes.element_bytes * sizes.gathered * width, part="core_attn")
    yield from _read(sizes, "attn", sizes.gathered, width, [sizes.model.hidden_size])


def _heads(sizes: Sizes, normed: bool) -> Iterator[Kept]:
    e, facts = sizes.element_bytes, sizes.attention
    heads, groups = sizes.model.num_heads, sizes.kv_heads
    if facts.normed_heads and normed:
        rows = sizes.gathered * (facts.normed_heads // sizes.layout.tp)
        yield Kept("attn", e * rows * facts.head)
        of_norms = 2 * sizes.gathered if sizes.model.qk_norm_whole else rows
        if sizes.model.qk_norm_whole and sizes.layout.tp > 1:  # inputs in fp32, and no fused norm
            of_norms += rows * facts.head
        yield Kept("attn", 4 * of_norms, part="layernorm")
    yield Kept("attn", e * sizes.attended * facts.head * (sizes.heads(heads) + sizes.heads(groups)))
    # after an exchange, values are a view of the received queries, keys and values
    values = sizes.heads(groups) if sizes.exchanging == 1 else sizes.heads(heads + 2 * groups)
    yield Kept("attn", e * sizes.attended * sizes.value_head * values)
    yield from _attention_result(sizes)


def _latent_heads(sizes: Sizes, latents: Latents) -> Iterator[Kept]:
    model, layout, e, facts = sizes.model, sizes.layout, sizes.element_bytes, sizes.attention
    tokens, (rank, latent), rope = sizes.tokens, latents, facts.rotary
    if rank:
        yield Kept("attn", e * tokens * rank)
        yield Kept("attn", 4 * tokens, part="layernorm")
    yield Kept("attn", e * tokens * (latent + rope))
    yield Kept("attn", 4 * tokens, part="layernorm")
    of_queries, up = rank or model.hidden_size, "mla_up_proj"
    made = {each.rows: [each.columns / layout.tp] for each in facts.weights if each.name in facts.up}
    if sizes.exchanging > 1:  # keys and values use a slice of their weight, which stays in bf16
        yield Kept("attn", e * sizes.attended * (latent + rope))
        of_heads = sizes.heads(model.num_heads) * (facts.head - rope + facts.value)
        yield Kept("attn", e * latent * of_heads)
    elif layout.tp == 1:
        yield from _read(sizes, "attn", tokens, latent, made.get(latent, ()), "layernorm", up)
    else:
        yield from _read(sizes, "attn", sizes.gathered, latent, made.get(latent, ()))
        if "attn" not in sizes.fp8:  # one tensor with the latents
            yield Kept("attn", e * sizes.gathered * rope)
    if layout.tp > 1:
        yield from _read(sizes, "attn", sizes.gathered, of_queries, made.get(of_queries, ()))
    elif rank:
        yield from _read(sizes, "attn", tokens, rank, made.get(rank, ()), "layernorm", up)
    # unpadded values are a view of the up-projection's output
    of_values = facts.head if sizes.pads_values else facts.head - rope + facts.value
    of_heads = sizes.heads(model.num_heads) * (2 * facts.head + of_values)
    yield Kept("attn", e * sizes.attended * of_heads, part="mla_up_proj")
    yield from _attention_result(sizes)


def _attention_result(sizes: Sizes) -> Iterator[Kept]:
    e, heads = sizes.element_bytes, sizes.model.num_heads
    size, value = sizes.value_head, sizes.attention.value
    yield Kept("attn", e * sizes.attended * sizes.heads(heads) * size, part="core_attn")
    yield Kept("attn", 4 * sizes.attended * sizes.heads(heads), part="core_attn")
    if size != value or sizes.exchanging > 1 or "attn" in sizes.fp8:
        part = "core_attn" if sizes.exchanging == 1 else ""
        width = heads // sizes.layout.tp * value
        yield from _read(sizes, "attn", sizes.gathered, width, [sizes.model.hidden_size], part)


def _mlp(sizes: Sizes) -> Iterator[Kept]:
    yield Kept("mlp", 4 * sizes.tokens, part="layernorm")
    inner, d = sizes.model.dense_ffn_size, sizes.model.hidden_size
    if sizes.layout.tp == 1:
        yield from _read(sizes, "mlp", sizes.tokens, d, [2 * inner], "layernorm", "mlp")
    yield from _swiglu(sizes, "mlp", inner)
    yield Kept("mlp", sizes.state, ("next",))


def _swiglu(sizes: Sizes, name: str, inner: int) -> Iterator[Kept]:
    ranks, d = sizes.ranks_of(name), sizes.model.hidden_size
    own, rows = inner // ranks, sizes.tokens * ranks
    # tp ranks also save the gathered tokens
    if ranks > 1:
        yield from _read(sizes, name, rows, d, [2 * own], name, name)
    yield Kept(name, sizes.element_bytes * rows * 2 * own, part=name)
    yield from _read(sizes, name, rows, own, [d], name, name)
    yield from _adapters(sizes, name, 2, name)


def _router(sizes: Sizes, dispatched: bool, shared_again: bool) -> Iterator[Kept]:
    model, tokens = sizes.model, sizes.tokens
    readers = ("shared_experts", "moe_dispatch") if dispatched else ("shared_experts", "moe_experts")
    yield Kept("moe_router", 4 * tokens, part="layernorm")
    reads = (not dispatched and "experts" not in sizes.fp8 and not model.input_scaling) or (
        model.shared_ffn_size and not (_shares_in_fp8(sizes) and not (dispatched and shared_again))
    )
    reads = reads or model.shared_gate or sizes.element_bytes == 4
    if model.lora_rank:
        reads = adapts(model, "shared_experts") or dispatched and shared_again
    if (not dispatched or model.shared_ffn_size) and reads:
        # dispatched tokens are an output of their unit: saved, whatever is recomputed
        yield Kept("moe_router", sizes.state, readers, "" if dispatched else "layernorm")
    if model.input_scaling and not dispatched:
        in_8_bits = "experts" in sizes.fp8  # kept by the experts
        yield Kept("moe_router", 4 * tokens + (0 if in_8_bits else sizes.state), ("moe_experts",))
    if sizes.element_bytes != 4:
        if not model.lora_rank:
            yield Kept("moe_router", 4 * tokens * model.hidden_size, part="layernorm")
        yield Kept("moe_router", 4 * model.num_experts * model.hidden_size)
    yield Kept("moe_router", 4 * tokens * (model.num_experts + model.top_k))
    if not dispatched and not adapts(model, "moe_experts"):
        yield Kept("moe_router", 4 * tokens * model.top_k, ("moe_experts",))
    plan = 8 * tokens * model.top_k * (sizes.layout.etp if dispatched else 1)
    yield Kept("moe_preprocess", plan, ("moe_combine",) if dispatched else ("moe_experts",))


def _shares_in_fp8(sizes: Sizes) -> bool:
    model = sizes.model
    even = fits_fp8(model.hidden_size, 2 * model.shared_ffn_size)
    return "shared_experts" in sizes.fp8 and model.shared_ffn_size > 0 and even


def _shared(sizes: Sizes, dispatched: bool) -> Iterator[Kept]:
    model, name = sizes.model, "shared_experts"
    if model.shared_ffn_size:
        yield from _swiglu(sizes, name, model.shared_ffn_size)
    if model.shared_gate:  # the result before the gate
        yield Kept(name, sizes.state, part=name)
    in_8_bits = sizes.tokens * (model.hidden_size + ROWWISE.scale_bytes)
    here = not dispatched and "experts" in sizes.fp8
    if _shares_in_fp8(sizes):
        yield Kept(name, in_8_bits, part=name)
        here = here and model.input_scaling  # otherwise both read these
    if here:
        yield Kept("moe_experts", in_8_bits)


def _experts(sizes: Sizes) -> Iterator[Kept]:
    slots = sizes.tokens * sizes.model.top_k
    # gate and up only: the activation is always recomputed
    yield Kept("moe_experts", slots * _slot_bytes(sizes, sizes.model.expert_ffn_size))


def _slot_bytes(sizes: Sizes, inner: int) -> int:
    if not adapts(model := sizes.model, "moe_experts"):
        return _gate_up_bytes(sizes, inner)
    # steps of their own: gathered row, gate and up, activation, two outputs of A; routing weight
    return sizes.element_bytes * (model.hidden_size + 3 * inner + 2 * model.lora_rank) + 4


def _gate_up_bytes(sizes: Sizes, inner: int) -> int:
    if "experts" in sizes.fp8:
        return 2 * (inner + ROWWISE.scale_bytes * -(-inner // ROWWISE.hidden_block))
    return 2 * inner * sizes.element_bytes


def _dispatched(sizes: Sizes, again: bool) -> Iterator[Kept]:
    model, (rows, slots) = sizes.model, sizes.room
    e, k, inner = sizes.element_bytes, model.top_k, model.expert_ffn_size // sizes.layout.etp
    in_fp8 = "experts" in sizes.fp8
    # with frozen experts only a fused op outside of graphs saves it
    is_frozen = model.lora_rank > 0 and (sizes.is_planned or adapts(model, "moe_experts"))
    arrived = 0 if (in_fp8 or is_frozen) and not again else e * rows * model.hidden_size
    weights = 0 if adapts(model, "moe_experts") and not again else 4 * rows * k
    yield Kept("moe_dispatch", arrived + weights)
    if in_fp8:
        yield Kept("moe_experts", rows * (model.hidden_size + ROWWISE.scale_bytes))
    if sizes.is_planned:
        yield Kept("moe_dispatch", 8 * rows * k)
    else:
        # if the host counts rows, the experts build the plan from the rows' expert numbers
        yield Kept("moe_dispatch" if again else "moe_experts", 4 * rows * k)
    yield Kept("moe_experts", slots * _slot_bytes(sizes, inner))
    if sizes.keeps_replicas:
        yield Kept("moe_experts", sizes.replica_slots * sizes.expert_elements * e)


def _embed(sizes: Sizes) -> Iterator[Kept]:
    yield Kept("embed", sizes.state)
    if sizes.layout.tp > 1:
        yield Kept("embed", 9 * sizes.gathered)


def _join(sizes: Sizes) -> Iterator[Kept]:
    if sizes.model.lora_rank:  # of frozen weights, the norm of the state needs its input
        yield Kept("embed", sizes.state + 4 * sizes.tokens)
        return
    yield from _embed(sizes)
    yield Kept("embed", 3 * sizes.state + 8 * sizes.tokens)


def _loss(sizes: Sizes, pieces: StagePieces) -> Bytes:
    model, e, tp = sizes.model, sizes.element_bytes, sizes.layout.tp
    depths = model.mtp_depth
    found: Bytes = Counter()
    # a stage with the head has the losses of every depth
    norms = len(pieces.mtp) + normalises(pieces, depths)
    found["loss"] += 4 * sizes.tokens * norms
    # the next depth reads each state but the last, which is sent on or goes into its loss
    found["loss"] += sizes.state * max(norms - 1, 0)
    if not pieces.loss:
        return found
    of_head = 0 if model.lora_rank else 4 * model.vocab_size // tp * model.hidden_size  # its gradient
    found["loss"] += (e * sizes.gathered * model.hidden_size + of_head) * (depths + 1)
    return found


def _carried(sizes: Sizes, pieces: StagePieces) -> int:
    model = sizes.model
    if normalises(pieces, model.mtp_depth) or not (pieces.loss or len(pieces.mtp)):
        return sizes.state
    first = pieces.mtp.start if len(pieces.mtp) else model.mtp_depth
    return sizes.state * (first + 1)


def _sum(tensors: Iterable[Kept]) -> Bytes:
    found: Bytes = Counter()
    for tensor in tensors:
        found[tensor.segment] += int(tensor.size)
    return found
