"""A transformer layer: a list of named segments over explicit tensors.

Suffixes: B batch, S sequence, D hidden, P rotation pairs, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from graphmoe.config.choices import look_up
from graphmoe.config.schema import ConfigError, ModelConfig, MoEConfig
from graphmoe.model.attention import build_attention
from graphmoe.model.blocks import RMSNorm
from graphmoe.model.dispatch import ROUTED, BoundedPath, CombineSegment, DispatchSegment, has_load
from graphmoe.model.moe_segments import (
    DenseMLP,
    Experts,
    Preprocess,
    Router,
    SendPreprocess,
    SwiGLU,
    combine,
    dispatch_local,
)
from graphmoe.ops.dispatch import PLANNED, RECEIVED, REPLICAS, SEND_PLAN, Dispatcher
from graphmoe.plan.experts import replica_slots
from graphmoe.plan.layout import ALONE, Layout
from graphmoe.segments import Executor, Segment, run_segments

OUTPUTS = ("x", "loss", "stats", "counts", "counted", "load", "replicas")
PLAN = ("counts", "ends", "row", "slot")
ATTN_READS = ("x", "cos", "sin")
LOGIT_BOUND = "logit_bound"  # of each head, fp32 [H]: attn writes it if its ``attend`` has ``bounds``


class MoEOutput(NamedTuple):
    x_BSD: Tensor
    loss: Tensor
    """Weighted auxiliary losses; fp32 scalar."""
    stats: Tensor
    """Router statistics (`graphmoe.model.moe_segments.ROUTER_STATS`), fp32 [3], detached."""
    counts_E: Tensor
    """Tokens routed to each expert, int32."""
    counted_E: Tensor | None = None
    """Tokens per expert that the balance loss counts, int32; None if equal to ``counts_E`` or unused."""
    received_load: Tensor | None = None
    """Rows and slots received by this rank, int32 [2]; None if not measured."""
    expert_RS: Tensor | None = None
    """Experts in all ranks' replica slots, int32, -1 for none."""

    @classmethod
    def from_results(cls, writes: Sequence[str], results: Iterable[Tensor]) -> MoEOutput:
        named = dict(zip(writes, results, strict=True))
        return cls(*(named.get(name) for name in OUTPUTS))  # type: ignore[arg-type]


