"""The parameters of a rank: how many elements each has there, and over which ranks its gradient is summed.

Their order is that of the model's modules, which is the order in flat buffers. A test holds both together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from graphmoe.config import AttentionKind, ModelConfig
from graphmoe.layout import Axis, Layout
from graphmoe.pipeline_layout import StagePieces, any_of, needs_embedding, normalises


class Weight(NamedTuple):
    """A parameter of a rank, as far as buffers are concerned."""

    size: int
    dims: int
    summed_over: Axis

    def numel(self) -> int:
        return self.size

    def dim(self) -> int:
        return self.dims


def rank_weights(model: ModelConfig, layout: Layout, stages: Iterable[StagePieces]) -> list[Weight]:
    """The parameters of the rank that has these stages."""
    stages, make = [*stages], _Make(model, layout)

    def embeds(stage: StagePieces) -> bool:
        return needs_embedding(stage, tied=model.tie_embeddings)

    found: list[Weight] = []
    if any_of(stages, embeds):
        axis: Axis = "embed" if len(layout.embed_on) > 1 else make.cut_axis
        found.append(Weight(model.vocab_size * model.hidden_size // layout.tp, 2, axis))
    for i in sorted(i for stage in stages for i in stage.layers):
        found += make.layer(i < model.num_dense_layers)
    if any_of(stages, lambda stage: normalises(stage, model.mtp_depth)):
        found.append(make.norm(model.hidden_size))
    if any_of(stages, lambda stage: stage.loss) and not model.tie_embeddings:
        found.append(make.cut(model.vocab_size * model.hidden_size))
    for _ in sorted(k for stage in stages for k in stage.mtp):
        found += make.mtp_layer()
    return found


class _Make:
    """Parameters by module."""

    def __init__(self, model: ModelConfig, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self.cut_axis: Axis = "dp_cp" if layout.tp > 1 else "stage"

    def norm(self, width: int) -> Weight:
        return Weight(width, 1, "stage")

    def whole(self, size: int) -> Weight:
        """A matrix that every rank of a stage has."""
        return Weight(size, 2, "stage")

    def cut(self, size: int) -> Weight:
        """A matrix that the ranks of tp share."""
        return Weight(size // self.layout.tp, 2, self.cut_axis)

    def layer(self, is_dense: bool) -> Iterator[Weight]:
        model, d = self.model, self.model.hidden_size
        yield from self._attention()
        if is_dense:
            yield from self._swiglu(model.dense_ffn_size)
            yield self.norm(d)
            return
        yield self.norm(d)
        yield self.whole(d * model.num_experts)
        experts, inner = model.num_experts // self.layout.ep, model.expert_ffn_size // self.layout.etp
        for rows in (2, 1):
            yield Weight(experts * rows * inner * d, 3, "edp")
        if model.shared_ffn_size:
            yield from self._swiglu(model.shared_ffn_size)

    def mtp_layer(self) -> Iterator[Weight]:
        d = self.model.hidden_size
        yield self.norm(d)
        yield self.norm(d)
        yield self.whole(2 * d * d)
        yield from self.layer(is_dense=False)
        yield self.norm(d)

    def _swiglu(self, inner: int) -> Iterator[Weight]:
        for rows in (2, 1):
            yield self.cut(rows * inner * self.model.hidden_size)

    def _attention(self) -> Iterator[Weight]:
        model, d, heads = self.model, self.model.hidden_size, self.model.num_heads
        yield self.norm(d)
        if model.attention is AttentionKind.gqa:
            for count in (heads, model.num_kv_heads, model.num_kv_heads):
                yield self.cut(d * count * model.head_dim)
            if model.qk_norm:
                yield self.norm(model.head_dim)
                yield self.norm(model.head_dim)
            yield self.cut(heads * model.head_dim * d)
            return
        of_queries = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
        if model.q_lora_rank:
            yield self.whole(d * model.q_lora_rank)
            yield self.norm(model.q_lora_rank)
            yield self.cut(model.q_lora_rank * of_queries)
        else:
            yield self.cut(d * of_queries)
        yield self.whole(d * (model.kv_lora_rank + model.qk_rope_head_dim))
        yield self.norm(model.kv_lora_rank)
        yield self.cut(model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim))
        yield self.cut(heads * model.v_head_dim * d)
