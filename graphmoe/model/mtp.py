"""Multi-token prediction as in DeepSeek-V3 (arXiv 2412.19437, section 2.2).

Depth k joins the hidden state of position i with the embedding of token i + k and predicts token
i + k + 1. Embedding and head are the main model's. The state that enters depth 1 has passed the main
model's final norm, as in the released checkpoints' serving code. Suffixes: B batch, S sequence, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphmoe.config.schema import ModelConfig, MoEConfig
from graphmoe.model.blocks import RMSNorm
from graphmoe.model.layer import MoELayer, MoEOutput
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.plan.layout import ALONE, Layout
from graphmoe.segments import Executor, Segment, run_segments


class MtpLayer(nn.Module):
    """One prediction depth: two norms, a projection of both inputs, a MoE layer, a final norm."""

    def __init__(
        self,
        config: ModelConfig,
        execution: MoEConfig,
        layout: Layout = ALONE,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.embed_norm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.proj = nn.Linear(2 * width, width, bias=False)
        self.layer = MoELayer(config, execution, layout, dispatcher)
        self.norm = RMSNorm(width, eps)

    def segments(self, index: int | None = None) -> list[Segment]:
        """Both inputs joined, then the layer's segments, at a place of the model."""
        join = Segment("embed", self.join, ("normed", "embedded"), ("x",), layer=index)
        return [join, *self.layer.segments(index)]

    def join(self, h_BSD: Tensor, embedded_BSD: Tensor) -> Tensor:
        """One hidden state of the state so far and the embedding of a later token."""
        return self.proj(torch.cat([self.embed_norm(embedded_BSD), self.hidden_norm(h_BSD)], dim=-1))

    def forward(
        self,
        h_BSD: Tensor,
        embedded_BSD: Tensor,
        cos_SP: Tensor,
        sin_SP: Tensor,
        execute: Executor = run_segments,
        index: int | None = None,
    ) -> MoEOutput:
        """The layer's output, which ``norm`` prepares for the head and for the next depth."""
        tensors = {"normed": h_BSD, "embedded": embedded_BSD, "cos": cos_SP, "sin": sin_SP}
        tensors |= self.layer.earlier()
        writes = self.layer.writes
        return MoEOutput.from_results(writes, execute(self.segments(index), tensors, writes))


def shift_left(values_BS: Tensor, by: int, fill: int) -> Tensor:
    """values[:, i + by] at position i, ``fill`` behind the end."""
    shifted_BS = values_BS.roll(-by, dims=1)
    position_S = torch.arange(values_BS.shape[1], device=values_BS.device)
    return shifted_BS.masked_fill(position_S >= values_BS.shape[1] - by, fill)
