"""Parameter counts of a model from its configuration, by arithmetic alone.

Two totals are in use. ``full`` counts every parameter. ``body`` leaves out embedding, head, norms and
multi-token prediction; docs/models.md states it for each preset.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from graphmoe.config import AttentionKind, ModelConfig


@dataclass(frozen=True)
class Components:
    """Parameters of each part of a model; ``mtp`` is everything of the multi-token-prediction layers.

    A tied head has none of its own: its weight counts as the embedding's.
    """

    embedding: int
    head: int
    attention: int
    dense_mlp: int
    router: int
    routed_experts: int
    shared_experts: int
    norms: int
    mtp: int

    @property
    def full(self) -> int:
        """Sum of all components."""
        return sum(dataclasses.astuple(self))

    @property
    def body(self) -> int:
        """Sum without embedding, head, norms and multi-token prediction."""
        return self.attention + self.dense_mlp + self.router + self.routed_experts + self.shared_experts


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters that exist, and those that one token uses (all but the experts it is not sent to)."""

    total: Components
    active: Components


def count_parameters(model: ModelConfig) -> ParameterCounts:
    """Count the parameters of ``model`` without building it.

    The selection bias is a buffer and not counted. The embedding counts as active in full, as published
    figures do.
    """
    return ParameterCounts(
        total=_components(model, experts_per_layer=model.num_experts),
        active=_components(model, experts_per_layer=model.top_k),
    )


def attention_weights(model: ModelConfig) -> int:
    """Weights of one layer's attention projections, without norms."""
    d, heads = model.hidden_size, model.num_heads
    if model.attention is AttentionKind.gqa:
        return d * model.head_dim * (2 * heads + 2 * model.num_kv_heads)
    q_size = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    rank = model.q_lora_rank
    query = d * rank + rank * q_size if rank else d * q_size
    kv_down = d * (model.kv_lora_rank + model.qk_rope_head_dim)
    kv_up = model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    return query + kv_down + kv_up + heads * model.v_head_dim * d


def swiglu_weights(model: ModelConfig, ffn_size: int) -> int:
    """Weights of one SwiGLU MLP: gate, up and down."""
    return 3 * model.hidden_size * ffn_size


def _components(model: ModelConfig, *, experts_per_layer: int) -> Components:
    """All components, with this many routed experts in each MoE layer."""
    d, layers = model.hidden_size, model.num_layers
    num_moe_layers = layers - model.num_dense_layers
    attention = attention_weights(model)
    router = d * model.num_experts
    routed = experts_per_layer * swiglu_weights(model, model.expert_ffn_size)
    shared = swiglu_weights(model, model.shared_ffn_size)
    norms = 2 * d + _attention_norms(model)
    mtp_norms = 3 * d  # of the embedding, of the hidden state, and before the shared head
    mtp_layer = 2 * d * d + mtp_norms + attention + router + routed + shared + norms
    return Components(
        embedding=model.vocab_size * d,
        head=0 if model.tie_embeddings else model.vocab_size * d,
        attention=layers * attention,
        dense_mlp=model.num_dense_layers * swiglu_weights(model, model.dense_ffn_size),
        router=num_moe_layers * router,
        routed_experts=num_moe_layers * routed,
        shared_experts=num_moe_layers * shared,
        norms=layers * norms + d,
        mtp=model.mtp_depth * mtp_layer,
    )


def _attention_norms(model: ModelConfig) -> int:
    """Norm weights inside one layer's attention, beside the norm at its start."""
    if model.attention is AttentionKind.mla:
        return model.q_lora_rank + model.kv_lora_rank
    return 2 * model.head_dim if model.qk_norm else 0
