"""The model: embedding, layers, and the loss segment (final norm, head, cross-entropy).

Suffixes: B batch, S sequence, V vocabulary, D hidden, L MoE layers, E experts, P rotation pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.config import ConfigError, ModelConfig, MoEConfig
from graphmoe.dispatch import Dispatcher
from graphmoe.layout import ALONE, Layout
from graphmoe.model.attention import rotary_dim
from graphmoe.model.layer import DenseLayer, MoELayer, MoEOutput
from graphmoe.model.linear import column_parallel
from graphmoe.model.moe import ROUTER_STATS, Router
from graphmoe.model.mtp import MtpLayer, shift_left
from graphmoe.model.norm import RMSNorm
from graphmoe.model.rope import rope_tables
from graphmoe.model.sequence import own_positions
from graphmoe.model.tied import tie_head
from graphmoe.model.vocabulary import IGNORED, Embedding, cross_entropy_sum
from graphmoe.ops.collectives import all_gather, sums_over
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
    load_2: Tensor | None = None
    """The most of ``MoEOutput.load_2`` of all MoE layers; None where the dispatcher has no capacity."""


class LossHead(nn.Module):
    """Final norm, head and cross-entropy."""

    def __init__(self, config: ModelConfig, layout: Layout = ALONE) -> None:
        super().__init__()
        self.tp, self.cp = layout.tp, layout.cp
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = column_parallel(config.hidden_size, config.vocab_size, self.tp)

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
        """Mean cross-entropy of normed hidden states; 0 where every label is ignored.

        The mean is over the positions of all ranks of cp, each with those labels that are its own.
        """
        logits_TV = self.head(all_gather(h_BSD, "tp", self.tp, dim=1)).flatten(0, 1).float()
        labels_T = labels_BS.flatten()
        total, count = cross_entropy_sum(logits_TV, labels_T, self.tp), (labels_T != IGNORED).sum()
        if self.cp > 1:
            total, count = sums_over("cp", self.cp, total, count.float())
        return total / count.clamp_min(1)

    def logits(self, x_BSD: Tensor) -> Tensor:
        """fp32 logits [B, S, V], from an fp32 product whatever the weights' dtype."""
        return F.linear(self.norm(x_BSD).float(), self.head.weight.float())


