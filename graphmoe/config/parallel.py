"""Sections of the schema on execution: ranks, micro-batches, experts, graphs and memory."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from graphmoe.config.choices import (
    DISPATCHERS,
    EXPERTS_BACKENDS,
    Balance,
    ContextMethod,
    DispatchDtype,
    DpShard,
    Transport,
)
from graphmoe.config.ranges import MANY_RANKS, POSITIVE, Count, OneOf, RankCount


@dataclass
class ParallelConfig:
    """Ranks, docs/parallel.md: dp * cp * tp * pp; experts split the same ranks as edp * ep * etp * pp."""

    dp: RankCount | None = None
    """Copies of the dense weights, each with its own batches, > 0; default: the remaining factor."""
    tp: RankCount = 1
    """Ranks that split each dense matrix, embedding and head, > 0."""
    cp: RankCount = 1
    """Ranks that split each sequence, > 0."""
    cp_method: ContextMethod = ContextMethod.auto
    """Attention over cp: alltoall (heads), ring (keys and values), or auto (alltoall if cp divides the
    heads)."""
    pp: RankCount = 1
    """Ranks that split the layers, by pipeline.schedule, > 0."""
    ep: RankCount = 1
    """Ranks that split the experts, > 0; may exceed dp."""
    etp: RankCount = 1
    """Ranks that split each expert's matrices, > 0."""
    dp_shard: DpShard = DpShard.zero1
    """State sharded over equal ranks: zero1 (master weights, moments), fsdp2 (weights and gradients
    too)."""


@dataclass
class MoEConfig:
    """Execution of MoE layers."""

    force_balance: bool = False
    """For benchmarks only: route round robin instead of by the router."""
    expert_load: str = "none"
    """For benchmarks only: none, balanced, hot_experts, hot_rank, one_expert, rotating, burst, idle_rank
    (docs/model.md), or a .json of counts, steps x MoE layers x experts."""
    experts: Annotated[str, EXPERTS_BACKENDS] = "auto"
    """Expert kernels of compiled runs: auto (on a GPU the fastest, on a CPU torch), a name, or
    package.module:NAME."""
    dispatcher: Annotated[str, DISPATCHERS] = "auto"
    """Dispatch of tokens: local, alltoall (torch.distributed), symm (peer memory of a node), nvshmem,
    deepep, turbo (Primus-Turbo), auto (alltoall, or local without parallel.ep or etp), or
    package.module:NAME."""
    transport: Transport = Transport.auto
    """Transport of symm: pull (kernels), copy_engine (copies of blocks), or auto (copy_engine with
    pipeline.ep_overlap=true on NVIDIA GPUs)."""
    dispatch_dtype: DispatchDtype = DispatchDtype.auto
    """Dispatched rows: bf16 (not quantized), fp8 (quantized before sending), or auto (fp8 with symm and
    rowwise fp8 experts)."""
    receive_budget: Any = 1.5
    """Receive capacity as a multiple of balanced routing, > 0, or worst_case; docs/parallel.md has
    overflow."""
    balance: Balance = Balance.auto
    """none, replicas (other ranks also compute the hottest experts, docs/parallel.md), or auto (replicas
    with symm and the pass fuse_experts)."""
    replica_slots: Any = "auto"
    """Replicas that a rank can hold, 1 to num_experts / ep; auto: num_experts / ep, which always
    suffices."""
    replica_keep: bool = False
    """Save replica weights of bf16 experts for the backward, which otherwise fetches them again."""
    sync_free_stage: Any = "auto"
    """Parts of a MoE layer without host syncs: 0 none, 1 routing, 2 all but a read of the row count, 3
    all, auto (the lowest for graph.scope)."""


@dataclass
class GraphConfig:
    """Capture in CUDA and HIP graphs, docs/compile.md."""

    scope: Any = "none"
    """Captured segments: none, partial, moe, layer, full_iteration, or a list of segments."""
    warmup_steps: Count = 3
    """Uncaptured steps before capture, > 0."""


@dataclass
class RecomputeConfig:
    """Activations that the backward recomputes, docs/tuning.md."""

    all: bool = False
    """Save only the inputs of each layer."""
    segments: list[str] = field(default_factory=list)
    """Segments recomputed from their inputs."""
    ops: list[str] = field(default_factory=list)
    """Parts recomputed in compiled runs: layernorm, core_attn, mla_up_proj, moe_act, mlp,
    shared_experts."""
    layer_ids: list[int] = field(default_factory=list)
    """Layers of segments and ops, or recomputed whole, from 0; multi-token-prediction layers last; []:
    all."""


@dataclass
class PipelineConfig:
    """Order of micro-batches, docs/pipeline.md."""

    schedule: Annotated[str, OneOf()] = "1f1b"
    """Schedule if parallel.pp > 1: one of docs/pipeline.md, or package.module:NAME."""
    virtual_stages: Annotated[int, POSITIVE, MANY_RANKS] | None = None
    """Stages on each rank, > 0; null: the schedule's minimum."""
    microbatches: Annotated[int, POSITIVE, MANY_RANKS] | None = None
    """Micro-batches of a step on each rank, > 0; null: from the batch sizes."""
    layout: str | None = None
    """Layers of each stage, such as "Et|(tt|)*6L"; null: balanced."""
    costs: list[str] = field(default_factory=list)
    """Milliseconds of parts of a micro-batch, to balance stages, such as [moe:6.7,loss:9.3]; []:
    modelled."""
    ep_overlap: bool = False
    """Overlap communication with compute: alternate one micro-batch's backward with the next one's
    forward."""


@dataclass
class ProfileConfig:
    """Recorded timings of a run, docs/tuning.md."""

    steps: list[int] = field(default_factory=list)
    """First and last step, or the one, that torch's profiler records, from 1; []: none; graphmoe.trace
    reads them."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record profile.steps."""
    pipeline: bool = False
    """Record the stages' work in logged steps if parallel.pp > 1, for graphmoe.pipeline_view."""
