"""The typed schema of a run: every key that a YAML file or an override can set.

One dataclass per section; choices are the enums of ``graphmoe.choices``, which can be imported from here.
Defaults stand here and YAML states deltas. The string under a field is its documentation:
``docs/configuration.md`` and error messages are made from it. ``graphmoe.config_rules`` holds the rules
that join several fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphmoe.choices import (
    AttentionBackend,
    AttentionKind,
    AuxLoss,
    ComputeDtype,
    DataSource,
    DeviceChoice,
    ExpertsBackend,
    GroupScore,
    LrSchedule,
    OutputFormat,
    RopeScaling,
    ScoreFunction,
)


class ConfigError(ValueError):
    """A configuration that cannot run; the message says what to type instead."""


@dataclass
class ModelConfig:
    """Shape, router and losses of the model."""

    name: str = "custom"
    """Name of the preset, used in logs and as the default run name."""
    vocab_size: int = 4096
    """Rows of the embedding and of the head, > 0."""
    hidden_size: int = 256
    """Width of the residual stream, > 0."""
    num_layers: int = 4
    """Transformer layers, dense ones included, multi-token-prediction layers not, > 0."""
    num_dense_layers: int = 1
    """Leading layers whose MLP is dense, 0 to num_layers."""
    dense_ffn_size: int = 704
    """Intermediate width of the dense MLP, > 0."""
    attention: AttentionKind = AttentionKind.mla
    """Attention: mla (multi-head latent) or gqa (grouped query)."""
    num_heads: int = 4
    """Query heads, > 0."""
    num_kv_heads: int = 4
    """Key-value heads of gqa, a divisor of num_heads; mla ignores it."""
    head_dim: int = 64
    """Head size of gqa, even; mla uses the three sizes below."""
    qk_norm: bool = False
    """RMSNorm on the query and key heads of gqa (Qwen3)."""
    q_lora_rank: int = 0
    """Rank of mla's query compression; 0 projects queries directly."""
    kv_lora_rank: int = 128
    """Rank of mla's key-value compression, > 0."""
    qk_nope_head_dim: int = 32
    """Part of an mla query or key head without rotary embedding, > 0."""
    qk_rope_head_dim: int = 16
    """Part of an mla query or key head with rotary embedding, even, > 0."""
    v_head_dim: int = 32
    """Size of an mla value head, > 0."""
    attention_backend: AttentionBackend = AttentionBackend.auto
    """Kernel behind the attention: auto, sdpa, padded_flash, turbo (Primus-Turbo), te."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding, > 0."""
    rope_scaling: RopeScaling = RopeScaling.none
    """Context extension of the rotary embedding: none or yarn."""
    yarn_factor: float = 40.0
    """YaRN: new context over original context, >= 1."""
    yarn_original_context: int = 4096
    """YaRN: tokens of context before the extension, > 0."""
    yarn_beta_fast: float = 32.0
    """YaRN: rotations above which a frequency is kept, > yarn_beta_slow."""
    yarn_beta_slow: float = 1.0
    """YaRN: rotations below which a frequency is divided by the factor, > 0."""
    yarn_mscale: float = 1.0
    """YaRN: coefficient of the magnitude correction of rotated parts, >= 0."""
    yarn_mscale_all_dim: float = 0.0
    """YaRN: coefficient of the magnitude correction of the softmax scale, >= 0."""
    context_length: int = 4096
    """Longest sequence in tokens that the model is meant for, > 0."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm, > 0."""
    init_std: float = 0.02
    """Standard deviation of the initial weights, > 0."""
    num_experts: int = 8
    """Routed experts per MoE layer, > 0."""
    top_k: int = 2
    """Routed experts per token, 1 to num_experts."""
    expert_ffn_size: int = 176
    """Intermediate width of a routed expert, > 0."""
    shared_ffn_size: int = 176
    """Intermediate width of the shared experts together; 0 has none."""
    score_function: ScoreFunction = ScoreFunction.softmax
    """Router scores: softmax or sigmoid of the logits, in fp32."""
    softmax_after_topk: bool = False
    """Take the softmax over the selected experts only (Mixtral); score_function must be softmax."""
    renormalise: bool = False
    """Divide the selected scores by their sum."""
    routed_scale: float = 1.0
    """Factor on the selected scores, > 0."""
    num_groups: int = 1
    """Expert groups for group-limited selection, a divisor of num_experts; 1 is no limit."""
    topk_groups: int = 1
    """Groups that a token may choose experts from, 1 to num_groups."""
    group_score: GroupScore = GroupScore.max
    """Score of a group: its max (DeepSeek-V2), topk_sum, its best top_k / topk_groups (V3's report), or
    top2_sum, its best two whatever top_k is (V3's code)."""
    selection_bias: bool = False
    """Add a per-expert bias to the scores for selection only (aux-loss-free balancing)."""
    bias_update_rate: float = 0.001
    """Step of the selection bias towards balance after each optimizer step, >= 0."""
    aux_loss: AuxLoss = AuxLoss.sequence
    """Balance loss over: none, sequence, micro_batch, or global_batch."""
    aux_loss_coef: float = 0.001
    """Weight of the balance loss, >= 0."""
    z_loss_coef: float = 0.0
    """Weight of the router's z-loss (mean squared logsumexp of the logits), >= 0."""
    peak_lr: float = 3e-4
    """Peak learning rate that suits this model; optim=adamw takes it, > 0."""
    mtp_depth: int = 0
    """Multi-token-prediction layers (DeepSeek-V3), >= 0."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean multi-token-prediction loss, >= 0."""


