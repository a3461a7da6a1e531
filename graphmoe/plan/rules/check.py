"""Rules that join several keys of the configuration, and the values behind ``auto`` and ``null``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from graphmoe.config.schema import (
    AttentionBackend,
    AttentionKind,
    CheckpointConfig,
    ComputeDtype,
    ConfigError,
    DataConfig,
    DataSource,
    DeviceChoice,
    GroupScore,
    ModelConfig,
    RopeScaling,
    RunConfig,
    ScoreFunction,
    TrainConfig,
    cache_root,
    compiled_folder,
)
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.plan import plan_problems
from graphmoe.plan.rules.dry_run import dry_run_rules, with_dry_batch
from graphmoe.plan.rules.experts import (
    dispatch_rules,
    dispatcher_of,
    has_experts,
    one_node_rules,
    overlap_rules,
    stage_rules,
)
from graphmoe.plan.rules.lr_schedule import lr_schedule_rules
from graphmoe.plan.rules.parallel import (
    context_method,
    context_parallel_rules,
    pipeline_rules,
    shard_rules,
    tensor_parallel_rules,
)
from graphmoe.plan.rules.profile import profile_rules, rank_rules
from graphmoe.plan.rules.recompute import recompute_rules
from graphmoe.plan.rules.values import divisors, fp32_rules, integer_rules, item_rules, path_rules
from graphmoe.plan.vendor_dispatch import vendor_dispatch_rules
from graphmoe.segments import CAPTURABLE, FULL_ITERATION, SCOPES, lowest_stage, segments_of

DEFAULT_SEQ_LEN = 4096
MOST_MICRO_BATCHES = 2**16


def check(config: RunConfig) -> None:
    """Raise one ConfigError that lists every violated rule, if there is any."""
    problems = violations(config)
    if problems:
        raise ConfigError("\n  ".join(["the configuration cannot run:", *problems]))


def violations(config: RunConfig) -> list[str]:
    """Every violated rule of a configuration, each with what would be valid. Pure."""
    if unusable := [*item_rules(config), *integer_rules(config)]:
        return unusable  # with which other rules cannot compute
    config = with_dry_batch(config)
    return [
        *_ranges(config),
        *path_rules(config),
        *fp32_rules(config),
        *lr_schedule_rules(config.optim, config.train.steps),
        *_model_rules(config.model),
        *_router_rules(config.model),
        *_data_rules(config.data, config.model),
        *_checkpoint_rules(config.checkpoint),
        *_batch_rules(config.train.global_batch_size, config.train.micro_batch_size),
        *_compile_rules(config.model.attention_backend, config.compile.enabled),
        *_graph_rules(config.graph.scope, config.compile.enabled),
        *dispatch_rules(config.moe, config.parallel, config.model),
        *one_node_rules(config.moe, config.parallel, config.launch.nproc, config.launch.nodes),
        *vendor_dispatch_rules(config.moe, config.parallel, config.model, config.precision.compute),
        *stage_rules(config.moe, config.parallel, config.graph.scope, config.model, config.compile.enabled),
        *overlap_rules(config),
        *recompute_rules(config.recompute, config.model, config.compile.enabled),
        *profile_rules(config),
        *_launch_rules(config),
        *pipeline_rules(config),
        *tensor_parallel_rules(config.parallel, config.model, seq_len_of(config)),
        *shard_rules(config.parallel, config.graph.scope),
        *context_parallel_rules(config.parallel, config.model, seq_len_of(config)),
    ]


def resolve(config: RunConfig) -> RunConfig:
    """A copy in which ``auto`` and ``null`` have their values; backends of kernels are chosen later."""
    config = with_dry_batch(config)
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run),
        data=dataclasses.replace(config.data),
        precision=dataclasses.replace(config.precision),
        moe=dataclasses.replace(config.moe),
        compile=dataclasses.replace(config.compile),
        launch=dataclasses.replace(config.launch),
        parallel=dataclasses.replace(config.parallel),
    )
    if config.run.device is DeviceChoice.auto:
        config.run.device = DeviceChoice.cuda if torch.cuda.is_available() else DeviceChoice.cpu
    if config.precision.compute is ComputeDtype.auto:
        on_gpu = config.run.device is DeviceChoice.cuda or config.launch.fake_world is not None
        config.precision.compute = ComputeDtype.bf16 if on_gpu else ComputeDtype.fp32
    if config.data.seq_len is None:
        config.data.seq_len = seq_len_of(config)
    config.data.cache_dir = str(cache_root(config.data.cache_dir))
    config.compile.cache_dir = str(compiled_folder(config.compile.cache_dir))
    if config.launch.nproc == "auto":
        on_gpu = config.run.device is DeviceChoice.cuda
        gpus = config.launch.gpus_per_job or max(torch.cuda.device_count(), 1)
        config.launch.nproc = gpus if on_gpu else 1
    config.moe.dispatcher = dispatcher_of(config.moe, config.parallel)
    config.parallel.cp_method = context_method(config.parallel, config.model)
    if config.moe.sync_free_stage == "auto":
        config.moe.sync_free_stage = lowest_stage(config.graph.scope) if has_experts(config.model) else 0
    return config


def seq_len_of(config: RunConfig) -> int:
    """Tokens of a sequence, where ``data.seq_len`` may be null."""
    return config.data.seq_len or min(config.model.context_length, DEFAULT_SEQ_LEN)


POSITIVE = """
    model.vocab_size model.hidden_size model.num_layers model.dense_ffn_size model.num_heads
    model.kv_lora_rank model.qk_nope_head_dim model.qk_rope_head_dim model.v_head_dim model.head_dim
    model.rope_theta model.yarn_original_context model.yarn_beta_slow model.context_length
    model.norm_eps model.init_std model.peak_lr model.num_experts model.top_k model.expert_ffn_size
    model.routed_scale model.num_groups model.topk_groups optim.lr optim.eps optim.bucket_mb
    train.steps launch.fake_memory_gb
    train.global_batch_size train.micro_batch_size train.max_nonfinite train.log_interval
    checkpoint.keep_last host.gc_interval graph.warmup_steps parallel.tp parallel.cp parallel.pp parallel.ep
    parallel.etp
