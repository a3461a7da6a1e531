"""A transformer layer: a short list of named segments over explicit tensors.

Suffixes: B batch, S sequence, D hidden, P rotation pairs, E experts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor, nn

from graphmoe.config import ModelConfig, MoEConfig
from graphmoe.model.attention import build_attention
from graphmoe.model.moe import DenseMLP, Experts, Preprocess, Router, SwiGLU, combine, dispatch_local
from graphmoe.segments import Executor, Segment, run_segments

PLAN = ("experts", "counts", "ends", "row", "slot", "live_rows")


class MoEOutput(NamedTuple):
    """What a MoE layer hands on beside the residual stream."""

    x_BSD: Tensor
    loss: Tensor
    """Weighted auxiliary losses of the router, fp32 scalar."""
    stats: Tensor
    """``graphmoe.model.moe.ROUTER_STATS``, fp32 [3], detached."""
    counts_E: Tensor
    """Slots routed to each expert, int32."""


class DenseLayer(nn.Module):
    """attn, mlp."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn = build_attention(config)
        self.mlp = DenseMLP(config)

    def segments(self, index: int | None = None) -> list[Segment]:
        """The segments of the layer at a place of the model."""
        return [
            Segment("attn", self.attn, ("x", "cos", "sin"), ("x",), layer=index),
            Segment("mlp", self.mlp, ("x",), ("x",), layer=index),
        ]

    def forward(
        self,
        x_BSD: Tensor,
        cos_SP: Tensor,
        sin_SP: Tensor,
        execute: Executor = run_segments,
        index: int | None = None,
    ) -> Tensor:
        (x_BSD,) = execute(self.segments(index), {"x": x_BSD, "cos": cos_SP, "sin": sin_SP}, ("x",))
        return x_BSD


class MoELayer(nn.Module):
    """attn, moe_router, moe_preprocess, moe_dispatch, shared_experts, moe_experts, moe_combine."""

    def __init__(self, config: ModelConfig, execution: MoEConfig) -> None:
        super().__init__()
        self.attn = build_attention(config)
        self.moe_router = Router(config, execution)
        self.moe_preprocess = Preprocess(config)
        self.moe_experts = Experts(config)
        self.shared_experts = (
            SwiGLU(config.hidden_size, config.shared_ffn_size) if config.shared_ffn_size else None
        )

    def segments(self, index: int | None = None) -> list[Segment]:
        """The segments of the layer at a place of the model."""
        piece = functools.partial(Segment, layer=index)
        routed = ("h", "weight", "experts", "loss", "stats")
        pieces = [
            piece("attn", self.attn, ("x", "cos", "sin"), ("x",)),
            piece("moe_router", self.moe_router, ("x",), routed),
            piece("moe_preprocess", self.moe_preprocess, ("experts",), PLAN),
            piece("moe_dispatch", dispatch_local, ("h",), ("received",)),
        ]
        combined: tuple[str, ...] = ("x", "routed")
        if self.shared_experts is not None:
            pieces.append(piece("shared_experts", self.shared_experts, ("h",), ("shared",)))
            combined += ("shared",)
        reads = ("received", "weight", "ends", "row", "slot")
        pieces.append(piece("moe_experts", self.moe_experts, reads, ("routed",)))
        pieces.append(piece("moe_combine", combine, combined, ("x",)))
        return pieces

    def forward(
        self,
        x_BSD: Tensor,
        cos_SP: Tensor,
        sin_SP: Tensor,
        execute: Executor = run_segments,
        index: int | None = None,
    ) -> MoEOutput:
        tensors = {"x": x_BSD, "cos": cos_SP, "sin": sin_SP}
        return MoEOutput(*execute(self.segments(index), tensors, ("x", "loss", "stats", "counts")))