def attn_inputs(
    x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor, first_BS: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the inputs of attn by name; ``first`` only if attention stays within documents."""
    return {"x": x_BSD, "cos": cos_SP, "sin": sin_SP} | ({} if first_BS is None else {"first": first_BS})


class DenseLayer(nn.Module):
    attn_reads: tuple[str, ...] = ATTN_READS
    attn_writes: tuple[str, ...] = ("x",)

    def __init__(self, config: ModelConfig, layout: Layout = ALONE) -> None:
        super().__init__()
        self.attn = build_attention(config, layout)
        self.mlp = DenseMLP(config, layout)

    def segments(self, index: int | None = None) -> list[Segment]:
        return [
            Segment("attn", self.attn, self.attn_reads, self.attn_writes, layer=index),
            Segment("mlp", self.mlp, ("x",), ("x",), layer=index),
        ]

    def forward(
        self,
        x_BSD: Tensor,
        cos_SP: Tensor,
        sin_SP: Tensor,
        execute: Executor = run_segments,
        index: int | None = None,
        first_BS: Tensor | None = None,
    ) -> Tensor:
        (x_BSD,) = execute(self.segments(index), attn_inputs(x_BSD, cos_SP, sin_SP, first_BS), ("x",))
        return x_BSD


class MoELayer(nn.Module):
    """MoE layer; base class of plug-in layers (``model.layer``), which override `segments`, keeping names.

    Segments: attn, moe_router, moe_preprocess, moe_dispatch, shared_experts, moe_experts, moe_combine.
    """

    dense: type[DenseLayer] = DenseLayer
    axes: tuple[str, ...] = ()
    """Axes of tp and cp that a plug-in supports."""
    documents = False
    """True if a plug-in gives all inputs of attn to ``self.attn``, so that ``data.document_mask`` works."""
    attn_reads: tuple[str, ...] = ATTN_READS
    attn_writes: tuple[str, ...] = ("x",)

    def __init__(
        self,
        config: ModelConfig,
        execution: MoEConfig,
        layout: Layout = ALONE,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        """Without a dispatcher the rank must hold all experts."""
        super().__init__()
        self.attn = build_attention(config, layout)
        self.moe_router = Router(config, execution, layout)
        self.moe_preprocess = SendPreprocess(config, layout) if dispatcher else Preprocess(config)
        slots = replica_slots(execution, config, layout.ep)
        # replaces ``moe_preprocess`` if tokens are sent to replicas
        self.moe_replicas = SendPreprocess(config, layout, slots) if slots else None
        self.moe_experts = Experts(config, layout)
        # whole on each rank of tp, for its own tokens: to gather those would send more than the gradients
        of_shared = config.hidden_size, config.shared_ffn_size
        self.shared_experts = SwiGLU(*of_shared, gated=config.shared_gate) if config.shared_ffn_size else None
        self.holds_all = layout.size("ep_etp") == 1
        self.experts_read = "scaled" if config.input_scaling else "h"
        self._paths: dict[Dispatcher, tuple[DispatchSegment, CombineSegment] | BoundedPath] = {}
        self.use(dispatcher)

    def use(self, dispatcher: Dispatcher | None) -> None:
        """Switch to a dispatcher; compiled code of earlier ones is kept."""
        self.dispatcher = dispatcher
        if dispatcher is None or dispatcher in self._paths:
            return
        if dispatcher.chunk is not None:
            self._paths[dispatcher] = BoundedPath(dispatcher, self.moe_experts)
            return
        slots = self.moe_replicas.replica_slots if self.moe_replicas else 0
        # some dispatchers send replica weights along with the rows
        along = self.moe_experts if self._sends_weights(dispatcher) else None
        dispatch = DispatchSegment(dispatcher, len(self.moe_experts.w_down) + slots, along)
        again = along if self._sends_weights(dispatcher, again=True) else None
        back = CombineSegment(dispatcher, self.shared_experts is not None, again)
        self._paths[dispatcher] = dispatch, back

    @property
    def writes(self) -> tuple[str, ...]:
        replicates = self.moe_replicas and self.dispatcher and self.dispatcher.chunk is None
        there = {
            "counted": self.moe_router.counts_apart,
            "load": has_load(self.dispatcher),
            "replicas": replicates,
        }
        return tuple(name for name in OUTPUTS if there.get(name, True))

    def segments(self, index: int | None = None) -> list[Segment]:
        piece = functools.partial(Segment, layer=index)
        read = ("x", "earlier") if self.moe_router.reads_earlier else ("x",)
        apart = ["counted"] if self.moe_router.counts_apart else []
        scaled = [self.experts_read] if self.experts_read != "h" else []
        routed = ("h", "weight", "experts", "loss", "stats", *apart, *scaled)
        pieces = [
            piece("attn", self.attn, self.attn_reads, self.attn_writes),
            piece("moe_router", self.moe_router, read, routed),
        ]
        if self.dispatcher is not None:
            return [*pieces, *self._dispatched(self.dispatcher, piece)]
        assert self.holds_all, "experts are on other ranks, and there is no dispatcher"
        reads = ("received", "weight", "ends", "row", "slot")
        return [
            *pieces,
            piece("moe_preprocess", self.moe_preprocess, ("experts",), PLAN),
            piece("moe_dispatch", dispatch_local, (self.experts_read,), ("received",)),
            *self._shared(piece),
            piece("moe_experts", self.moe_experts, reads, ("routed",)),
            piece("moe_combine", combine, ("x", "routed", *self._shared_sum), ("x",)),
        ]

    def _dispatched(self, dispatcher: Dispatcher, piece: Callable[..., Segment]) -> list[Segment]:
        path = self._paths[dispatcher]
        if isinstance(path, BoundedPath):
            return self._bounded(path, piece)
        dispatch, combine_received = path
        # without a capacity shapes depend on the routing, so the segment cannot be captured
        dynamic = dispatcher.capacity is None
        preprocess = self.moe_replicas or self.moe_preprocess
        along = REPLICAS[1:] if self._sends_weights(dispatcher) else ()
        experts = REPLICAS[0] if self.moe_replicas else "experts"
        reads = (self.experts_read, "weight", experts, *SEND_PLAN, *along)
        again = along if self._sends_weights(dispatcher, again=True) else ()
        back = ("x", "routed", *SEND_PLAN, *dispatcher.handle, *again)
        on_the_way = functools.partial(piece, stream="comm", dynamic=dynamic)
        return [
            piece("moe_preprocess", preprocess, ("experts",), preprocess.writes),
            on_the_way("moe_dispatch", dispatch, reads, (*dispatch.writes, *dispatcher.handle)),
            *self._shared(piece),
            self._received(dynamic, piece),
            on_the_way("moe_combine", combine_received, (*back, *self._shared_sum), ("x",)),
        ]

    @staticmethod
    def _sends_weights(dispatcher: Dispatcher, *, again: bool = False) -> bool:
        # whether replica weights are sent with the rows; again: in the backward too
        kept = again and getattr(dispatcher, "keeps_weights", False)
        return not kept and getattr(dispatcher, "sends_weights", False)

    def _bounded(self, path: BoundedPath, piece: Callable[..., Segment]) -> list[Segment]:
        reads = (self.experts_read, "weight", "experts", *SEND_PLAN)
        # the path recomputes what its backward needs; stream="comm" excludes it from other recomputation
        experts = piece("moe_experts", path, reads, ROUTED, stream="comm", dynamic=True, fused=path.fused)
        return [
            piece("moe_preprocess", self.moe_preprocess, ("experts",), ("counts", *SEND_PLAN)),
            *self._shared(piece),
            experts,
            piece("moe_combine", combine, ("x", "routed", *self._shared_sum), ("x",)),
        ]

    def _received(self, dynamic: bool, piece: Callable[..., Segment]) -> Segment:
        experts = self.moe_experts
        if not dynamic:
            reads = (*PLANNED, *REPLICAS[1:]) if self.moe_replicas else PLANNED
            return piece("moe_experts", experts.planned, reads, ("routed",))
        fused = experts.received_fused
        return piece("moe_experts", experts.received, RECEIVED, ("routed",), dynamic=True, fused=fused)

    def earlier(self) -> dict[str, Tensor]:
        """Return the router's input ``earlier``: tokens per expert in earlier micro-batches; {} if unused."""
        router = self.moe_router
        return {"earlier": router.earlier_counts.clone()} if router.reads_earlier else {}

    @property
    def _shared_sum(self) -> tuple[str, ...]:
        return () if self.shared_experts is None else ("shared",)

    def _shared(self, piece: Callable[..., Segment]) -> list[Segment]:
        if self.shared_experts is None:
            return []
        return [piece("shared_experts", self.shared_experts, ("h",), ("shared",))]

    def forward(
        self,
        x_BSD: Tensor,
        cos_SP: Tensor,
        sin_SP: Tensor,
        execute: Executor = run_segments,
        index: int | None = None,
        first_BS: Tensor | None = None,
    ) -> MoEOutput:
        tensors = attn_inputs(x_BSD, cos_SP, sin_SP, first_BS) | self.earlier()
        return MoEOutput.from_results(self.writes, execute(self.segments(index), tensors, self.writes))


def layer_class(config: ModelConfig) -> type[MoELayer]:
    """Return the class of ``model.layer``. *Raises* ConfigError."""
    found = look_up({"standard": MoELayer}, config.layer, "model.layer", type)
    if not issubclass(found, MoELayer):
        raise ConfigError(f"model.layer={config.layer} does not derive from graphmoe.model.layer.MoELayer")
    return found


class MtpLayer(nn.Module):
    """One depth of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Depth k combines the state of position i with the embedding of token i + k and predicts token i + k + 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        execution: MoEConfig,
        layout: Layout = ALONE,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        # depth 1 reads the state after the main model's final norm, as the serving code of the released
        # checkpoints does
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.embed_norm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.proj = nn.Linear(2 * width, width, bias=False)
        self.layer = layer_class(config)(config, execution, layout, dispatcher)
        self.norm = RMSNorm(width, eps)

    def segments(self, index: int | None = None) -> list[Segment]:
        join = Segment("embed", self.join, ("normed", "embedded"), ("x",), layer=index)
        return [join, *self.layer.segments(index)]

    def join(self, h_BSD: Tensor, embedded_BSD: Tensor) -> Tensor:
        # embedding first: the order of the released checkpoints' projection
        return self.proj(torch.cat([self.embed_norm(embedded_BSD), self.hidden_norm(h_BSD)], dim=-1))

    def forward(
        self,
        h_BSD: Tensor,
        embedded_BSD: Tensor,
        cos_SP: Tensor,
        sin_SP: Tensor,
        execute: Executor = run_segments,
        index: int | None = None,
        first_BS: Tensor | None = None,
    ) -> MoEOutput:
        tensors = attn_inputs(h_BSD, cos_SP, sin_SP, first_BS) | self.layer.earlier()
        tensors |= {"normed": tensors.pop("x"), "embedded": embedded_BSD}
        writes = self.layer.writes
        return MoEOutput.from_results(writes, execute(self.segments(index), tensors, writes))