@dataclass
class DataConfig:
    """Where tokens come from and how they are packed."""

    source: DataSource = DataSource.stdlib
    """stdlib (Python's own library), files, hf (streaming), memmap (.bin/.idx), synthetic."""
    seq_len: int | None = None
    """Tokens per training sequence; default: model.context_length, at most 4096."""
    seed: int = 0
    """Seed of the order of documents and sequences, and of synthetic tokens."""
    paths: list[str] = field(default_factory=list)
    """Training files or globs (files), or path prefixes of .bin/.idx pairs (memmap)."""
    val_paths: list[str] = field(default_factory=list)
    """Validation files, globs or prefixes; default: val_fraction of the training ones."""
    val_fraction: float = 0.05
    """Share of documents (stdlib: of files) kept for validation, 0 <= share < 1."""
    text_field: str = "text"
    """Field of a .jsonl or .parquet record that holds the text."""
    tokenizer: str | None = None
    """Path of a Hugging Face tokenizer.json; stdlib trains its own where none is given."""
    eod_token: str | None = None
    """Token put after each document; default: the end token that the tokenizer's files name."""
    bpe_vocab_size: int = 4096
    """Size of the tokenizer that data=stdlib trains, 300 to model.vocab_size."""
    cache_dir: str | None = None
    """Folder of trained tokenizers and tokenised corpora; default: $GRAPHMOE_CACHE or ~/.cache/graphmoe."""
    hf_name: str | None = None
    """data=hf: name or local folder of the dataset."""
    hf_config: str | None = None
    """data=hf: configuration of the dataset."""
    hf_split: str = "train"
    """data=hf: split to train on."""
    hf_val_split: str | None = None
    """data=hf: split to validate on; default: val_fraction of the documents, by a hash of the text."""
    shuffle: bool = True
    """Visit documents and sequences in a seeded random order, a new one each epoch."""
    skip_bad: bool = False
    """Count and skip unreadable files, bad records and bad tokens instead of stopping."""
    prefetch: int = 4
    """Micro-batches prepared ahead by a background thread, >= 0."""


@dataclass
class OptimConfig:
    """AdamW and the learning-rate schedule."""

    lr: float = 3e-4
    """Peak learning rate, > 0."""
    min_lr_ratio: float = 0.1
    """Final learning rate over the peak (cosine, wsd), 0 to 1."""
    schedule: LrSchedule = LrSchedule.cosine
    """After warm-up: cosine, wsd (stable, then a decay at the end) or constant."""
    warmup_steps: int = 0
    """Steps of linear warm-up from lr / warmup_steps, >= 0; a run that is shorter ends during it."""
    wsd_decay_fraction: float = 0.2
    """wsd: share of train.steps that decays (1 - sqrt form), 0 < share <= 1."""
    beta1: float = 0.9
    """AdamW's first-moment decay, 0 <= beta1 < 1."""
    beta2: float = 0.95
    """AdamW's second-moment decay, 0 <= beta2 < 1."""
    eps: float = 1e-8
    """AdamW's epsilon, > 0."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none, >= 0."""


@dataclass
class TrainConfig:
    """Length, batch and safety of the training loop."""

    steps: int = 1000
    """Optimizer steps, > 0."""
    global_batch_size: int = 16
    """Sequences per optimizer step, a multiple of micro_batch_size."""
    micro_batch_size: int = 4
    """Sequences per forward and backward, > 0."""
    seed: int = 0
    """Seed of the initial weights and of every random number of the run."""
    clip_grad_norm: float = 1.0
    """Largest global L2 norm of the gradient; 0 does not clip, >= 0."""
    val_interval: int = 100
    """Steps between validations; 0 validates only at the end, >= 0."""
    val_batches: int = 20
    """Micro-batches per validation; 0 switches validation off, >= 0."""
    max_nonfinite: int = 5
    """Skipped non-finite steps in a row that end the run with a checkpoint, > 0."""
    log_interval: int = 10
    """Steps between reads of the metrics by the host; each step is logged, > 0."""


@dataclass
class PrecisionConfig:
    """Number formats; main weights, gradients, moments, router and loss are always fp32."""

    compute: ComputeDtype = ComputeDtype.auto
    """Weights and activations: bf16, fp32, or auto (bf16 on a GPU, fp32 on a CPU)."""
    deterministic: bool = False
    """Use deterministic kernels only, so that two runs on a GPU are bitwise equal; slower."""