"""
POSITIVE_IF_SET = """
    data.seq_len parallel.dp host.threads host.kernarg_pool_mb host.max_hw_queues launch.gpus_per_job
    launch.hang_timeout_s launch.fake_world pipeline.virtual_stages pipeline.microbatches
"""
NOT_NEGATIVE = """
    model.num_dense_layers model.q_lora_rank model.yarn_mscale model.yarn_mscale_all_dim
    model.shared_ffn_size model.bias_update_rate model.aux_loss_coef model.z_loss_coef model.mtp_depth
    model.mtp_loss_weight data.prefetch optim.warmup_steps optim.weight_decay train.clip_grad_norm
    train.val_interval train.val_batches checkpoint.interval checkpoint.keep_every log.sample_tokens
    launch.max_restarts
"""
BELOW_ONE = "data.val_fraction optim.beta1 optim.beta2"
SHARES = "optim.min_lr_ratio optim.wsd_decay_fraction"


def _ranges(config: RunConfig) -> Iterator[str]:
    """Single values out of their range; infinity and NaN are out of every range."""
    ranges = (
        (POSITIVE, "greater than 0", lambda v: v > 0),
        (NOT_NEGATIVE, "0 or greater", lambda v: v >= 0),
        (BELOW_ONE, "at least 0 and below 1", lambda v: 0 <= v < 1),
        (SHARES, "between 0 and 1", lambda v: 0 <= v <= 1),
    )
    for keys, wanted, holds in ranges:
        for key in keys.split():
            section, name = key.split(".")
            value = getattr(getattr(config, section), name)
            if not math.isfinite(value):
                yield f"{key}={value} must be finite and {wanted}"
            elif not holds(value):
                yield f"{key}={value} must be {wanted}"
    for key in POSITIVE_IF_SET.split():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and value < 1:
            yield f"{key}={value} must be greater than 0"
    if config.log.peak_tflops is not None and not config.log.peak_tflops > 0:
        yield f"log.peak_tflops={config.log.peak_tflops} must be greater than 0; null looks it up"


def _model_rules(model: ModelConfig) -> Iterator[str]:
    if model.num_dense_layers > model.num_layers:
        yield (
            f"model.num_dense_layers={model.num_dense_layers} exceeds model.num_layers={model.num_layers}; "
            f"use 0 to {model.num_layers}"
        )
    if model.attention is AttentionKind.gqa:
        if model.num_kv_heads < 1 or model.num_heads % max(model.num_kv_heads, 1):
            yield (
                f"model.num_kv_heads={model.num_kv_heads} does not divide model.num_heads={model.num_heads}; "
                f"use one of {divisors(model.num_heads)}"
            )
        if model.head_dim % 2:
            yield f"model.head_dim={model.head_dim} must be even for the rotary embedding"
    elif model.qk_rope_head_dim % 2:
        yield f"model.qk_rope_head_dim={model.qk_rope_head_dim} must be even for the rotary embedding"
    if model.attention is AttentionKind.mla and model.qk_norm:
        yield "model.qk_norm=true applies to model.attention=gqa only; use qk_norm=false"
    if model.rope_scaling is RopeScaling.yarn:
        if not 1 <= model.yarn_factor < math.inf:
            yield f"model.yarn_factor={model.yarn_factor} must be 1 or greater"
        if not model.yarn_beta_slow <= model.yarn_beta_fast < math.inf:
            yield (
                f"model.yarn_beta_fast={model.yarn_beta_fast} is below "
                f"model.yarn_beta_slow={model.yarn_beta_slow}; swap them"
            )


def _router_rules(model: ModelConfig) -> Iterator[str]:
    experts, groups = model.num_experts, model.num_groups
    if experts < 1:
        return
    if model.top_k > experts:
        yield f"model.top_k={model.top_k} exceeds model.num_experts={experts}; use 1 to {experts}"
    if model.softmax_after_topk and model.score_function is not ScoreFunction.softmax:
        yield (
            f"model.softmax_after_topk=true needs model.score_function=softmax, "
            f"not {model.score_function.name}"
        )
    if model.softmax_after_topk and model.renormalise:
        yield "model.renormalise=true has no effect with model.softmax_after_topk=true; use renormalise=false"
    if groups < 1 or model.topk_groups < 1:
        return
    if experts % groups:
        yield (
            f"model.num_groups={groups} does not divide model.num_experts={experts}; "
            f"use one of {divisors(experts)}"
        )
    elif model.topk_groups > groups:
        yield f"model.topk_groups={model.topk_groups} exceeds model.num_groups={groups}; use 1 to {groups}"
    elif model.group_score is GroupScore.topk_sum and groups > 1 and model.top_k % model.topk_groups:
        yield (
            f"model.group_score=topk_sum adds top_k / topk_groups scores, but model.top_k={model.top_k} is "
            f"no multiple of model.topk_groups={model.topk_groups}; use one of {divisors(model.top_k)}"
        )
    elif model.topk_groups * (experts // groups) < min(model.top_k, experts):
        needed = math.ceil(model.top_k / (experts // groups))
        yield (
            f"model.topk_groups={model.topk_groups} leaves {model.topk_groups * (experts // groups)} experts "
            f"for model.top_k={model.top_k}; use topk_groups={needed} or more"
        )


def _data_rules(data: DataConfig, model: ModelConfig) -> Iterator[str]:
    trains_tokenizer = data.source is DataSource.stdlib and data.tokenizer is None
    if trains_tokenizer and not 300 <= data.bpe_vocab_size <= model.vocab_size:
        yield (
            f"data.bpe_vocab_size={data.bpe_vocab_size} must be from 300 to "
            f"model.vocab_size={model.vocab_size}"
        )
    if data.source in (DataSource.files, DataSource.memmap) and not data.paths:
        yield f"data.source={data.source.name} needs data.paths, e.g. 'data.paths=[corpus/*.jsonl]'"
    if data.source in (DataSource.files, DataSource.hf) and data.tokenizer is None:
        yield f"data.source={data.source.name} needs data.tokenizer, the path of a tokenizer.json"
    if data.source is DataSource.hf and data.hf_name is None:
        yield "data.source=hf needs data.hf_name, the name or local folder of a dataset"
    if data.seq_len is not None and data.seq_len > model.context_length:
        yield (
            f"data.seq_len={data.seq_len} exceeds model.context_length={model.context_length}; use at most "
            f"{model.context_length}, or raise model.context_length"
        )
    if data.seq_len is not None and 0 < data.seq_len <= model.mtp_depth:
        yield (
            f"data.seq_len={data.seq_len} leaves no label for model.mtp_depth={model.mtp_depth}; "
            f"use at least {model.mtp_depth + 1}"
        )


def _checkpoint_rules(checkpoint: CheckpointConfig) -> Iterator[str]:
    if checkpoint.init_from and checkpoint.resume_from:
        yield (
            "checkpoint.init_from takes weights only and checkpoint.resume_from the whole state; "
            "use one of the two"
        )


def _batch_rules(global_batch: int, micro_batch: int) -> Iterator[str]:
    if micro_batch < 1 or global_batch < 1:
        return
    if global_batch % micro_batch:
        below = divisors(global_batch, micro_batch)
        yield (
            f"train.global_batch_size={global_batch} is not a multiple of "
            f"train.micro_batch_size={micro_batch}; use e.g. micro_batch_size={below[-1]} "
            f"or global_batch_size={math.ceil(global_batch / micro_batch) * micro_batch}"
        )


def _launch_rules(config: RunConfig) -> Iterator[str]:
    launch = config.launch
    for key, value in (("nproc", launch.nproc), ("nodes", launch.nodes)):
        if value != "auto" and (type(value) is not int or value < 1):
            yield f"launch.{key}={value!r} must be auto or a number greater than 0"
    host, _, port = (launch.endpoint or "").rpartition(":")
    is_host = host != "" and host.isprintable() and not set(host) & {" ", "/"}
    is_port = port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16
    if launch.endpoint is not None and not (is_host and is_port):
        yield (
            f"launch.endpoint={ascii(launch.endpoint)[1:-1]} must be host:port with a port from 1 to 65535, "
            f"e.g. launch.endpoint=node0:29500"
        )
    if launch.fake_world is not None:
        yield from dry_run_rules(config)
        if launch.fake_world > 0:
            yield from _layout_rules(config, launch.fake_world, exact=True)
        return
    counts = [value for value in (launch.nproc, launch.nodes) if type(value) is int]
    if all(count > 0 for count in counts):
        yield from _layout_rules(config, math.prod(counts), exact=len(counts) == 2)


def _layout_rules(config: RunConfig, ranks: int, *, exact: bool) -> Iterator[str]:
    """Of so many ranks, or of a multiple of them where it is not exact."""
    train, parallel = config.train, config.parallel
    if min(parallel.dp or 1, parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.etp) < 1:
        return
    try:
        layout = Layout.of(parallel, ranks)
    except ConfigError as error:
        if exact:
            yield str(error)
        return
    if exact:
        yield from rank_rules(config.profile, ranks)
    if problems := [*rank_batch_rules(train, layout, ranks)]:
        yield from problems
        return
    others = (
        _ranges(config),
        _model_rules(config.model),
        _router_rules(config.model),
        _batch_rules(train.global_batch_size, train.micro_batch_size),
    )
    if exact and not any(problem for rules in others for problem in rules):
        yield from plan_problems(config, layout)  # of a model and a batch that can be


def rank_batch_rules(train: TrainConfig, layout: Layout, ranks: int) -> Iterator[str]:
    """A global batch that data-parallel ranks of ``ranks`` cannot share in whole micro-batches."""
    dp, together = layout.dp, train.micro_batch_size * layout.dp
    if together > 0 and train.global_batch_size > MOST_MICRO_BATCHES * together:
        yield (
            f"train.global_batch_size={train.global_batch_size} is {train.global_batch_size // together} "
            f"micro-batches of a rank in each step; use at most {MOST_MICRO_BATCHES * together}, or a larger "
            f"train.micro_batch_size"
        )
    if dp > 1 and together > 0 and train.global_batch_size % together:
        yield (
            f"train.global_batch_size={train.global_batch_size} is not a multiple of train.micro_batch_size="
            f"{train.micro_batch_size} times {dp} {'workers' if dp == ranks else 'data-parallel ranks'}; "
            f"use a multiple of {together}"
        )


def _compile_rules(backend: AttentionBackend, compiles: bool) -> Iterator[str]:
    if compiles and backend in (AttentionBackend.turbo, AttentionBackend.te):
        yield (
            f"model.attention_backend={backend.value} is a library whose backward cannot be compiled; use "
            f"auto or sdpa, or compile.enabled=false on a GPU"
        )


def _graph_rules(scope: object, compiles: bool) -> Iterator[str]:
    words = ", ".join([*SCOPES, FULL_ITERATION])
    if isinstance(scope, str):
        known = scope in SCOPES or scope == FULL_ITERATION
        bad = [] if known else [scope]
    else:
        names = scope if isinstance(scope, list) else [scope]
        bad = [str(name) for name in names if name not in CAPTURABLE]
    if scope == []:
        yield f"graph.scope=[] names no segment; use graph.scope=none, or one of {words}"
    elif isinstance(scope, str) and scope in CAPTURABLE:
        yield f"graph.scope={scope} is one segment; name it in a list: 'graph.scope=[{scope}]'"
    elif bad:
        yield (
            f"graph.scope={scope} has {', '.join(bad)}; use one of {words}, or a list of segments: "
            f"{', '.join(CAPTURABLE)}"
        )
    elif isinstance(scope, list) and len(set(scope)) < len(scope):
        yield f"graph.scope={scope} names a segment twice; name each once"
    elif not compiles and segments_of(scope):  # type: ignore[arg-type]
        yield (
            f"graph.scope={scope} captures compiled segments, and compile.enabled=false; use "
            f"compile.enabled=true, graph.scope={FULL_ITERATION} or graph.scope=none"
        )
