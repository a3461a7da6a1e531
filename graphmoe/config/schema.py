"""The typed schema of a run: every key that a YAML file or an override can set.

One dataclass per section (the model's in ``model.py``, those of pipeline and profiles in ``pipeline.py``);
choices are the enums of ``choices.py``. All of them can be imported from here.
Defaults stand here and YAML states deltas. The string under a field is its documentation:
``docs/configuration.md`` and error messages are made from it. ``graphmoe.plan.rules.check`` holds the rules
that join several fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphmoe.config.choices import AttentionBackend as AttentionBackend
from graphmoe.config.choices import AttentionKind as AttentionKind
from graphmoe.config.choices import AuxLoss as AuxLoss
from graphmoe.config.choices import (
    ComputeDtype,
    ContextMethod,
    DataSource,
    DeviceChoice,
    DispatcherChoice,
    DpShard,
    ExpertsBackend,
    LrSchedule,
    NumaBinding,
    OutputFormat,
    Transport,
)
from graphmoe.config.choices import GroupScore as GroupScore
from graphmoe.config.choices import RopeScaling as RopeScaling
from graphmoe.config.choices import ScoreFunction as ScoreFunction
from graphmoe.config.model import ModelConfig
from graphmoe.config.pipeline import PipelineConfig, ProfileConfig


class ConfigError(ValueError):
    """A configuration that cannot run; the message says what to type instead."""


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
    bucket_mb: float = 100.0
    """Size in MB of the pieces in which ranks sum fp32 gradients, while the backward makes the next, > 0."""


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
    """Steps between validations; 0 validates only before the first step and at the end, >= 0."""
    val_batches: int = 20
    """Micro-batches per validation; 0 switches validation off, >= 0."""
    max_nonfinite: int = 5
    """Skipped non-finite steps in a row that end the run, with a checkpoint if weights are finite, > 0."""
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
    dispatcher: DispatcherChoice = DispatcherChoice.auto
    """How tokens reach the ranks of their experts: local (each rank holds all of them), alltoall
    (torch.distributed), symm (kernels that read the memory of other GPUs of the node), nvshmem (torch on
    NVSHMEM), deepep (the package DeepEP), turbo (its port in Primus-Turbo), or auto: local where
    parallel.ep * parallel.etp is 1, else alltoall."""
    transport: Transport = Transport.auto
    """Who moves the rows of symm: pull (kernels), copy_engine (copies of blocks of a fixed size beside the
    kernels, which pull what a block has no place for), or auto: copy_engine with pipeline.ep_overlap=true on
    GPUs of NVIDIA, else pull."""
    receive_budget: Any = 1.5
    """Room for rows of other ranks where no host counts them, as a multiple of what a balanced routing sends,
    > 0; or worst_case. A step in which more arrives runs again with more room, docs/expert_parallel.md."""
    sync_free_stage: Any = "auto"
    """How far a MoE layer never waits for the host: 0 nothing is promised; 1 router and routing plan; 2
    dispatch and experts too, but for one read of how many rows arrive; 3 the whole layer; auto is the lowest
    that graph.scope needs, docs/capture.md."""


@dataclass
class CompileConfig:
    """Compilation of the model's segments."""

    enabled: bool = True
    """Compile; without it the same model runs eagerly and no pass changes it."""
    cache: bool = True
    """Take compiled code from compile.cache_dir and keep it there for later runs."""
    cache_dir: str | None = None
    """Folder of compiled code; default: compiled in $GRAPHMOE_CACHE or ~/.cache/graphmoe."""
    cache_shared: bool = False
    """Let compile.cache_dir belong to others and be written by their groups, whose code is then run."""


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
    numa: NumaBinding = NumaBinding.auto
    """Where a worker's threads run: auto (the NUMA node of its GPU) or none (anywhere)."""
    threads: int | None = None
    """Threads of operations on the CPU, > 0; default: torch's own, or on several workers a share of cores."""
    kernarg_pool_mb: int | None = 12
    """ROCm: MiB for arguments of launched kernels (HSA_KERNARG_POOL_SIZE), > 0; null leaves ROCm's own."""
    max_hw_queues: int | None = None
    """ROCm: hardware queues of a process (GPU_MAX_HW_QUEUES), > 0; null leaves ROCm's own."""
    nvlink_multicast: bool = False
    """Let NCCL, NVSHMEM and torch's symmetric memory use NVLink multicast."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables, such as NCCL's; one that is set already is left as it is."""


@dataclass
class LogConfig:
    """What is written beside metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run's folder."""
    report: bool = True
    """Write report.html into the run's folder when it ends."""
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
class ParallelConfig:
    """How the ranks are laid out, docs/parallel.md. Ranks = dp * cp * tp * pp; experts fold the same ranks as
    edp * ep * etp * pp."""

    dp: int | None = None
    """Copies of the dense weights, each with batches of its own; default: what the others leave over, > 0."""
    tp: int = 1
    """Ranks that share each matrix of attention, dense and shared MLPs, embedding and head, > 0."""
    cp: int = 1
    """Ranks that share each sequence, > 0."""
    cp_method: ContextMethod = ContextMethod.auto
    """How attention sees what other ranks of cp have: alltoall (heads for positions), ring (keys and values
    go round), or auto: alltoall where the heads of a rank of tp divide by cp, else ring."""
    pp: int = 1
    """Ranks of a pipeline, > 0, which share the layers; pipeline.schedule says how."""
    ep: int = 1
    """Ranks that share the experts; may be more than dp, > 0."""
    etp: int = 1
    """Ranks that share each expert's matrices, > 0."""
    dp_shard: DpShard = DpShard.zero1
    """What ranks with the same weights share out: zero1 main weights and moments, fsdp2 weights and gradients
    too, which takes more exchange and no graph.scope."""


@dataclass
class LaunchConfig:
    """The processes of a run, docs/launch.md."""

    nproc: Any = 1
    """Workers on each node, one for each device: a number, or auto (gpus_per_job, else the visible GPUs; on a
    CPU 1)."""
    nodes: Any = "auto"
    """Nodes of the run, all started by the same command: a number, or auto (those of the Slurm job, or 1)."""
    endpoint: str | None = None
    """host:port where the nodes meet; default: the first host of the Slurm job."""
    max_restarts: int = 0
    """Times that all workers are started again, from the last checkpoint, after one failed, >= 0."""
    hang_timeout_s: int | None = 45
    """Seconds without progress of a worker after which the job ends; three times the longest step so far if
    that is more, > 0; null waits for ever."""
    gpus_per_job: int | None = None
    """GPUs of each job of a sweep whose jobs run side by side, > 0."""
    write_only: bool = False
    """Write resolved.yaml into the run's folder, print the command for a torchrun of your own, and stop."""
    fake_world: int | None = None
    """Dry run of one rank of so many, alone and without data: reports collectives and memory of a step,
    docs/dry_run.md, > 0."""
    fake_rank: int | None = None
    """The rank that a dry run runs, from 0; null takes one of those that are projected to hold most."""
    fake_memory_gb: float = 192.0
    """Memory of the device that a dry run plans for, as its vendor states it, in units of 2^30 bytes, > 0."""


@dataclass
class SweepConfig:
    """Jobs of a sweep, docs/sweeps.md."""

    resume: str | None = None
    """Folder of an interrupted sweep to go on with; all other words as in the command that began it."""


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
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    log: LogConfig = field(default_factory=LogConfig)
    format: OutputFormat = OutputFormat.text
    """What a tool prints on stdout: text, or one JSON document and nothing else."""