@dataclass
class MoEConfig:
    """How MoE layers are executed (the model section says what they compute)."""

    force_balance: bool = False
    """Route round robin, ignoring the router's choice. For benchmarks only."""
    experts: ExpertsBackend = ExpertsBackend.auto
    """Kernels of the routed experts in compiled runs; auto measures the installed ones on a GPU and remembers
    the fastest, and takes torch on a CPU."""
    sync_free_stage: Any = "auto"
    """How far a MoE layer never waits for the host: 0 nothing is promised; 1 router and routing plan; 2
    dispatch and experts too, but for one read of how many rows arrive; 3 the whole layer; auto is the lowest
    that graph.scope needs, docs/capture.md."""


@dataclass
class CompileConfig:
    """Compilation of the model's segments."""

    enabled: bool = True
    """Compile; without it the same model runs eagerly and no pass changes it."""


@dataclass
class PassesConfig:
    """Rewrites of the compiled graphs, docs/passes.md."""

    enabled: list[str] | None = None
    """Names of the passes that run; null runs all."""
    disabled: list[str] = field(default_factory=list)
    """Names of passes that do not run."""
    extra: list[str] = field(default_factory=list)
    """Passes of your own, package.module:function each; they run last."""
    dump: bool = False
    """Write each graph before and after each pass that changed it to the run's folder, graphs/."""


@dataclass
class CheckpointConfig:
    """When state is saved, what is kept, where it is resumed from."""

    enabled: bool = True
    """Save checkpoints; without them a run that ends early starts again from the beginning."""
    interval: int = 100
    """Steps between checkpoints; 0 saves only at the end, >= 0."""
    keep_last: int = 2
    """Newest whole checkpoints that are kept, > 0."""
    keep_every: int = 0
    """Keep each checkpoint whose step is a multiple of this for ever; 0 keeps none so, >= 0."""
    async_save: bool = True
    """Write in a background thread while training goes on."""
    resume: bool = True
    """Continue an unfinished run of the same configuration that lies in the run's folder."""
    resume_from: str | None = None
    """Run folder or checkpoint folder of another run to take the whole state from."""
    init_from: str | None = None
    """Weights to start from: a Hugging Face folder, one that graphmoe.convert wrote, or a run's folder."""


@dataclass
class HostConfig:
    """What is tuned on the host."""

    manual_gc: bool = True
    """Collect garbage at fixed steps instead of whenever Python pleases."""
    gc_interval: int = 100
    """Steps between collections with manual_gc, > 0."""


@dataclass
class LogConfig:
    """What is written beside metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run's folder."""
    wandb: bool = False
    """Send metrics to Weights & Biases (extra: wandb)."""
    wandb_project: str = "graphmoe"
    """Project that log.wandb writes to."""
    progress: bool = True
    """Show a progress bar with the time left when stderr is a terminal."""
    peak_tflops: float | None = None
    """Dense peak of the device in TFLOP/s for MFU; default: a table of known devices."""
    sample_tokens: int = 120
    """Tokens of text generated at the end of a run on text; 0 generates none, >= 0."""


@dataclass
class RunSection:
    """Name and device of the run."""

    name: str = "${model.name}"
    """Name of the run; its folder is outputs/<name>."""
    device: DeviceChoice = DeviceChoice.auto
    """Device type: cuda (ROCm too), cpu, or auto (a GPU if there is one)."""


@dataclass
class GraphConfig:
    """Capture into CUDA and HIP graphs, docs/capture.md."""

    scope: Any = "none"
    """What replays from graphs: none, partial, moe, layer or full_iteration, or a list of segments."""
    warmup_steps: int = 3
    """Steps that run uncaptured first, while kernels are compiled and measured, > 0."""


@dataclass
class RecomputeConfig:
    """What the backward computes again instead of keeping it, docs/recompute.md."""

    all: bool = False
    """Keep only what enters each layer."""
    segments: list[str] = field(default_factory=list)
    """Segments of the layers that are computed again, from what enters them."""
    ops: list[str] = field(default_factory=list)
    """Parts of segments whose results are not kept, in compiled runs: layernorm, core_attn, mla_up_proj,
    moe_act, mlp, shared_experts."""
    layer_ids: list[int] = field(default_factory=list)
    """Layers, counted from 0, multi-token-prediction layers last. Alone they are computed again as a whole;
    beside segments or ops they say where those apply, and none is everywhere."""


@dataclass
class RunConfig:
    """The root of a run's configuration."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    passes: PassesConfig = field(default_factory=PassesConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    host: HostConfig = field(default_factory=HostConfig)
    log: LogConfig = field(default_factory=LogConfig)
    format: OutputFormat = OutputFormat.text
    """What a tool prints on stdout: text, or one JSON document and nothing else."""
