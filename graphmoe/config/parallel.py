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
    """Layout of the ranks, docs/parallel.md: dp * cp * tp * pp; experts fold the same ranks as edp * ep * etp
    * pp."""

    dp: RankCount | None = None
    """Copies of the dense weights, each with its own batches; default: the remaining factor, > 0."""
    tp: RankCount = 1
    """Ranks that split each matrix of attention, dense and shared MLPs, embedding and head, > 0."""
    cp: RankCount = 1
    """Ranks that split each sequence, > 0."""
    cp_method: ContextMethod = ContextMethod.auto
    """Attention over cp: alltoall (heads for positions), ring (keys and values circulate), or auto: alltoall
    if cp divides the heads of a tp rank, else ring."""
    pp: RankCount = 1
    """Pipeline ranks, which split the layers by pipeline.schedule, > 0."""
    ep: RankCount = 1
    """Ranks that split the experts; may exceed dp, > 0."""
    etp: RankCount = 1
    """Ranks that split each expert's matrices, > 0."""
    dp_shard: DpShard = DpShard.zero1
    """State sharded over ranks with the same weights: zero1 (master weights and moments), or fsdp2 (weights
    and gradients too, with more communication and without graph.scope)."""


@dataclass
class MoEConfig:
    """Execution of MoE layers; the model section defines what they compute."""

    force_balance: bool = False
    """Route round robin instead of by the router. For benchmarks only."""
    expert_load: str = "none"
    """Forced expert loads, for benchmarks only: none (the router chooses), balanced, hot_experts, hot_rank,
    one_expert, rotating, burst, idle_rank (docs/model.md), or a .json of counts, steps x MoE layers x
    experts."""
    experts: Annotated[str, EXPERTS_BACKENDS] = "auto"
    """Kernels of the routed experts in compiled runs: auto (on a GPU the fastest installed by measurement, on
    a CPU torch), one by name, or package.module:NAME. fp8 experts have their own kernels; turbo uses
    Primus-Turbo's."""
    dispatcher: Annotated[str, DISPATCHERS] = "auto"
    """Dispatch of tokens to the ranks of their experts: local (each rank has all), alltoall
    (torch.distributed), symm (kernels that read peer GPUs of the node), nvshmem (torch on NVSHMEM), deepep
    (DeepEP), turbo (Primus-Turbo's port), auto (local if parallel.ep * parallel.etp is 1, else alltoall), or
    package.module:NAME."""
    transport: Transport = Transport.auto
    """Transport of symm rows: pull (kernels), copy_engine (fixed-size block copies beside kernels, which
    pull the overflow), or auto: copy_engine with pipeline.ep_overlap=true on NVIDIA GPUs, else pull."""
    dispatch_dtype: DispatchDtype = DispatchDtype.auto
    """Dtype of dispatched rows and of their sums' gradients: bf16 (no quantization, whatever
    precision.compute is), fp8 (quantized before sending instead of on arrival, with equal results), or auto:
    fp8 with precision.fp8=rowwise experts and moe.dispatcher=symm, else bf16."""
    receive_budget: Any = 1.5
    """Receive capacity without a host count, as a multiple of balanced routing, > 0; or worst_case. A step
    that overflows it is re-run with more, docs/parallel.md. Replicas with enough slots need exactly their
    share."""
    balance: Balance = Balance.auto
    """Balance of ranks: none (tokens are dispatched to their expert's owner), replicas (other ranks also
    compute the hottest experts, so that all ranks get equally many tokens, docs/parallel.md), or auto:
    replicas with moe.dispatcher=symm and the pass fuse_experts."""
    replica_slots: Any = "auto"
    """Replicas of other ranks' experts that a rank can hold, 1 to num_experts / ep; auto: as many experts as
    it owns, which always suffices for balance."""
    replica_keep: bool = False
    """Save replica weights for the backward, which otherwise fetches them again; no effect on fp8 experts, in
    separate steps, or if recompute covers moe_experts."""
    sync_free_stage: Any = "auto"
    """Parts of a MoE layer without host syncs: 0 none guaranteed; 1 router and routing plan; 2 dispatch and
    experts too, except one read of the row count; 3 the whole layer; auto: the lowest for graph.scope,
    docs/compile.md."""


@dataclass
class GraphConfig:
    """Capture in CUDA and HIP graphs, docs/compile.md."""

    scope: Any = "none"
    """Captured segments: none, partial, moe, layer or full_iteration, or a list of segments."""
    warmup_steps: Count = 3
    """Uncaptured steps before capture, in which kernels are compiled and measured, > 0."""


@dataclass
class RecomputeConfig:
    """Activations that the backward recomputes, docs/tuning.md."""

    all: bool = False
    """Save only the inputs of each layer."""
    segments: list[str] = field(default_factory=list)
    """Segments recomputed from their inputs."""
    ops: list[str] = field(default_factory=list)
    """Parts of segments that are recomputed, in compiled runs: layernorm, core_attn, mla_up_proj, moe_act,
    mlp, shared_experts."""
    layer_ids: list[int] = field(default_factory=list)
    """Layers, counted from 0, multi-token-prediction layers last, that are recomputed, or in which segments
    and ops apply; []: all."""


@dataclass
class PipelineConfig:
    """Order of micro-batches, also over the ranks of ``parallel.pp``, docs/pipeline.md."""

    schedule: Annotated[str, OneOf()] = "1f1b"
    """Schedule of micro-batches if parallel.pp > 1: one of docs/pipeline.md, or package.module:NAME."""
    virtual_stages: Annotated[int, POSITIVE, MANY_RANKS] | None = None
    """Stages on each rank; null: the schedule's minimum."""
    microbatches: Annotated[int, POSITIVE, MANY_RANKS] | None = None
    """Micro-batches of a step on each rank; null: from train.global_batch_size and micro_batch_size."""
    layout: str | None = None
    """Layers of each stage, such as "Et|(tt|)*6L"; null: the least work for the busiest rank."""
    costs: list[str] = field(default_factory=list)
    """Milliseconds of a micro-batch, forward plus backward, that balance stages without a layout, such as
    [dense:3.1,moe:6.7,loss:9.3]; []: modelled times."""
    ep_overlap: bool = False
    """Overlap communication with compute: alternate each micro-batch's backward with the next one's forward,
    and run shared experts and wgrad during dispatch and combine, docs/parallel.md."""


@dataclass
class ProfileConfig:
    """Recorded timings of a run, docs/tuning.md."""

    steps: list[int] = field(default_factory=list)
    """First and last step that torch's profiler records (kernels and memory), counted from 1, or one step;
    files are in the run's folder profile/, for graphmoe.trace. Empty: none."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record profile.steps."""
    pipeline: bool = False
    """Record when each stage works on which micro-batch in logged steps, in pipeline.json, for
    graphmoe.pipeline_view; if parallel.pp > 1."""
