"""The model: embedding, layers, and the loss segment (final norm, head, cross-entropy).

Suffixes: B batch, S sequence, V vocabulary, D hidden, L MoE layers, E experts, P rotation pairs.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.config.schema import ConfigError, ModelConfig, MoEConfig
from graphmoe.model.attention import rope_tables
from graphmoe.model.blocks import (
    IGNORED,
    Embedding,
    RMSNorm,
    attended_pairs,
    column_parallel,
    count_trained,
    cross_entropy_sum,
    decoded,
    labels_at,
    mark_shared,
    own_positions,
    shift_left,
    tie_head,
)
from graphmoe.model.dispatch import has_load
from graphmoe.model.layer import ATTN_READS, DenseLayer, MoELayer, MoEOutput, MtpLayer, layer_class
from graphmoe.model.lora import add_adapters
from graphmoe.model.moe_segments import ROUTER_STATS, Router
from graphmoe.ops.collectives import all_gather, sums_over
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.plan.attention import attention_facts, masks_of_layers, model_of_layer
from graphmoe.plan.experts import is_moe, moe_layers
from graphmoe.plan.layout import ALONE, Layout
from graphmoe.plan.pipeline.layouts import StagePieces, all_pieces, needs_embedding, normalises
from graphmoe.segments import Executor, Segment, run_segments


class LossOutput(NamedTuple):
    """Losses (fp32 scalars on the device) and router statistics of a micro-batch or stage."""

    total: Tensor
    """cross-entropy + mtp_loss_weight * mtp + auxiliary losses."""
    cross_entropy: Tensor
    """Mean over labels that are not ignored, times its weight if ``stage`` has weights; detached."""
    mtp: Tensor
    """Mean over MTP depths, each as ``cross_entropy``, or 0; detached."""
    stats_L3: Tensor
    """Router statistics (``ROUTER_STATS``) of each MoE layer, MTP layers last; detached."""
    counts_LE: Tensor
    """Tokens routed to each expert, int32."""
    counted_LE: Tensor | None = None
    """Tokens per expert that the balance loss counts, int32; None if equal to ``counts_LE`` or unused."""
    received_L2: Tensor | None = None
    """Rows and slots received by this rank in each MoE layer, int32."""
    replicas: Tensor | None = None
    """Number of replicas over all ranks and MoE layers, int64."""
    attended: Tensor | None = None
    """Attended pairs of a query and a key, fp32 mean of all layers; 0 in a stage without the loss. None if
    documents are not masked."""
    carried: tuple[Tensor, ...] = ()
    """Tensors [B, S, D] for the next stage: the last state, or after the final norm those of all depths."""


class Elsewhere(nn.Module):
    """Placeholder for a module that another pipeline rank has."""


class LossHead(nn.Module):
    def __init__(
        self, config: ModelConfig, layout: Layout = ALONE, *, has_norm: bool = True, has_head: bool = True
    ) -> None:
        super().__init__()
        self.tp, self.cp = layout.tp, layout.cp
        width = config.hidden_size
        self.norm = RMSNorm(width, config.norm_eps) if has_norm else Elsewhere()
        self.head = column_parallel(width, config.vocab_size, self.tp) if has_head else Elsewhere()

    def segments(self, norm: nn.Module | None, *, loss: bool = True) -> list[Segment]:
        """Return the loss segments; without ``norm`` the input is already normed."""
        found = [] if norm is None else [Segment("loss", norm, ("x",), ("normed",))]
        if loss:
            found.append(Segment("loss", self.cross_entropy, ("normed", "labels"), ("cross_entropy",)))
        return found

    def cross_entropy(self, h_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean loss over all cp ranks, from normed states; 0 if every label is ignored."""
        logits_TV = self.head(all_gather(h_BSD, "tp", self.tp, dim=1)).flatten(0, 1).float()
        # each tp rank has all positions and a part of the vocabulary
        labels_T = labels_BS.flatten()
        total, count = cross_entropy_sum(logits_TV, labels_T, self.tp), (labels_T != IGNORED).sum()
        if self.cp > 1:
            # the label counts of cp ranks differ, so sums are reduced, not means
            total, count = sums_over("cp", self.cp, total, count.float())
        return total / count.clamp_min(1)

    def logits(self, x_BSD: Tensor) -> Tensor:
        # an fp32 GEMM whatever the weights' dtype
        return F.linear(self.norm(x_BSD).float(), self.head.weight.float())  # type: ignore[arg-type]


