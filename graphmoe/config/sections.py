"""Sections of a run's configuration: model, parallelism, MoE layers, formats, graphs, pipeline, launch."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from graphmoe.config.choices import (
    ATTENTIONS,
    DISPATCHERS,
    EXPERTS_BACKENDS,
    FP8_PRODUCTS,
    LAYERS,
    LORA_TARGETS,
    AttentionBackend,
    AttentionBias,
    AuxLoss,
    Balance,
    ComputeDtype,
    ContextMethod,
    DeltaNetBackend,
    DispatchDtype,
    DpShard,
    Fp8Measure,
    Fp8WeightGrad,
    GroupScore,
    LinearAttention,
    RopeScaling,
    ScoreFunction,
    Transport,
)
from graphmoe.config.formats import Fp8Recipe
from graphmoe.config.ranges import (
    FP32,
    INT32,
    MANY_LAYERS,
    MANY_RANKS,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Count,
    CountOrZero,
    OneOf,
    RankCount,
    Size,
)


@dataclass
class ModelConfig:
    """Shape, router and losses of the model."""

    name: str = "custom"
    """Preset name, and the default run name."""
    hf_family: str = ""
    """Hugging Face family (model_type) of exported folders; empty, or if unfit: the first that fits."""
    vocab_size: Size = 4096
    """Rows of embedding and head, > 0."""
    hidden_size: Size = 256
    """Width of the residual stream, > 0."""
    tie_embeddings: bool = False
    """Share embedding and head weights."""
    num_layers: Annotated[int, POSITIVE, MANY_LAYERS] = 4
    """Dense and MoE layers, without multi-token-prediction layers, > 0."""
    num_dense_layers: CountOrZero = 1
    """Leading layers with a dense MLP, 0 to num_layers; num_layers with num_experts=0."""
    moe_every: Count = 1
    """Of the layers after num_dense_layers, each n-th of the model has experts, the others a dense MLP."""
    dense_ffn_size: Size = 704
    """Dense MLP's intermediate width, > 0."""
    attention: Annotated[str, ATTENTIONS] = "mla"
    """mla (multi-head latent), gqa (grouped query), or package.module:NAME."""
    layer: Annotated[str, LAYERS] = "standard"
    """Order of a MoE layer's parts: standard, or package.module:NAME."""
    num_heads: Size = 4
    """Query heads, > 0."""
    num_kv_heads: Annotated[int, INT32] = 4
    """gqa: key-value heads, a divisor of num_heads."""
    head_dim: Size = 64
    """gqa: head size, even, > 0."""
    qk_norm: bool = False
    """gqa: RMSNorm on query and key heads (Qwen3)."""
    qk_norm_weight: bool = True
    """gqa: qk_norm has trained weights; without, it norms only layers with rotary embedding (Llama 4)."""
    qk_norm_whole: bool = False
    """gqa: with qk_norm, one norm for all query heads and one for all key heads (MiniMax-M2)."""
    rotary_fraction: Annotated[float, SHARE] = 1.0
    """gqa: part of each head, from its first element on, with rotary embedding, > 0 and at most 1."""
    window: CountOrZero = 0
    """gqa: keys that a query sees, itself included; 0: all before it."""
    full_every: CountOrZero = 0
    """gqa: every n-th layer sees all keys, without window or linear_attention; 0: none does."""
    attention_chunk: CountOrZero = 0
    """gqa: a query sees keys of its own chunk of so many positions (Llama 4); 0: all before it."""
    nope_every: CountOrZero = 0
    """gqa: every n-th layer has no rotary embedding, and sees all chunks (Llama 4); 0: none."""
    attention_temperature_floor: CountOrZero = 0
    """gqa: n of the factor 1 + scale * ln(1 + floor((position + 1) / n)) on queries of layers without rotary
    embedding; 0: none."""
    attention_temperature_scale: Annotated[float, NOT_NEGATIVE, FP32] = 0.1
    """gqa: scale of that factor, >= 0."""
    linear_attention: LinearAttention = LinearAttention.none
    """gqa: attention of layers that do not see all keys: none, or delta_net (gated delta rule)."""
    linear_key_heads: Size = 16
    """delta_net: query and key heads, > 0."""
    linear_value_heads: Size = 32
    """delta_net: value heads, a multiple of linear_key_heads."""
    linear_key_head_dim: Size = 128
    """delta_net: query and key head size, 16, 32, 64 or 128."""
    linear_value_head_dim: Size = 128
    """delta_net: value head size, 16, 32, 64 or 128."""
    linear_conv_taps: Size = 4
    """delta_net: positions that the convolution of queries, keys and values reads, > 0."""
    delta_net_backend: DeltaNetBackend = DeltaNetBackend.auto
    """delta_net: kernels: auto (triton, on a CPU a reference), triton, fla (flash-linear-attention)."""
    attention_sinks: bool = False
    """gqa: a trained logit of each head in the softmax, whose probability is dropped (gpt-oss)."""
    attention_gate: bool = False
    """gqa: multiply attention's result by the sigmoid of a gate from q_proj (Qwen3-Next)."""
    attention_bias: AttentionBias = AttentionBias.none
    """gqa: biases of projections: none, qkv (GLM-4.5) or qkvo (gpt-oss)."""
    q_lora_rank: Annotated[int, NOT_NEGATIVE, INT32] = 0
    """mla: query compression rank; 0: none."""
    kv_lora_rank: Size = 128
    """mla: key-value compression rank, > 0."""
    qk_nope_head_dim: Size = 32
    """mla: query and key head size without rotary embedding, > 0."""
    qk_rope_head_dim: Size = 16
    """mla: query and key head size with rotary embedding, even, > 0."""
    v_head_dim: Size = 32
    """mla: value head size, > 0."""
    attention_backend: AttentionBackend = AttentionBackend.auto
    """Kernel: auto, sdpa, padded_flash, flash4, turbo (Primus-Turbo), te (Transformer Engine)."""
    rope_theta: Annotated[float, POSITIVE, FP32] = 10000.0
    """Rotary embedding base, > 0."""
    rope_scaling: RopeScaling = RopeScaling.none
    """Rotary context extension: none, yarn or llama3."""
    yarn_factor: Annotated[float, FP32] = 40.0
    """YaRN: new over original context, >= 1."""
    yarn_original_context: Size = 4096
    """YaRN: original context in tokens, > 0."""
    yarn_beta_fast: float = 32.0
    """YaRN: rotations above which frequencies are kept, > yarn_beta_slow."""
    yarn_beta_slow: Annotated[float, POSITIVE] = 1.0
    """YaRN: rotations below which frequencies are divided by the factor, > 0."""
    yarn_truncate: bool = True
    """YaRN: round the ramp's ends outwards to whole rotation pairs; gpt-oss does not."""
    yarn_mscale: Annotated[float, NOT_NEGATIVE, FP32] = 1.0
    """YaRN: magnitude coefficient of rotated parts, >= 0."""
    yarn_mscale_all_dim: Annotated[float, NOT_NEGATIVE, FP32] = 0.0
    """YaRN: softmax scale coefficient, >= 0."""
    llama3_factor: Annotated[float, FP32] = 8.0
    """llama3: divisor of low frequencies, >= 1."""
    llama3_low_freq_factor: Annotated[float, POSITIVE, FP32] = 1.0
    """llama3: rotations within the original context below which frequencies are divided, > 0."""
    llama3_high_freq_factor: Annotated[float, FP32] = 4.0
    """llama3: rotations above which frequencies are kept, > llama3_low_freq_factor."""
    llama3_original_context: Size = 8192
    """llama3: original context in tokens, > 0."""
    context_length: Size = 4096
    """Longest supported sequence in tokens, > 0."""
    norm_eps: Annotated[float, POSITIVE, FP32] = 1e-6
    """RMSNorm epsilon, > 0."""
    init_std: Annotated[float, POSITIVE, FP32] = 0.02
    """Standard deviation of initial weights, > 0."""
    num_experts: Annotated[int, NOT_NEGATIVE, INT32] = 8
    """Routed experts per MoE layer; 0: a dense model, all of whose layers have a dense MLP."""
    top_k: Size = 2
    """Routed experts per token, 1 to num_experts."""
    expert_ffn_size: Size = 176
    """Routed expert's intermediate width, > 0."""
    shared_ffn_size: Annotated[int, NOT_NEGATIVE, INT32] = 176
    """Shared experts' total intermediate width; 0: none."""
    shared_gate: bool = False
    """Multiply the shared experts' output by the sigmoid of a trained gate (Qwen3-Next)."""
    expert_bias: bool = False
    """Biases of gate, up and down of routed experts (gpt-oss)."""
    swiglu_limit: Annotated[float, NOT_NEGATIVE, FP32] = 0.0
    """Routed experts' clamp of gate and up, then (up + 1) * gate * sigmoid(1.702 * gate); 0: SwiGLU."""
    router_bias: bool = False
    """Trained bias of router logits (gpt-oss)."""
    score_function: ScoreFunction = ScoreFunction.softmax
    """Router scores, fp32: softmax or sigmoid of the logits."""
    softmax_after_topk: bool = False
    """Softmax over selected experts only (Mixtral); needs score_function=softmax."""
    renormalise: bool = False
    """Divide selected scores by their sum."""
    routed_scale: Annotated[float, POSITIVE, FP32] = 1.0
    """Factor on selected scores, > 0."""
    input_scaling: bool = False
    """Scores multiply the experts' input, not their output (Llama 4); needs top_k=1."""
    num_groups: Size = 1
    """Expert groups, a divisor of num_experts; 1: no limit."""
    topk_groups: Size = 1
    """Groups selected per token, 1 to num_groups."""
    group_score: GroupScore = GroupScore.max
    """Group score: max (DeepSeek-V2), topk_sum (best top_k / topk_groups), top2_sum (best two, V3's code)."""
    selection_bias: bool = False
    """Per-expert bias for selection only (aux-loss-free balancing)."""
    bias_update_rate: Annotated[float, NOT_NEGATIVE, FP32] = 0.001
    """Selection bias change per step, >= 0."""
    aux_loss: AuxLoss = AuxLoss.sequence
    """Balance loss: none, or over each sequence, micro_batch, or global_batch."""
    aux_loss_coef: Annotated[float, NOT_NEGATIVE, FP32] = 0.001
    """Balance loss weight, >= 0."""
    z_loss_coef: Annotated[float, NOT_NEGATIVE, FP32] = 0.0
    """Weight of the router's z-loss (mean squared logsumexp of logits), >= 0."""
    peak_lr: Annotated[float, POSITIVE] = 3e-4
    """Recommended peak learning rate for optim=adamw, > 0; 1e-5 with weights of a Hugging Face folder."""
    mtp_depth: Annotated[int, NOT_NEGATIVE, MANY_LAYERS] = 0
    """Multi-token-prediction layers (DeepSeek-V3), >= 0."""
    mtp_loss_weight: Annotated[float, NOT_NEGATIVE, FP32] = 0.3
    """Weight of the mean multi-token-prediction loss, >= 0."""
    lora_rank: CountOrZero = 0
    """Rank of trained LoRA adapters, beside which all other weights are frozen (docs/lora.md); 0: none."""
    lora_alpha: Annotated[float, POSITIVE, FP32] = 16.0
    """lora_alpha / lora_rank is the factor on adapters' outputs, > 0."""
    lora_targets: list[str] = field(default_factory=lambda: [*LORA_TARGETS[:3]])
    """Matrices with adapters: attention, mlp, shared_experts, experts (which then run in separate steps)."""

    def __post_init__(self) -> None:
        if self.num_experts == 0 and self.num_dense_layers == type(self).num_dense_layers:
            self.num_dense_layers = self.num_layers


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
    dp_shard_size: RankCount | None = None
    """Consecutive ranks over which fsdp2 shards, such as those of a node, > 0; other ranks have the same
    shards. null: all."""


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
    turbo (Primus-Turbo), auto (symm if GPUs of one node can, else alltoall, docs/parallel.md), or
    package.module:NAME."""
    transport: Transport = Transport.auto
    """symm transport: pull (kernels), copy_engine (block copies), or auto (copy_engine with
    pipeline.ep_overlap=true on NVIDIA GPUs)."""
    dispatch_dtype: DispatchDtype = DispatchDtype.auto
    """Dispatched rows: bf16, fp8 (quantized before sending), or auto (fp8 with symm and rowwise fp8
    experts)."""
    receive_budget: Any = 1.5
    """Receive capacity over that of balanced routing, > 0, or worst_case; overflow: docs/parallel.md."""
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

    scope: Any = "auto"
    """Captured segments: none, partial, moe, layer, full_iteration, a list of segments, or auto (on a GPU the
    first of full_iteration, partial and none that the run allows)."""
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
    offload: list[str] = field(default_factory=list)
    """Segments whose saved activations are in host memory until the backward, of every layer."""
    layer_ids: list[int] = field(default_factory=list)
    """Layers whose segments and ops are recomputed, or without these the whole layers; from 0,
    multi-token-prediction layers last; []: all."""


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
    ep_overlap: Any = "auto"
    """Overlap communication with compute: interleave one micro-batch's backward with the next one's forward;
    true, false or auto (with symm on GPUs and no pipeline)."""


@dataclass
class PrecisionConfig:
    """Number formats; gradients, router and loss are fp32."""

    compute: ComputeDtype = ComputeDtype.auto
    """Weights and activations: bf16, fp32, or auto (bf16 on GPU); default: as in model=FOLDER, or auto."""
    fp8: Fp8Recipe = Fp8Recipe.none
    """fp8 GEMM scaling, docs/precision.md: none, rowwise, tensorwise, blockwise (128), mxfp8 (32), or auto
    (by the GPU; needs fp8_measure)."""
    fp8_products: list[str] = field(default_factory=lambda: list(FP8_PRODUCTS))
    """GEMMs in fp8: experts, attn, mlp, shared_experts."""
    fp8_wgrad: Fp8WeightGrad = Fp8WeightGrad.fp8
    """wgrad of dense fp8 GEMMs: fp8 or bf16."""
    fp8_skip_layers: list[int] = field(default_factory=list)
    """Layers without fp8, from 0; negative: from the end."""
    fp8_measure: Fp8Measure = Fp8Measure.auto
    """auto: on a GPU, fp8 only for GEMMs at least 2% faster with it; none: for all."""
    deterministic: bool = False
    """Only deterministic kernels, which are slower."""


@dataclass
class ProfileConfig:
    """Profiling, docs/tuning.md."""

    steps: list[int] = field(default_factory=list)
    """First and last step (or one) that torch's profiler records for graphmoe.trace, from 1; []: none."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record profile.steps."""
    pipeline: bool = False
    """Record stage timelines of logged steps for graphmoe.pipeline_view."""


@dataclass
class LaunchConfig:
    """Processes of a run, docs/launch.md."""

    nproc: Annotated[Any, MANY_RANKS] = 1
    """Workers per node, one per device: a number, or auto (gpus_per_job, visible GPUs, or 1)."""
    nodes: Annotated[Any, MANY_RANKS] = "auto"
    """Nodes, each started with the same command: a number, or auto (from Slurm or PyTorchJob)."""
    endpoint: str | None = None
    """Rendezvous host:port; default: Slurm's first host, or MASTER_ADDR."""
    max_restarts: CountOrZero = 0
    """Restarts of all workers after failures, >= 0."""
    hang_timeout_s: Count | None = 45
    """Seconds without progress that end the job, > 0, at least three times the longest step; null: never."""
    gpus_per_job: Count | None = None
    """GPUs per sweep job, > 0."""
    write_only: bool = False
    """Write resolved.yaml, print the torchrun command, and stop."""
    fake_world: RankCount | None = None
    """Dry run of one rank in a job of this many, > 0, docs/projection.md."""
    fake_rank: int | None = None
    """Dry-run rank, from 0; null: largest projected memory."""
    fake_memory_gb: Annotated[float, POSITIVE] = 192.0
    """Dry-run device memory in GiB, > 0."""
