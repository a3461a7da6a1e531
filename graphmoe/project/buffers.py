"""Buffers that a rank needs beside its state and activations, by purpose."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from graphmoe.config.schema import AttentionKind, ConfigError, DispatcherChoice, RunConfig
from graphmoe.ops.linear_cross_entropy import rows_per_chunk
from graphmoe.plan.costs.activations import made_again
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.layout import AXES, Axis, Layout
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.recompute import Recompute
from graphmoe.segments import FULL_ITERATION, segments_of

COMMUNICATOR_BYTES = 128 * 2**20
"""Assumed for each communicator that a rank is in: NCCL and RCCL keep buffers per channel and peer, whose sum
depends on topology and version. Not measured here."""
CHANNEL_BYTES = 32 * 2**20
"""Assumed for each channel between two ranks of a pipeline, for the same reason."""
MESSAGES_UNDER_WAY = 2
"""Messages of a channel: one that is sent and not answered yet, and one that is received ahead."""


def buffer_bytes(
    config: RunConfig, sizes: Sizes, stages: Sequence[StagePieces], lanes: float
) -> dict[str, float]:
    """Return bytes by purpose. ``lanes`` are the most stages of micro-batches that the rank has in flight."""
    own = own_buffer_bytes(config, sizes, stages, lanes)
    return {**own, "communication": communication_bytes(sizes)}


def own_buffer_bytes(
    config: RunConfig, sizes: Sizes, stages: Sequence[StagePieces], lanes: float
) -> dict[str, float]:
    """Return the bytes by purpose that follow from the rank's own work; communication is not among them."""
    working = working_bytes(sizes, Recompute.of(config.recompute), stages)
    return {
        "tables": _tables(sizes, stages),
        "dispatch": dispatch_bytes(sizes, config.moe.dispatcher) if _num_moe(sizes, stages) else 0,
        "working": working,
        "graph_pool": _graph_pool(config, sizes, stages, lanes, working),
    }


def working_bytes(sizes: Sizes, recompute: Recompute, stages: Sequence[StagePieces]) -> float:
    """Return the most bytes that the backward of a layer, or the loss, needs for itself at a time.

    A backward needs the gradients of what a segment keeps, and the part of the layer that is made again.
    Compiled code that joins operations takes less.
    """
    model, e = sizes.model, sizes.element_bytes
    found = [0.0]
    layers = _layers(sizes, stages)
    if not recompute.layers:  # one of each kind stands for all
        layers = [*{index < model.num_dense_layers: index for index in layers}.values()]
    for index in layers:
        segments = [_attention_work(sizes)]
        if index < model.num_dense_layers:
            segments.append(
                e * sizes.gathered * 3 * model.dense_ffn_size // sizes.layout.tp + 3 * sizes.state
            )
        else:
            segments.append(_experts_work(sizes))
        found.append(max(segments) + made_again(sizes, recompute, index))
    if any(stage.loss for stage in stages):
        found.append(_loss_work(sizes))
    return max(found)


def dispatch_bytes(sizes: Sizes, dispatcher: DispatcherChoice) -> float:
    """Bytes that a dispatcher keeps for a run. *Raises* ConfigError where its buffers are not known here."""
    if dispatcher in (DispatcherChoice.local, DispatcherChoice.alltoall):
        return 0
    if dispatcher is DispatcherChoice.symm:
        from graphmoe.ops.symm.peers import Region  # imports kernels
        from graphmoe.ops.symm.peers import Sizes as Exchange

        model, e = sizes.model, sizes.element_bytes
        places = model.top_k * sizes.layout.etp
        room = Exchange(
            sizes.tokens, e * model.hidden_size, model.top_k, places, sizes.room.rows, sizes.block
        )
        return Region.with_room_for(room, sizes.layout.size("ep_etp")).num_bytes
    raise ConfigError(
        f"the buffers of moe.dispatcher={dispatcher.value} are not projected; use "
        f"moe.dispatcher=alltoall, or symm inside nodes"
    )