class Transformer(nn.Module):
    """Decoder-only MoE language model, or one rank's part of it."""

    def __init__(
        self,
        config: ModelConfig,
        execution: MoEConfig,
        layout: Layout = ALONE,
        dispatcher: Dispatcher | None = None,
        stages: Sequence[StagePieces] = (),
    ) -> None:
        """``stages`` of this rank; by default the whole model."""
        super().__init__()
        self.config, self.layout = config, layout
        # one per MoE layer of the whole model; empty if tokens stay on their rank
        self.dispatchers = (dispatcher,) * self.num_moe_layers if dispatcher else ()
        self.stages = (*stages,) or (all_pieces(config.num_layers, config.mtp_depth),)
        embeds = any(needs_embedding(stage, tied=config.tie_embeddings) for stage in self.stages)
        self.embed = Embedding(config.vocab_size, config.hidden_size, layout.tp) if embeds else Elsewhere()

        parts = config, execution, layout, dispatcher
        self.layers = nn.ModuleList(_layers(self.stages, *parts))
        self.loss_head = LossHead(
            config,
            layout,
            has_norm=any(normalises(stage, config.mtp_depth) for stage in self.stages),
            has_head=any(stage.loss for stage in self.stages),
        )
        here = {k for stage in self.stages for k in stage.mtp}
        self.mtp = nn.ModuleList(
            MtpLayer(*parts) if k in here else Elsewhere() for k in range(config.mtp_depth)
        )
        if config.tie_embeddings and any(stage.loss for stage in self.stages):
            tie_head(self)
        if config.tie_embeddings or config.mtp_depth:
            mark_shared(self, layout)
        add_adapters(self, config)
        self._rope: tuple[Tensor, Tensor] | None = None
        self._own_rope: tuple[Tensor, Tensor] | None = None
        self.end_token: int | None = None  # of documents, or MARKED; None: a sequence is one document

    def mask_documents(self, end_token: int) -> None:
        """Keep attention, positions and losses within documents; ``end_token`` ends one, or is `MARKED`."""
        self.end_token = end_token
        for module in self.modules():
            if isinstance(module, DenseLayer | MoELayer):
                module.attn_reads = (*ATTN_READS, "first")

    def _attended(self, first_BS: Tensor) -> Tensor:
        masks = masks_of_layers(self.config, first_BS.shape[1])
        pairs = (attended_pairs(first_BS, *mask) * layers for mask, layers in masks.items())
        return torch.stack([*pairs]).sum() / self.config.num_layers

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return next-token logits, fp32 [B, S, V]. *Raises* ConfigError if tp or cp splits them."""
        for name, ranks in (("tp", self.layout.tp), ("cp", self.layout.cp)):
            if ranks > 1:
                raise ConfigError(
                    f"parallel.{name}={ranks}: each rank has a part of the logits, which are not gathered; "
                    f"use parallel.{name}=1 to generate"
                )
        return self.loss_head.logits(self.hidden(tokens_BS))

    def count_trained(self, batches: Sequence[Tensor]) -> Tensor:
        """Return `graphmoe.model.blocks.count_trained` of token ids [B, S + 1]."""
        return count_trained(batches, self.end_token, self.config.mtp_depth)

    def loss(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        execute: Executor = run_segments,
        weights: Tensor | None = None,
    ) -> LossOutput:
        """Return the losses of a micro-batch, as `decoded` reads it; label -100 is ignored. No device sync.

        All cp and tp ranks pass whole sequences and get the same losses. ``weights`` as in ``stage``.
        """
        (whole,) = self.stages
        return self.stage(whole, (), tokens_BS, labels_BS, execute, weights)

    def stage(
        self,
        pieces: StagePieces,
        carried: tuple[Tensor, ...],
        tokens_BS: Tensor,
        labels_BS: Tensor,
        execute: Executor = run_segments,
        weights: Tensor | None = None,
    ) -> LossOutput:
        """Run a stage on the tensors ``carried`` from the stage before. No device sync.

        ``weights`` [1 + mtp_depth], without a gradient, multiply the mean cross-entropy of each depth.
        """
        outputs: list[MoEOutput] = []
        rope = self.rope(tokens_BS.shape[1], tokens_BS.device)
        tokens_BS, labels_BS, first_BS = decoded(tokens_BS, labels_BS, self.end_token)
        attended = None if first_BS is None else self._attended(first_BS) * pieces.loss
        if pieces.embed:
            carried = (self._embed(tokens_BS, execute),)
        if len(pieces.layers):
            (x_BSD,) = carried
            x_BSD, outputs = self._run_layers(x_BSD, pieces.layers, rope, execute, first_BS)
            carried = (x_BSD,)
        losses: list[Tensor] = []
        if pieces.loss or len(pieces.mtp):
            carried, losses = self._predict(pieces, carried, tokens_BS, labels_BS, execute, outputs, first_BS)
        if weights is not None and losses:
            # outside of the segment, whose code and graphs stay the same
            losses = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
        # stages without a loss return zeros, so all stages return the same tensors
        none = torch.zeros((), device=tokens_BS.device)
        cross_entropy = losses[0] if losses else none
        mtp = sum((loss / len(self.mtp) for loss in losses[1:]), none)
        total = cross_entropy + self.config.mtp_loss_weight * mtp
        for output in outputs:
            total = total + output.loss
        stats_L3, counts_LE = self._stack(outputs, tokens_BS.device)
        counted = [output.counted_E for output in outputs if output.counted_E is not None]
        counted_LE = torch.stack(counted) if counted else None
        loads = [output.received_load for output in outputs if output.received_load is not None]
        received_L2 = torch.stack(loads) if loads else self._no_load(tokens_BS.device)
        slots = [output.expert_RS for output in outputs if output.expert_RS is not None]
        replicas = (torch.stack(slots) >= 0).sum() if slots else None
        handed = () if pieces.loss else carried
        detached = cross_entropy.detach(), mtp.detach()
        return LossOutput(
            total, *detached, stats_L3, counts_LE, counted_LE, received_L2, replicas, attended, handed
        )

    def _predict(
        self,
        pieces: StagePieces,
        carried: tuple[Tensor, ...],
        tokens_BS: Tensor,
        labels_BS: Tensor,
        execute: Executor,
        outputs: list[MoEOutput],
        first_BS: Tensor | None,
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        rope, losses = self.rope(tokens_BS.shape[1], tokens_BS.device), list[Tensor]()

        def finish(x_BSD: Tensor, norm: nn.Module | None, depth: int) -> list[Tensor]:
            named = {"x" if norm else "normed": x_BSD}
            wanted = ["normed"] if norm and (depth < len(self.mtp) or not pieces.loss) else []
            if pieces.loss:
                named["labels"] = self._own(labels_at(labels_BS, depth, first_BS))
                wanted = ["cross_entropy", *wanted]
            results = list(execute(self.loss_head.segments(norm, loss=pieces.loss), named, tuple(wanted)))
            if pieces.loss:
                losses.append(results.pop(0))
            return results

        if normalises(pieces, len(self.mtp)):
            (x_BSD,) = carried
            normed = finish(x_BSD, self.loss_head.norm, 0)
        else:
            normed = [*carried]
            for depth, state_BSD in enumerate(normed if pieces.loss else ()):
                finish(state_BSD, None, depth)
        for k in pieces.mtp:
            layer, depth = self.mtp[k], k + 1
            assert isinstance(layer, MtpLayer)
            embedded_BSD = self._embed(shift_left(tokens_BS, depth, 0, first_BS), execute)
            output = layer(normed[-1], embedded_BSD, *rope, execute, len(self.layers) + k, first_BS)
            outputs.append(output)
            normed += finish(output.x_BSD, layer.norm, depth)
        return tuple(normed), losses

    def hidden(self, tokens_BS: Tensor) -> Tensor:
        """Return the states before the final norm, [B, S, D]."""
        return self.states(tokens_BS)[0]

    def states(self, tokens_BS: Tensor, execute: Executor = run_segments) -> tuple[Tensor, list[MoEOutput]]:
        """Return the states before the final norm, [B, S, D], and the outputs of the MoE layers."""
        tokens_BS, _, first_BS = decoded(tokens_BS, tokens_BS, self.end_token)
        x_BSD, rope = self._embed(tokens_BS, execute), self.rope(tokens_BS.shape[1], tokens_BS.device)
        return self._run_layers(x_BSD, range(len(self.layers)), rope, execute, first_BS)

    def _run_layers(
        self,
        x_BSD: Tensor,
        layers: range,
        rope: tuple[Tensor, Tensor],
        execute: Executor,
        first_BS: Tensor | None,
    ) -> tuple[Tensor, list[MoEOutput]]:
        outputs = []
        for index in layers:
            output = self.layers[index](x_BSD, *rope, execute, index, first_BS)
            if isinstance(output, MoEOutput):
                outputs.append(output)
                output = output.x_BSD
            x_BSD = output
        return x_BSD, outputs

    def _embed(self, tokens_BS: Tensor, execute: Executor) -> Tensor:
        named = {"tokens": self._own(tokens_BS)}
        (x_BSD,) = execute([Segment("embed", self.embed, ("tokens",), ("x",))], named, ("x",))
        return x_BSD

    def segment_lists(self) -> list[list[Segment]]:
        found = [[Segment("embed", self.embed, ("tokens",), ("x",))]]
        layers = enumerate((*self.layers, *self.mtp))
        found += [layer.segments(i) for i, layer in layers if not isinstance(layer, Elsewhere)]
        norm = self.loss_head.norm
        if not isinstance(norm, Elsewhere):
            found.append(self.loss_head.segments(norm, loss=not isinstance(self.loss_head.head, Elsewhere)))
        return [each for each in found if not isinstance(each[0].run, Elsewhere)]

    def _own(self, whole_BS: Tensor) -> Tensor:
        return own_positions(whole_BS, self.layout, dim=1)

    def rope(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosine and sine tables, fp32 [S, P]."""
        # tables only grow: shorter sequences use a slice
        if self._rope is None or len(self._rope[0]) < seq_len or self._rope[0].device != device:
            with torch.inference_mode(False):  # a table made while generating serves a later backward
                self._rope = rope_tables(self.config, attention_facts(self.config).rotary, seq_len, device)
            self._own_rope = None
        cos_SP, sin_SP = (table_SP[:seq_len] for table_SP in self._rope)
        # a ring never has other ranks' positions
        if not self.layout.ring:
            return cos_SP, sin_SP
        if self._own_rope is None or len(self._own_rope[0]) * self.layout.cp != seq_len:
            with torch.inference_mode(False):
                self._own_rope = own_positions(cos_SP, self.layout, 0), own_positions(sin_SP, self.layout, 0)
        return self._own_rope

    @property
    def dispatcher(self) -> Dispatcher | None:
        return self.dispatchers[0] if self.dispatchers else None

    def use(self, dispatchers: tuple[Dispatcher, ...]) -> None:
        self.dispatchers = dispatchers
        here = [place for stage in self.stages for place in self.moe_layers(stage)]
        layers = [module for module in self.modules() if isinstance(module, MoELayer)]
        for place, layer in zip(here, layers, strict=True):
            layer.use(dispatchers[place])

    def _no_load(self, device: torch.device) -> Tensor | None:
        return torch.zeros(0, 2, dtype=torch.int32, device=device) if has_load(self.dispatcher) else None

    def routers(self) -> list[Router]:
        """Return this rank's routers, in the order of ``LossOutput.counts_LE``."""
        return [module for module in self.modules() if isinstance(module, Router)]

    @property
    def num_moe_layers(self) -> int:
        return len(moe_layers(self.config))

    def moe_layers(self, pieces: StagePieces) -> range:
        """Return the range of a stage's MoE layers among the model's."""
        here = {*pieces.layers, *(self.config.num_layers + k for k in pieces.mtp)}
        places = [place for place, layer in enumerate(moe_layers(self.config)) if layer in here]
        return range(places[0], places[-1] + 1) if places else range(0)

    def _stack(self, outputs: list[MoEOutput], device: torch.device) -> tuple[Tensor, Tensor]:
        if not outputs:
            no_counts = torch.zeros(0, self.config.num_experts, device=device, dtype=torch.int32)
            return torch.zeros(0, len(ROUTER_STATS), device=device), no_counts
        return torch.stack([o.stats for o in outputs]), torch.stack([o.counts_E for o in outputs])


def _layers(
    stages: Sequence[StagePieces],
    config: ModelConfig,
    execution: MoEConfig,
    layout: Layout,
    dispatcher: Dispatcher | None,
) -> Iterator[nn.Module]:
    here, moe_layer = {i for stage in stages for i in stage.layers}, layer_class(config)
    for i in range(config.num_layers):
        model = model_of_layer(config, i)
        if i not in here:
            yield Elsewhere()
        elif is_moe(config, i):
            yield moe_layer(model, execution, layout, dispatcher)
        else:
            yield moe_layer.dense(model, layout)