class Transformer(nn.Module):
    """A decoder-only MoE language model in plain PyTorch, or what one rank of a layout has of it."""

    def __init__(
        self,
        config: ModelConfig,
        execution: MoEConfig,
        layout: Layout = ALONE,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        self.embed = Embedding(config.vocab_size, config.hidden_size, layout.tp)
        dense = config.num_dense_layers
        self.layers = nn.ModuleList(
            DenseLayer(config, layout) if i < dense else MoELayer(config, execution, layout, dispatcher)
            for i in range(config.num_layers)
        )
        self.loss_head = LossHead(config, layout)
        self.mtp = nn.ModuleList(
            MtpLayer(config, execution, layout, dispatcher) for _ in range(config.mtp_depth)
        )
        if config.tie_embeddings:
            tie_head(self)
        self._rope: tuple[Tensor, Tensor] | None = None
        self._own_rope: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits of the next token, fp32 [B, S, V]. Raises ConfigError where several ranks share them."""
        for name, ranks in (("tp", self.layout.tp), ("cp", self.layout.cp)):
            if ranks > 1:
                raise ConfigError(
                    f"parallel.{name}={ranks}: each rank has a part of the logits, which are not gathered; "
                    f"use parallel.{name}=1 to generate"
                )
        x_BSD, _, _ = self.hidden(tokens_BS)
        return self.loss_head.logits(x_BSD)

    def loss(self, tokens_BS: Tensor, labels_BS: Tensor, execute: Executor = run_segments) -> LossOutput:
        """Losses of a micro-batch; labels are the next tokens, -100 is ignored. No device sync.

        All ranks of cp and tp get the same whole sequences, and return the same losses.
        """
        x_BSD, outputs, rope = self.hidden(tokens_BS, execute)
        wanted = ("cross_entropy", "normed") if self.mtp else ("cross_entropy",)
        cross_entropy, *normed = execute(
            self.loss_head.segments(), {"x": x_BSD, "labels": self._own(labels_BS)}, wanted
        )
        mtp = cross_entropy.new_zeros(())
        for depth, layer in enumerate(self.mtp, start=1):
            embedded_BSD = self._embed(shift_left(tokens_BS, depth, fill=0), execute)
            output = layer(*normed, embedded_BSD, *rope, execute, len(self.layers) + depth - 1)
            named = {"x": output.x_BSD, "labels": self._own(shift_left(labels_BS, depth, fill=IGNORED))}
            wanted = ("cross_entropy", "normed") if depth < len(self.mtp) else ("cross_entropy",)
            assert isinstance(layer, MtpLayer)
            loss, *normed = execute(self.loss_head.segments(layer.norm), named, wanted)
            mtp = mtp + loss / len(self.mtp)
            outputs.append(output)
        total = cross_entropy + self.config.mtp_loss_weight * mtp
        for output in outputs:
            total = total + output.loss
        stats_L3, counts_LE = self._stack(outputs, tokens_BS.device)
        loads = [output.load_2 for output in outputs if output.load_2 is not None]
        load_2 = torch.stack(loads).amax(dim=0) if loads else None
        return LossOutput(total, cross_entropy.detach(), mtp.detach(), stats_L3, counts_LE, load_2)

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
        named = {"tokens": self._own(tokens_BS)}
        (x_BSD,) = execute([Segment("embed", self.embed, ("tokens",), ("x",))], named, ("x",))
        return x_BSD

    def _own(self, whole_BS: Tensor) -> Tensor:
        return own_positions(whole_BS, self.layout, dim=1)

    def rope(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables [S, P] in fp32, kept for the longest sequence seen.

        Of this rank's positions where keys and values go round: there no rank has others.
        """
        if self._rope is None or len(self._rope[0]) < seq_len or self._rope[0].device != device:
            with torch.inference_mode(False):  # a table made while generating serves a later backward too
                self._rope = rope_tables(self.config, rotary_dim(self.config), seq_len, device)
            self._own_rope = None
        cos_SP, sin_SP = (table_SP[:seq_len] for table_SP in self._rope)
        if not self.layout.ring:
            return cos_SP, sin_SP
        if self._own_rope is None or len(self._own_rope[0]) * self.layout.cp != seq_len:
            with torch.inference_mode(False):
                self._own_rope = own_positions(cos_SP, self.layout, 0), own_positions(sin_SP, self.layout, 0)
        return self._own_rope

    @property
    def dispatcher(self) -> Dispatcher | None:
        """By which tokens travel, in all layers; None where they stay on their rank."""
        return next((m.dispatcher for m in self.modules() if isinstance(m, MoELayer)), None)

    def use(self, dispatcher: Dispatcher) -> None:
        """From now on tokens travel by this dispatcher, in all layers."""
        for module in self.modules():
            if isinstance(module, MoELayer):
                module.use(dispatcher)

    def routers(self) -> list[Router]:
        """The routers in the order of ``LossOutput.counts_LE``."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def blocks(self) -> list[tuple[nn.Module, ...]]:
        """Modules that a forward needs at a time, in the order of the layers; each parameter is in one."""
        found: list[tuple[nn.Module, ...]] = [(self.embed,), *((layer,) for layer in self.layers)]
        if self.config.tie_embeddings:
            found[0] = self.embed, self.loss_head
        else:
            found.append((self.loss_head,))
        for layer in self.mtp:
            assert isinstance(layer, MtpLayer)
            found += [(layer.embed_norm, layer.hidden_norm, layer.proj, layer.layer), (layer.norm,)]
        return found

    def _stack(self, outputs: list[MoEOutput], device: torch.device) -> tuple[Tensor, Tensor]:
        if not outputs:
            no_counts = torch.zeros(0, self.config.num_experts, device=device, dtype=torch.int32)
            return torch.zeros(0, len(ROUTER_STATS), device=device), no_counts
        return torch.stack([o.stats for o in outputs]), torch.stack([o.counts_E for o in outputs])
