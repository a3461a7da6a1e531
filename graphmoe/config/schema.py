"""Typed schema of a run: keys, defaults, ranges; docstrings become ``docs/configuration.md`` and --help."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from graphmoe.config.choices import (
    DATA_SOURCES,
    LR_SCHEDULES,
    OPTIMIZERS,
    SOURCES,
    DeviceChoice,
    NumaBinding,
    OutputFormat,
    SourceFacts,
    TooLong,
    TrainOn,
)
from graphmoe.config.choices import AttentionBackend as AttentionBackend
from graphmoe.config.choices import AttentionBias as AttentionBias
from graphmoe.config.choices import AuxLoss as AuxLoss
from graphmoe.config.choices import Balance as Balance
from graphmoe.config.choices import ComputeDtype as ComputeDtype
from graphmoe.config.choices import ContextMethod as ContextMethod
from graphmoe.config.choices import DeltaNetBackend as DeltaNetBackend
from graphmoe.config.choices import DispatchDtype as DispatchDtype
from graphmoe.config.choices import DpShard as DpShard
from graphmoe.config.choices import Fp8Measure as Fp8Measure
from graphmoe.config.choices import Fp8WeightGrad as Fp8WeightGrad
from graphmoe.config.choices import GradDtype as GradDtype
from graphmoe.config.choices import GroupScore as GroupScore
from graphmoe.config.choices import LinearAttention as LinearAttention
from graphmoe.config.choices import MasterDtype as MasterDtype
from graphmoe.config.choices import MomentDtype as MomentDtype
from graphmoe.config.choices import RopeScaling as RopeScaling
from graphmoe.config.choices import ScoreFunction as ScoreFunction
from graphmoe.config.choices import Transport as Transport
from graphmoe.config.formats import Fp8Recipe as Fp8Recipe
from graphmoe.config.ranges import (
    BELOW_ONE,
    FP32,
    INT32,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    SHARE,
    Count,
    CountOrZero,
    Size,
    is_path,
)
from graphmoe.config.ranges import ConfigError as ConfigError
from graphmoe.config.sections import (
    GraphConfig,
    LaunchConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    ProfileConfig,
    RecomputeConfig,
)


@dataclass
class DataConfig:
    """Token source and packing."""

    source: Annotated[str, DATA_SOURCES] = "stdlib"
    """stdlib (Python's own library), files, chat (conversations), hf, memmap (.bin/.idx), synthetic, or
    package.module:NAME."""
    seq_len: Size | None = None
    """Tokens per sequence, > 0; default: model.context_length, at most 4096."""
    seed: int = 0
    """Seed of document order, sequence order and synthetic tokens."""
    paths: Annotated[list[str], PATH] = field(default_factory=list)
    """Training files, globs or folders (files, chat), or .bin/.idx prefixes (memmap)."""
    weights: list[float] = field(default_factory=list)
    """Token share of each path, such as [0.7,0.3]; []: by length."""
    val_paths: Annotated[list[str], PATH] = field(default_factory=list)
    """Validation files, globs or prefixes; default: val_fraction of training data."""
    val_fraction: Annotated[float, BELOW_ONE] = 0.05
    """Share of documents (stdlib: files) held out for validation, 0 <= share < 1."""
    text_field: str = "text"
    """Record field with the text."""
    chat_template: Annotated[str, PATH] | None = None
    """data=chat: a Jinja file; default: the template beside the tokenizer."""
    train_on: TrainOn = TrainOn.assistant
    """data=chat: tokens with a loss: assistant (its messages), all, or field (messages with train: true)."""
    too_long: TooLong = TooLong.truncate
    """data=chat: conversations of more than seq_len + 1 tokens: truncate or skip."""
    tokenizer: Annotated[str, PATH] | None = None
    """A tokenizer.json, its folder, or a hub name; default: that of the initial weights."""
    eod_token: str | None = None
    """Token after each document; default: the tokenizer's end token."""
    document_mask: bool = False
    """Keep attention, positions and losses within a document (docs/model.md); data=chat needs it."""
    document_length: Size | None = None
    """data=synthetic: mean tokens of a document, > 0; null: one endless document."""
    bpe_vocab_size: int = 4096
    """Vocabulary size of data=stdlib's tokenizer, 300 to model.vocab_size."""
    cache_dir: str | None = None
    """Folder of tokenizers and tokenised corpora; default: $GRAPHMOE_CACHE or ~/.cache/graphmoe."""
    hf_name: str | None = None
    """data=hf and chat: dataset name or local folder; chat: in place of paths."""
    hf_config: str | None = None
    """data=hf and chat: dataset configuration."""
    hf_split: str = "train"
    """data=hf and chat: training split."""
    hf_val_split: str | None = None
    """data=hf and chat: validation split; default: val_fraction of the documents."""
    shuffle: bool = True
    """Shuffle documents and sequences by seed, in another order each epoch."""
    skip_bad: bool = False
    """Count and skip unreadable files and bad records instead of stopping."""
    prefetch: CountOrZero = 4
    """Micro-batches prepared ahead, >= 0."""

    @property
    def source_facts(self) -> SourceFacts:
        return SOURCES.get(self.source, SourceFacts())

    def trained_size(self, vocab_size: int) -> int:
        """Return the size of data=stdlib's tokenizer; by default at most the model's ``vocab_size``."""
        is_default = self.bpe_vocab_size == DataConfig.bpe_vocab_size
        return min(self.bpe_vocab_size, vocab_size) if is_default else self.bpe_vocab_size


@dataclass
class OptimConfig:
    """Update rule and learning-rate schedule."""

    name: Annotated[str, OPTIMIZERS] = "adamw"
    """Update rule: adamw, muon (matrices by Muon, the rest by AdamW), or package.module:NAME."""
    lr: Annotated[float, POSITIVE, FP32] = 3e-4
    """Peak learning rate, > 0."""
    min_lr_ratio: Annotated[float, SHARE, FP32] = 0.1
    """Final over peak learning rate, 0 to 1; unused by constant."""
    schedule: Annotated[str, LR_SCHEDULES] = "cosine"
    """After warm-up: cosine, wsd (stable, then decay), constant, or package.module:NAME."""
    warmup_steps: CountOrZero = 0
    """Linear warm-up steps, >= 0."""
    wsd_decay_fraction: Annotated[float, SHARE] = 0.2
    """wsd: decaying share of train.steps, 0 < share <= 1."""
    beta1: Annotated[float, BELOW_ONE, FP32] = 0.9
    """AdamW's first-moment decay, 0 <= beta1 < 1."""
    beta2: Annotated[float, BELOW_ONE, FP32] = 0.95
    """AdamW's second-moment decay, 0 <= beta2 < 1."""
    eps: Annotated[float, POSITIVE, FP32] = 1e-8
    """AdamW's epsilon, > 0."""
    momentum: Annotated[float, BELOW_ONE, FP32] = 0.95
    """Muon's momentum, 0 <= momentum < 1."""
    qk_clip: Annotated[float, NOT_NEGATIVE, FP32] = 0.0
    """QK-clip of Muon: scales heads whose attention logits may exceed it (docs/parallel.md); 0: off."""
    weight_decay: Annotated[float, NOT_NEGATIVE, FP32] = 0.1
    """Decoupled weight decay of matrices, >= 0."""
    moment_dtype: MomentDtype = MomentDtype.fp32
    """Storage of moments: fp32, bf16, or int8 with a scale for each 64 elements (docs/tuning.md)."""
    master_dtype: MasterDtype = MasterDtype.fp32
    """Master weights of bf16 weights: fp32, or bf16 (none: the weights are rounded stochastically)."""
    offload: bool = False
    """Master weights and moments are in host memory, streamed through the GPU at each update."""
    bucket_mb: Annotated[float, POSITIVE] = 100.0
    """fp32 gradient reduction bucket in MB, > 0."""
    grad_shard: bool = False
    """Reduce gradients after each micro-batch to shards (ZeRO-2), without whole ones (docs/parallel.md)."""
    grad_dtype: GradDtype = GradDtype.fp32
    """Unreduced gradients of bf16 weights: fp32, or bf16, rounded stochastically (docs/tuning.md)."""

    def decay_steps(self, total_steps: int) -> range:
        """Return the steps, from 0, in which the learning rate decays."""
        decaying = max(round(total_steps * self.wsd_decay_fraction), 1)
        start = total_steps - decaying if self.schedule == "wsd" else self.warmup_steps
        return range(start, max(total_steps, start + 1))


@dataclass
class TrainConfig:
    """Training length, batch sizes, validation and limits of bad steps."""

    steps: Count = 1000
    """Optimizer steps, > 0."""
    tokens: Any = None
    """Training tokens, such as 1e9 or 300M (K, M, B or T); sets the steps."""
    epochs: Annotated[float, POSITIVE] | None = None
    """Passes over the training data, > 0; sets the steps."""
    global_batch_size: Size = 16
    """Sequences per optimizer step, a multiple of micro_batch_size."""
    micro_batch_size: Annotated[Any, INT32] = "auto"
    """Sequences per forward and backward, > 0; auto: the most that fit a GPU, 4 on a CPU, docs/tuning.md."""
    seed: int = 0
    """Seed of initial weights and all random numbers."""
    clip_grad_norm: Annotated[float, NOT_NEGATIVE, FP32] = 1.0
    """Largest global gradient L2 norm; 0: no clipping."""
    val_interval: CountOrZero = 100
    """Steps between validations; 0: only after the first step and at the end."""
    val_batches: CountOrZero = 20
    """Micro-batches per validation; 0: no validation."""
    max_hours: Annotated[float, POSITIVE] | None = None
    """Hours since the command after which the run saves and stops, to be continued, > 0; null: none."""
    max_nonfinite: Count = 5
    """Consecutive skipped non-finite steps that end the run, > 0."""
    log_interval: Count = 10
    """Steps between log lines, > 0."""
    rerun: bool = False
    """Run a suspicious step again, to tell transient and faulty devices from data (docs/reliability.md)."""
    spike_factor: Annotated[float, NOT_NEGATIVE] = 10.0
    """rerun: a loss this many spreads above the median of 64 is suspicious; 0: only a non-finite one."""
    inject_fault: str | None = None
    """rerun, for tests: transient, persistent or data, then :rank:step, and :factor of the loss (NaN)."""


@dataclass
class CompileConfig:
    """Compilation of the model's segments."""

    enabled: bool = True
    """Compile; otherwise run eagerly, without passes."""
    cache: bool = True
    """Use the compile cache in compile.cache_dir."""
    cache_dir: str | None = None
    """Compile cache folder; default: compiled in $GRAPHMOE_CACHE or ~/.cache/graphmoe."""
    cache_shared: bool = False
    """Trust a cache_dir that others can write; its code is executed."""


@dataclass
class PassesConfig:
    """Graph rewrites, docs/compile.md."""

    enabled: list[str] | None = None
    """Passes to run; null: all."""
    disabled: list[str] = field(default_factory=list)
    """Passes not to run."""
    extra: list[str] = field(default_factory=list)
    """Plug-in passes, package.module:function; run last."""
    dump: bool = False
    """Write graphs before and after each pass to the run's graphs/."""


@dataclass
class CheckpointConfig:
    """Checkpoints and resuming."""

    enabled: bool = True
    """Save checkpoints."""
    interval: CountOrZero = 100
    """Steps between checkpoints; 0: only at the end."""
    keep_last: Count = 2
    """Newest complete checkpoints kept, > 0."""
    keep_every: CountOrZero = 0
    """Also keep checkpoints at multiples of this step; 0: none."""
    async_save: bool = True
    """Write in a process beside the training."""
    mirror: str | None = None
    """Folder or fsspec URL for second copies; a start takes them if the run's are lost."""
    replica_check: CountOrZero = 0
    """Steps between comparisons of weights that ranks hold alike, also before each save; 0: none."""
    resume: bool = True
    """Continue an unfinished run of the same configuration in the run's folder."""
    resume_from: Annotated[str, PATH] | None = None
    """Another run's folder or checkpoint, whose whole state to load."""
    init_from: Annotated[str, PATH] | None = None
    """Weights to load: Hugging Face, graphmoe.convert, or run folder; without model= its model too."""
    other_tokenizer: bool = False
    """Accept weights trained with another tokenizer."""
    export: Annotated[str, PATH] | None = None
    """New folder for the weights at the end, in Hugging Face's format (docs/finetuning.md)."""


@dataclass
class HostConfig:
    """Host settings."""

    manual_gc: bool = True
    """Collect garbage at fixed steps, not automatically."""
    gc_interval: Count = 100
    """manual_gc: steps between collections, > 0."""
    numa: NumaBinding = NumaBinding.auto
    """CPUs of worker threads: auto (NUMA node of the GPU) or none."""
    threads: Count | None = None
    """CPU compute threads, > 0; default: torch's, or a share of cores."""
    kernarg_pool_mb: Count | None = 12
    """ROCm: MiB for kernel arguments (HSA_KERNARG_POOL_SIZE), > 0; null: ROCm's default."""
    max_hw_queues: Count | None = None
    """ROCm: hardware queues (GPU_MAX_HW_QUEUES), > 0; null: ROCm's default."""
    nvlink_multicast: bool = False
    """Use NVLink multicast in NCCL, NVSHMEM and symmetric memory."""
    env: dict[str, str] = field(default_factory=dict)
    """More environment variables; existing ones win."""


@dataclass
class LogConfig:
    """Output besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    report: bool = True
    """Write report.html at the end."""
    wandb: bool = False
    """Log to Weights & Biases (extra: wandb)."""
    wandb_project: str = "graphmoe"
    """W&B project."""
    mlflow: bool = False
    """Log to MLflow at MLFLOW_TRACKING_URI (extra: mlflow)."""
    mlflow_experiment: str = "graphmoe"
    """MLflow experiment."""
    progress: bool = True
    """Progress bar if stderr is a terminal."""
    peak_tflops: Annotated[float, POSITIVE] | None = None
    """Device peak for MFU, dense TFLOP/s, > 0; default: a table of known ones."""
    sample_tokens: CountOrZero = 120
    """Tokens of sample text at the end of a run; 0: none."""
    sample_prompt: str | None = None
    """Sample prompt; default: start of the validation text."""


@dataclass
class RunSection:
    """Run name and device."""

    name: str = "${model.name}"
    """Run name; the folder is outputs/<name>."""
    device: DeviceChoice = DeviceChoice.auto
    """cuda (ROCm too), cpu, or auto."""
    auto: list[str] = field(default_factory=list)
    """Written by a run: values that it chose for automatic keys, and why."""


@dataclass
class SweepConfig:
    """Jobs of a sweep, docs/launch.md."""

    resume: Annotated[str, PATH] | None = None
    """Folder of an interrupted sweep to continue; repeat its other overrides."""


@dataclass
class RunConfig:
    """Root of a run's configuration."""

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
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    log: LogConfig = field(default_factory=LogConfig)
    format: OutputFormat = OutputFormat.text
    """Tool output on stdout: text, or one JSON document."""


def cache_root(configured: str | None = None) -> Path:
    """Return ``configured``, else $GRAPHMOE_CACHE or ~/.cache/graphmoe. *Raises* ConfigError."""
    named = configured or os.environ.get("GRAPHMOE_CACHE") or "~/.cache/graphmoe"
    path = os.path.expanduser(named)
    if path.startswith("~"):
        raise ConfigError(
            f"there is no home folder for the cache {named}; set HOME, or GRAPHMOE_CACHE=/a/folder"
        )
    folder = Path(path).absolute()
    if not is_path(path):
        raise ConfigError(
            f"{ascii(named)[1:-1]} cannot be a cache folder; use at most 255 bytes between slashes for "
            f"compile.cache_dir, data.cache_dir or GRAPHMOE_CACHE"
        )
    return folder


def compiled_folder(configured: str | None = None) -> Path:
    """Return the compile cache: ``configured``, else ``compiled`` in the default cache root."""
    return cache_root(configured) if configured else cache_root() / "compiled"
