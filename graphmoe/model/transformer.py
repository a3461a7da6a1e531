"""The model: embedding, layers, and the loss segment (final norm, head, cross-entropy).

Suffixes: B batch, S sequence, V vocabulary, D hidden, L MoE layers, E experts, P rotation pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.config import ModelConfig, MoEConfig
from graphmoe.model.attention import rotary_dim
from graphmoe.model.layer import DenseLayer, MoELayer, MoEOutput
from graphmoe.model.moe import ROUTER_STATS, Router
from graphmoe.model.mtp import IGNORED, MtpLayer, shift_left
from graphmoe.model.norm import RMSNorm
from graphmoe.model.rope import rope_tables
from graphmoe.segments import Executor, Segment, run_segments


class LossOutput(NamedTuple):
    """Losses of a micro-batch, all fp32 scalars on the device, and router statistics."""

    total: Tensor
    """What is differentiated: cross-entropy + mtp_loss_weight * mtp + auxiliary losses."""
    cross_entropy: Tensor
    """Mean over the labels that are not ignored; detached."""
    mtp: Tensor
    """Mean multi-token-prediction loss, 0 without MTP layers; detached."""
    stats_L3: Tensor
    """``ROUTER_STATS`` of each MoE layer, MTP layers last; detached."""
    counts_LE: Tensor
    """Slots routed to each expert of each MoE layer, int32."""


class LossHead(nn.Module):
    """Final norm, head and cross-entropy."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean cross-entropy of the next tokens, fp32 scalar."""
        return self.cross_entropy(self.norm(x_BSD), labels_BS)

    def segments(self, norm: nn.Module | None = None) -> list[Segment]:
        """The loss segment, with another final norm if one is given.

        ``normed`` is what the prediction of later tokens starts from.
        """
        return [
            Segment("loss", norm or self.norm, ("x",), ("normed",)),
            Segment("loss", self.cross_entropy, ("normed", "labels"), ("cross_entropy",)),
        ]

    def cross_entropy(self, h_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean cross-entropy of normed hidden states; 0 where every label is ignored."""
        logits_TV = self.head(h_BSD).flatten(0, 1).float()
        labels_T = labels_BS.flatten()
        total = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum")
        return total / (labels_T != IGNORED).sum().clamp_min(1)

    def logits(self, x_BSD: Tensor) -> Tensor:
        """fp32 logits [B, S, V], from an fp32 product whatever the weights' dtype."""
        return F.linear(self.norm(x_BSD).float(), self.head.weight.float())


class Transformer(nn.Module):
    """A decoder-only MoE language model in plain PyTorch."""

    def __init__(self, config: ModelConfig, execution: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        dense = config.num_dense_layers
        self.layers = nn.ModuleList(
            DenseLayer(config) if i < dense else MoELayer(config, execution) for i in range(config.num_layers)
        )
        self.loss_head = LossHead(config)
        self.mtp = nn.ModuleList(MtpLayer(config, execution) for _ in range(config.mtp_depth))
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits of the next token, fp32 [B, S, V]."""
        x_BSD, _, _ = self.hidden(tokens_BS)
        return self.loss_head.logits(x_BSD)

    def loss(self, tokens_BS: Tensor, labels_BS: Tensor, execute: Executor = run_segments) -> LossOutput:
        """Losses of a micro-batch; labels are the next tokens, -100 is ignored. No device sync."""
        x_BSD, outputs, rope = self.hidden(tokens_BS, execute)
        wanted = ("cross_entropy", "normed") if self.mtp else ("cross_entropy",)
        cross_entropy, *normed = execute(self.loss_head.segments(), {"x": x_BSD, "labels": labels_BS}, wanted)
        mtp = cross_entropy.new_zeros(())
        for depth, layer in enumerate(self.mtp, start=1):
            embedded_BSD = self._embed(shift_left(tokens_BS, depth, fill=0), execute)
            output = layer(*normed, embedded_BSD, *rope, execute, len(self.layers) + depth - 1)
            named = {"x": output.x_BSD, "labels": shift_left(labels_BS, depth, fill=IGNORED)}
            wanted = ("cross_entropy", "normed") if depth < len(self.mtp) else ("cross_entropy",)
            assert isinstance(layer, MtpLayer)
            loss, *normed = execute(self.loss_head.segments(layer.norm), named, wanted)
            mtp = mtp + loss / len(self.mtp)
            outputs.append(output)
        total = cross_entropy + self.config.mtp_loss_weight * mtp
        for output in outputs:
            total = total + output.loss
        stats_L3, counts_LE = self._stack(outputs, tokens_BS.device)
        return LossOutput(total, cross_entropy.detach(), mtp.detach(), stats_L3, counts_LE)

    def hidden(
        self, tokens_BS: Tensor, execute: Executor = run_segments
    ) -> tuple[Tensor, list[MoEOutput], tuple[Tensor, Tensor]]:
        """Hidden states before the final norm, the MoE layers' outputs, and the rotary tables."""
        rope = self.rope(tokens_BS.shape[1], tokens_BS.device)
        x_BSD, outputs = self._embed(tokens_BS, execute), []
        for index, layer in enumerate(self.layers):
            output = layer(x_BSD, *rope, execute, index)
            if isinstance(output, MoEOutput):
                outputs.append(output)
                output = output.x_BSD
            x_BSD = output
        return x_BSD, outputs, rope

    def _embed(self, tokens_BS: Tensor, execute: Executor) -> Tensor:
        (x_BSD,) = execute([Segment("embed", self.embed, ("tokens",), ("x",))], {"tokens": tokens_BS}, ("x",))
        return x_BSD

    def rope(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables [S, P] in fp32, kept for the longest sequence seen."""
        if self._rope is None or len(self._rope[0]) < seq_len or self._rope[0].device != device:
            with torch.inference_mode(False):  # a table made while generating serves a later backward too
                self._rope = rope_tables(self.config, rotary_dim(self.config), seq_len, device)
        cos_SP, sin_SP = self._rope
        return cos_SP[:seq_len], sin_SP[:seq_len]

    def routers(self) -> list[Router]:
        """The routers in the order of ``LossOutput.counts_LE``."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def _stack(self, outputs: list[MoEOutput], device: torch.device) -> tuple[Tensor, Tensor]:
        if not outputs:
            no_counts = torch.zeros(0, self.config.num_experts, device=device, dtype=torch.int32)
            return torch.zeros(0, len(ROUTER_STATS), device=device), no_counts
        return torch.stack([o.stats for o in outputs]), torch.stack([o.counts_E for o in outputs])
