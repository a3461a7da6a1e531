"""Model FLOPs per token.

Convention: two FLOPs per multiply-add; the backward of a matrix product costs twice its forward, so a
weight that a token meets costs 6 FLOPs in a training step; causal attention is counted by half, S/2 keys
for each query; the embedding (a lookup), router and norms are not counted, nor is recomputation.
Every multi-token-prediction layer adds its projection, its MoE layer and one more pass through the head.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from graphmoe.config.schema import ModelConfig
from graphmoe.model.sizes import attention_weights
from graphmoe.plan.costs.layer_parts import attention_scores, swiglu_weights


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one token's forward in each part of the model."""

    attention_projections: int
    attention_scores: int
    dense_mlp: int
    routed_experts: int
    shared_experts: int
    head: int
    mtp: int


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token in training, forward by component, and backward as twice that."""

    components: ForwardFlops

    @property
    def forward(self) -> int:
        """FLOPs of the forward."""
        return sum(dataclasses.astuple(self.components))

    @property
    def backward(self) -> int:
        """FLOPs of the backward."""
        return 2 * self.forward

    @property
    def total(self) -> int:
        """FLOPs of forward and backward."""
        return 3 * self.forward


def flops_per_token(model: ModelConfig, seq_len: int) -> TokenFlops:
    """FLOPs of one token, averaged over the positions of a sequence of ``seq_len`` tokens."""
    num_moe_layers = model.num_layers - model.num_dense_layers
    projections = 2 * attention_weights(model)
    scores = attention_scores(model, seq_len)
    routed = 2 * model.top_k * swiglu_weights(model, model.expert_ffn_size)
    shared = 2 * swiglu_weights(model, model.shared_ffn_size)
    head = 2 * model.vocab_size * model.hidden_size
    mtp_projection = 2 * 2 * model.hidden_size**2
    return TokenFlops(
        ForwardFlops(
            attention_projections=model.num_layers * projections,
            attention_scores=model.num_layers * scores,
            dense_mlp=2 * model.num_dense_layers * swiglu_weights(model, model.dense_ffn_size),
            routed_experts=num_moe_layers * routed,
            shared_experts=num_moe_layers * shared,
            head=head,
            mtp=model.mtp_depth * (mtp_projection + projections + scores + routed + shared + head),
        )
    )
