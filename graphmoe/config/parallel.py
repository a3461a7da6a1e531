"""Sections of the schema on how a run is executed: over ranks, micro-batches, experts, graphs and memory."""

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
    """Layout of the ranks, docs/parallel.md. Ranks = dp * cp * tp * pp; experts fold the same ranks as
    edp * ep * etp * pp."""

    dp: RankCount | None = None
    """Copies of the dense weights, each with batches of its own; default: what the others leave over, > 0."""
    tp: RankCount = 1
    """Ranks that share each matrix of attention, dense and shared MLPs, embedding and head, > 0."""
    cp: RankCount = 1
    """Ranks that share each sequence, > 0."""
    cp_method: ContextMethod = ContextMethod.auto
    """Attention over the ranks of cp: alltoall (heads for positions), ring (keys and values
    go round), or auto: alltoall where the heads of a rank of tp divide by cp, else ring."""
    pp: RankCount = 1
    """Ranks of a pipeline, > 0, which share the layers; pipeline.schedule says how."""
    ep: RankCount = 1
    """Ranks that share the experts; may be more than dp, > 0."""
    etp: RankCount = 1
    """Ranks that share each expert's matrices, > 0."""
    dp_shard: DpShard = DpShard.zero1
    """State shared out by ranks with the same weights: zero1 main weights and moments, fsdp2 weights and
    gradients too, which takes more exchange and no graph.scope."""


@dataclass
class MoEConfig:
    """Execution of MoE layers; the model section says what they compute."""

    force_balance: bool = False
    """Route round robin, ignoring the router's choice. For benchmarks only."""
    expert_load: str = "none"
    """Loads of experts, whatever the router says, for benchmarks only: none (the router chooses), balanced,
    hot_experts, hot_rank, one_expert, rotating, burst, idle_rank, docs/model.md, or the path of a .json of
    counts, steps x MoE layers x experts."""
    experts: Annotated[str, EXPERTS_BACKENDS] = "auto"
    """Kernels of the routed experts in compiled runs; auto measures the installed ones on a GPU and remembers
    the fastest, and takes torch on a CPU; package.module:NAME is taken only where it is named. With
    precision.fp8 experts have kernels of their own; turbo multiplies by that of Primus-Turbo."""
    dispatcher: Annotated[str, DISPATCHERS] = "auto"
    """Exchange of tokens with the ranks of their experts: local (each rank holds all of them), alltoall
    (torch.distributed), symm (kernels that read the memory of other GPUs of the node), nvshmem (torch on
    NVSHMEM), deepep (the package DeepEP), turbo (its port in Primus-Turbo), or auto: local where
    parallel.ep * parallel.etp is 1, else alltoall; or package.module:NAME."""
    transport: Transport = Transport.auto
    """Mover of the rows of symm: pull (kernels), copy_engine (copies of blocks of a fixed size beside the
    kernels, which pull what a block has no place for), or auto: copy_engine with pipeline.ep_overlap=true on
    GPUs of NVIDIA, else pull."""
    dispatch_dtype: DispatchDtype = DispatchDtype.auto
    """Rows on the way to the experts, and gradients of their sums: bf16 (not rounded, whatever
    precision.compute is), fp8 (8 bits, which precision.fp8 would give them at arrival: no result changes), or
    auto: fp8 with precision.fp8=rowwise of experts and moe.dispatcher=symm, else bf16."""
    receive_budget: Any = 1.5
    """Room for rows of other ranks where no host counts them, as a multiple of what a balanced routing sends,
    > 0; or worst_case. A step in which more arrives runs again with more room, docs/parallel.md.
    Replicas (moe.balance) with enough slots make exact room instead."""
    balance: Balance = Balance.auto
    """Balance of ranks: none (tokens are dispatched to the rank that owns their expert), replicas (in each
    layer and micro-batch other ranks compute the hottest experts too, so that every rank has equally many
    tokens, docs/parallel.md), or auto: replicas with moe.dispatcher=symm where the pass fuse_experts runs."""
    replica_slots: Any = "auto"
    """Experts of others that a rank can compute, 1 to num_experts / ep; auto is as many as it owns, with
    which no rank ever has more than its share of rows."""
    replica_keep: bool = False
    """Keep the weights of replicas from forward to backward, which else gets them once more; without effect
    on experts in 8 bits, in separate steps, and where recompute covers moe_experts."""
    sync_free_stage: Any = "auto"
    """Parts of a MoE layer that never wait for the host: 0 nothing is promised; 1 router and routing plan; 2
    dispatch and experts too, but for one read of how many rows arrive; 3 the whole layer; auto is the lowest
    that graph.scope needs, docs/compile.md."""


@dataclass
class GraphConfig:
    """Capture into CUDA and HIP graphs, docs/compile.md."""

    scope: Any = "none"
    """Segments replayed from graphs: none, partial, moe, layer or full_iteration, or a list of segments."""
    warmup_steps: Count = 3
    """Steps that run uncaptured first, while kernels are compiled and measured, > 0."""


@dataclass
class RecomputeConfig:
    """Parts that the backward recomputes instead of keeping them, docs/tuning.md."""

    all: bool = False
    """Keep only what enters each layer."""
    segments: list[str] = field(default_factory=list)
    """Segments of the layers that are recomputed from their inputs."""
    ops: list[str] = field(default_factory=list)
    """Parts of segments whose results are not kept, in compiled runs: layernorm, core_attn, mla_up_proj,
    moe_act, mlp, shared_experts."""
    layer_ids: list[int] = field(default_factory=list)
    """Layers, counted from 0, multi-token-prediction layers last. Alone they are recomputed as a whole;
    beside segments or ops they say where those apply, and none is everywhere."""


@dataclass
class PipelineConfig:
    """Order of micro-batches, over the ranks of ``parallel.pp`` too, docs/pipeline.md."""

    schedule: Annotated[str, OneOf()] = "1f1b"
    """Order of the micro-batches of stages, where parallel.pp > 1: a schedule of docs/pipeline.md, or
    package.module:NAME."""
    virtual_stages: Annotated[int, POSITIVE, MANY_RANKS] | None = None
    """Stages on each rank; null: as few as the schedule takes."""
    microbatches: Annotated[int, POSITIVE, MANY_RANKS] | None = None
    """Micro-batches of a step on each rank; null: what train.global_batch_size and micro_batch_size give."""
    layout: str | None = None
    """Layers of each stage, such as "Et|(tt|)*6L"; null: the least work for the busiest rank."""
    costs: list[str] = field(default_factory=list)
    """Milliseconds of a micro-batch, forward and backward together, by which layers are shared out where no
    layout is given, such as [dense:3.1,moe:6.7,loss:9.3]; []: modelled times."""
    ep_overlap: bool = False
    """Overlap communication with compute: alternate the backward of each micro-batch with the forward of the
    next, and run shared experts and wgrad during dispatch and combine, docs/parallel.md."""


@dataclass
class ProfileConfig:
    """Records of a run's time, docs/tuning.md."""

    steps: list[int] = field(default_factory=list)
    """First and last step, counted from 1, that torch's profiler records, kernels and memory, or one number
    for one step; files are in the run's folder profile/, which graphmoe.trace reads. Empty: none."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record profile.steps."""
    pipeline: bool = False
    """Record when each stage works on which micro-batch in the steps that are logged, in pipeline.json, which
    graphmoe.pipeline_view draws; where parallel.pp > 1."""
