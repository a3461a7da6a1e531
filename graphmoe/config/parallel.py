"""Configuration sections on execution: parallelism, MoE layers, graphs, recompute, pipeline, profiling."""

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
    """Data-parallel copies of the dense weights, > 0; default: the remaining factor."""
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
    """Sharded over ranks with equal weights: zero1 (master weights, moments), fsdp2 (weights and gradients
    too)."""


@dataclass
class MoEConfig:
    """Execution of MoE layers."""

    force_balance: bool = False
    """Benchmarks only: route round-robin, ignoring the router."""
    expert_load: str = "none"
    """Benchmarks only: none, balanced, hot_experts, hot_rank, one_expert, rotating, burst, idle_rank
    (docs/model.md), or a .json of counts, steps x MoE layers x experts."""
    experts: Annotated[str, EXPERTS_BACKENDS] = "auto"
    """Expert kernels of compiled runs: auto (fastest on a GPU, torch on a CPU), a name, or
    package.module:NAME."""
    dispatcher: Annotated[str, DISPATCHERS] = "auto"
    """Token dispatch: local, alltoall (torch.distributed), symm (peer memory of a node), nvshmem, deepep,
    turbo (Primus-Turbo), auto (alltoall, or local without parallel.ep or etp), or package.module:NAME."""
    transport: Transport = Transport.auto
    """symm transport: pull (kernels), copy_engine (block copies), or auto (copy_engine with
    pipeline.ep_overlap=true on NVIDIA GPUs)."""
    dispatch_dtype: DispatchDtype = DispatchDtype.auto
    """Dispatched rows: bf16, fp8 (quantized before sending), or auto (fp8 with symm and rowwise fp8
    experts)."""
    receive_budget: Any = 1.5
    """Receive capacity over balanced routing, > 0, or worst_case; overflow: docs/parallel.md."""
    balance: Balance = Balance.auto
    """none, replicas (other ranks also compute the hottest experts, docs/parallel.md), or auto (replicas
    with symm and the pass fuse_experts)."""
    replica_slots: Any = "auto"
    """Most replicas per rank, 1 to num_experts / ep; auto: num_experts / ep, always enough."""
    replica_keep: bool = False
    """Save replica weights of bf16 experts for the backward instead of fetching them again."""
    sync_free_stage: Any = "auto"
    """MoE layer parts without host syncs: 0 none, 1 routing, 2 all but a read of the row count, 3 all,
    auto (lowest for graph.scope)."""


@dataclass
class GraphConfig:
    """CUDA and HIP graph capture, docs/compile.md."""

    scope: Any = "none"
    """Captured segments: none, partial, moe, layer, full_iteration, or a list of segments."""
    warmup_steps: Count = 3
    """Uncaptured steps before capture, > 0."""


@dataclass
class RecomputeConfig:
    """Activation recomputation, docs/tuning.md."""

    all: bool = False
    """Save only layer inputs."""
    segments: list[str] = field(default_factory=list)
    """Segments recomputed from their inputs."""
    ops: list[str] = field(default_factory=list)
    """Recomputed parts in compiled runs: layernorm, core_attn, mla_up_proj, moe_act, mlp, shared_experts."""
    layer_ids: list[int] = field(default_factory=list)
    """Layers of segments and ops, or, without these, recomputed whole; from 0, multi-token-prediction
    layers last; []: all."""


@dataclass
class PipelineConfig:
    """Pipeline parallelism, docs/pipeline.md."""

    schedule: Annotated[str, OneOf()] = "1f1b"
    """Schedule: one of docs/pipeline.md, or package.module:NAME."""
    virtual_stages: Annotated[int, POSITIVE, MANY_RANKS] | None = None
    """Stages per rank, > 0; null: the schedule's minimum."""
    microbatches: Annotated[int, POSITIVE, MANY_RANKS] | None = None
    """Micro-batches per step and rank, > 0; null: from the batch sizes."""
    layout: str | None = None
    """Layers per stage, such as "Et|(tt|)*6L"; null: balanced."""
    costs: list[str] = field(default_factory=list)
    """Milliseconds per micro-batch part, such as [moe:6.7,loss:9.3], to balance stages; []: modelled."""
    ep_overlap: bool = False
    """Overlap communication with compute: interleave one micro-batch's backward with the next one's
    forward."""


@dataclass
class ProfileConfig:
    """Profiling, docs/tuning.md."""

    steps: list[int] = field(default_factory=list)
    """First and last step, or one, for torch's profiler, from 1; []: none; read by graphmoe.trace."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record profile.steps."""
    pipeline: bool = False
    """Record stage timelines of logged steps for graphmoe.pipeline_view."""