def _attention_work(sizes: Sizes) -> float:
    """Bytes of the gradients of queries, keys, values and of attention's result."""
    model, e = sizes.model, sizes.element_bytes
    if model.attention is AttentionKind.gqa:
        width = sizes.heads(2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    else:
        head = model.qk_nope_head_dim + model.qk_rope_head_dim
        value = head if sizes.pads_values else model.v_head_dim
        width = 2 * sizes.heads(model.num_heads) * (head + value)
    return e * sizes.attended * width + 3 * sizes.state


def _experts_work(sizes: Sizes) -> float:
    """Bytes of rows as they arrive and leave, of their gradients, and of activations of the slots."""
    model, e = sizes.model, sizes.element_bytes
    inner = model.expert_ffn_size // sizes.layout.etp
    rows, slots = sizes.room
    travels = 2 * rows if sizes.layout.size("ep_etp") > 1 else 0
    return e * model.hidden_size * (travels + slots) + e * slots * 3 * inner + 4 * sizes.state


def _loss_work(sizes: Sizes) -> float:
    """Bytes of all tokens' logits where ranks of tp share the head; else of a chunk's, or of the backward.

    The backward scales the head's gradient, which the forward has made, and takes the norm's in fp32.
    """
    model, tp = sizes.model, sizes.layout.tp
    if tp > 1:
        return 12 * sizes.gathered * model.vocab_size / tp
    rows = min(rows_per_chunk(sizes.tokens, model.vocab_size, sizes.element_bytes), sizes.tokens)
    logits = rows * model.vocab_size * sizes.element_bytes
    return max(logits, 4 * model.vocab_size * model.hidden_size + 9 * sizes.state)


def _tables(sizes: Sizes, stages: Sequence[StagePieces]) -> float:
    """Bytes of rotary tables, and of the counts and biases of routers."""
    model = sizes.model
    width = model.head_dim if model.attention is AttentionKind.gqa else model.qk_rope_head_dim
    of_router = 4 * model.num_experts * (2 if model.selection_bias else 1)
    return 4 * sizes.seq_len * width + of_router * _num_moe(sizes, stages)


def _graph_pool(
    config: RunConfig, sizes: Sizes, stages: Sequence[StagePieces], lanes: float, working: float
) -> float:
    """Bytes of captured graphs beside activations: each lane has its working memory and copies at borders.

    At a border a captured segment reads a state, and a gradient of it, that no graph has made.
    """
    scope = config.graph.scope
    if scope == FULL_ITERATION or not segments_of(scope):
        return 0.0
    captured, moe = segments_of(scope), _num_moe(sizes, stages)
    dense = len(_layers(sizes, stages)) - moe
    copies = 2 * sizes.state * lanes / max(len(stages), 1)
    borders = (moe if "moe_combine" not in captured or "attn" not in captured else 0) + (
        dense if "mlp" not in captured or "attn" not in captured else 0
    )
    return copies * borders + max(lanes - 1, 0) * working


def communication_bytes(sizes: Sizes) -> float:
    """Bytes of communicators, and of a pipeline's messages under way."""
    layout = sizes.layout
    groups = {ranks_of(layout, axis) for axis in AXES if layout.size(axis) > 1}
    channels = min(layout.pp - 1, 2) * 2  # a channel for each direction to the neighbours
    messages = channels * MESSAGES_UNDER_WAY * sizes.state
    return len(groups) * COMMUNICATOR_BYTES + channels * CHANNEL_BYTES + messages


def _layers(sizes: Sizes, stages: Sequence[StagePieces]) -> list[int]:
    """Return the numbers of a rank's layers, with the layers that predict later tokens last."""
    of_mtp = [sizes.model.num_layers + k for stage in stages for k in stage.mtp]
    return [i for stage in stages for i in stage.layers] + of_mtp


def _num_moe(sizes: Sizes, stages: Sequence[StagePieces]) -> int:
    return sum(i >= sizes.model.num_dense_layers for i in _layers(sizes, stages))


@functools.lru_cache(maxsize=4096)
def ranks_of(layout: Layout, axis: Axis) -> object:
    """Return a key that axes with the same process groups share: the group of rank 0 stands for all."""
    return None if layout.size(axis) == 1 else layout.first_group(axis)
