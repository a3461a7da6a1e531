"""Rules that join several keys of the configuration, and the values behind ``auto`` and ``null``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphmoe.cache_folders import cache_root, compiled_folder
from graphmoe.config import (
    AttentionBackend,
    AttentionKind,
    AuxLoss,
    CheckpointConfig,
    ComputeDtype,
    ConfigError,
    DataConfig,
    DataSource,
    DeviceChoice,
    GroupScore,
    ModelConfig,
    RecomputeConfig,
    RopeScaling,
    RunConfig,
    ScoreFunction,
)
from graphmoe.segments import (
    CAPTURABLE,
    FULL_ITERATION,
    LAYER_SEGMENTS,
    PARTS,
    SCOPES,
    SYNC_FREE_STAGES,
    lowest_stage,
    segments_of,
    waiting_segments,
)

DEFAULT_SEQ_LEN = 4096


def check(config: RunConfig) -> None:
    """Raise one ConfigError that lists every violated rule, if there is any."""
    problems = violations(config)
    if problems:
        raise ConfigError("\n  ".join(["the configuration cannot run:", *problems]))


def violations(config: RunConfig) -> list[str]:
    """Every violated rule of a configuration, each with what would be valid. Pure."""
    return [
        *_ranges(config),
        *_model_rules(config.model),
        *_router_rules(config.model),
        *_data_rules(config.data, config.model),
        *_checkpoint_rules(config.checkpoint),
        *_batch_rules(config.train.global_batch_size, config.train.micro_batch_size),
        *_compile_rules(config.model.attention_backend, config.compile.enabled),
        *_graph_rules(config.graph.scope, config.compile.enabled),
        *_stage_rules(config.moe.sync_free_stage, config.graph.scope, config.model, config.compile.enabled),
        *_recompute_rules(config.recompute, config.model, config.compile.enabled),
        *_launch_rules(config),
    ]


def resolve(config: RunConfig) -> RunConfig:
    """A copy in which ``auto`` and ``null`` have their values; backends of kernels are chosen later."""
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run),
        data=dataclasses.replace(config.data),
        precision=dataclasses.replace(config.precision),
        moe=dataclasses.replace(config.moe),
        compile=dataclasses.replace(config.compile),
        launch=dataclasses.replace(config.launch),
    )
    if config.run.device is DeviceChoice.auto:
        config.run.device = DeviceChoice.cuda if torch.cuda.is_available() else DeviceChoice.cpu
    if config.precision.compute is ComputeDtype.auto:
        on_gpu = config.run.device is DeviceChoice.cuda
        config.precision.compute = ComputeDtype.bf16 if on_gpu else ComputeDtype.fp32
    if config.data.seq_len is None:
        config.data.seq_len = min(config.model.context_length, DEFAULT_SEQ_LEN)
    config.data.cache_dir = str(cache_root(config.data.cache_dir))
    config.compile.cache_dir = str(compiled_folder(config.compile.cache_dir))
    if config.launch.nproc == "auto":
        on_gpu = config.run.device is DeviceChoice.cuda
        gpus = config.launch.gpus_per_job or max(torch.cuda.device_count(), 1)
        config.launch.nproc = gpus if on_gpu else 1
    if config.moe.sync_free_stage == "auto":
        config.moe.sync_free_stage = lowest_stage(config.graph.scope) if has_experts(config.model) else 0
    return config


POSITIVE = """
    model.vocab_size model.hidden_size model.num_layers model.dense_ffn_size model.num_heads
    model.kv_lora_rank model.qk_nope_head_dim model.qk_rope_head_dim model.v_head_dim model.head_dim
    model.rope_theta model.yarn_original_context model.yarn_beta_slow model.context_length
    model.norm_eps model.init_std model.peak_lr model.num_experts model.top_k model.expert_ffn_size
    model.routed_scale model.num_groups model.topk_groups optim.lr optim.eps train.steps
    train.global_batch_size train.micro_batch_size train.max_nonfinite train.log_interval
    checkpoint.keep_last host.gc_interval graph.warmup_steps
"""
POSITIVE_IF_SET = """
    data.seq_len host.threads host.kernarg_pool_mb host.max_hw_queues launch.gpus_per_job
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
            if not (math.isfinite(value) and holds(value)):
                yield f"{key}={value} must be {wanted}"
    for key in POSITIVE_IF_SET.split():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and value < 1:
            yield f"{key}={value} must be greater than 0"
    if config.log.peak_tflops is not None and not config.log.peak_tflops > 0:
        yield f"log.peak_tflops={config.log.peak_tflops} must be greater than 0; null looks it up"
    if config.optim.wsd_decay_fraction == 0:
        yield "optim.wsd_decay_fraction=0 never decays; use a share above 0, or optim.schedule=constant"
    if config.run.name in ("", ".", "..") or set("/\\\0") & set(config.run.name):
        yield f"run.name='{config.run.name}' names a folder: use a name without slashes, e.g. run.name=my-run"


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
                f"use one of {_divisors(model.num_heads)}"
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
            f"use one of {_divisors(experts)}"
        )
    elif model.topk_groups > groups:
        yield f"model.topk_groups={model.topk_groups} exceeds model.num_groups={groups}; use 1 to {groups}"
    elif model.group_score is GroupScore.topk_sum and groups > 1 and model.top_k % model.topk_groups:
        yield (
            f"model.group_score=topk_sum adds top_k / topk_groups scores, but model.top_k={model.top_k} is "
            f"no multiple of model.topk_groups={model.topk_groups}; use one of {_divisors(model.top_k)}"
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
        below = [size for size in _divisors(global_batch) if size <= micro_batch]
        yield (
            f"train.global_batch_size={global_batch} is not a multiple of "
            f"train.micro_batch_size={micro_batch}; use e.g. micro_batch_size={below[-1]} "
            f"or global_batch_size={math.ceil(global_batch / micro_batch) * micro_batch}"
        )


def _launch_rules(config: RunConfig) -> Iterator[str]:
    launch, train = config.launch, config.train
    for key, value in (("nproc", launch.nproc), ("nodes", launch.nodes)):
        if value != "auto" and (type(value) is not int or value < 1):
            yield f"launch.{key}={value!r} must be auto or a number greater than 0"
    host, colon, port = (launch.endpoint or "").rpartition(":")
    if launch.endpoint is not None and not (host and colon and port.isdigit()):
        yield f"launch.endpoint={launch.endpoint} must be host:port, e.g. launch.endpoint=node0:29500"
    counts = [value for value in (launch.nproc, launch.nodes) if type(value) is int]
    ranks = math.prod(counts)
    if ranks < 2:
        return
    if config.model.aux_loss is AuxLoss.global_batch:
        yield (
            f"model.aux_loss=global_batch counts the tokens of one worker, and there are {ranks}; use "
            f"aux_loss=micro_batch or sequence, or launch.nproc=1"
        )
    together = train.micro_batch_size * ranks
    if together > 0 and train.global_batch_size % together:
        yield (
            f"train.global_batch_size={train.global_batch_size} is not a multiple of train.micro_batch_size="
            f"{train.micro_batch_size} times {ranks} workers; use a multiple of {together}"
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


def _stage_rules(stage: object, scope: object, model: ModelConfig, compiles: bool) -> Iterator[str]:
    if stage == "auto":
        return
    if type(stage) is not int or stage not in SYNC_FREE_STAGES:  # True and 1.0 equal 1, and are none
        yield f"moe.sync_free_stage={stage!r} must be auto, 0, 1, 2 or 3"
    elif isinstance(scope, str | list) and has_experts(model) and (waiting := waiting_segments(scope, stage)):
        kept = [name for name in (segments_of(scope) or CAPTURABLE) if name not in waiting and compiles]
        without = f"[{','.join(kept)}]" if kept else "none"
        yield (
            f"graph.scope={scope} captures {', '.join(waiting)}, which may wait for the host at "
            f"moe.sync_free_stage={stage}; use moe.sync_free_stage={lowest_stage(scope)} or auto, or "
            f"graph.scope={without}"
        )


def has_experts(model: ModelConfig) -> bool:
    """Whether any layer has routed experts."""
    return model.mtp_depth > 0 or model.num_layers > model.num_dense_layers


def _recompute_rules(wanted: RecomputeConfig, model: ModelConfig, compiles: bool) -> Iterator[str]:
    last = model.num_layers + model.mtp_depth - 1
    known: dict[str, tuple[list[Any], Sequence[Any]]] = {
        "segments": (wanted.segments, LAYER_SEGMENTS),
        "ops": (wanted.ops, PARTS),
        "layer_ids": (wanted.layer_ids, range(last + 1)),
    }
    if last < 0:
        return  # of such a model other rules speak
    if wanted.all and any(given for given, _ in known.values()):
        named = " and ".join(f"recompute.{key}={given}" for key, (given, _) in known.items() if given)
        yield f"recompute.all=true computes every layer again; leave out {named}, or use recompute.all=false"
    for key, (given, valid) in known.items():
        bad = [str(each) for each in given if each not in valid]
        twice = sorted({str(each) for each in given if given.count(each) > 1})
        if bad:
            words = f"0 to {last}" if key == "layer_ids" else ", ".join(map(str, valid))
            yield f"recompute.{key}={given} has {', '.join(bad)}; use {words}"
        elif twice:
            yield f"recompute.{key}={given} names {', '.join(twice)} twice; name each once"
    if wanted.ops and not compiles:
        yield (
            f"recompute.ops={wanted.ops} are chosen in compiled graphs, and compile.enabled=false; use "
            f"compile.enabled=true, or recompute.segments"
        )
    layers = [i for i in wanted.layer_ids if 0 <= i <= last] or range(last + 1)
    for key, name in [*(("segments", n) for n in wanted.segments), *(("ops", n) for n in wanted.ops)]:
        having = _layers_with(name, model)
        if name in known[key][1] and not having:
            yield f"recompute.{key} names {name}, which the model has not; leave it out"
        elif name in known[key][1] and not set(layers) & set(having):
            yield (
                f"recompute.{key} names {name}, which no layer of recompute.layer_ids={wanted.layer_ids} "
                f"has; leave it out, or name some of the layers {having[0]} to {having[-1]}"
            )


def _layers_with(name: str, model: ModelConfig) -> range:
    """The layers that have a segment or a part; none for those of an attention or of experts not there."""
    end = model.num_layers + model.mtp_depth
    moe = range(model.num_dense_layers, end)
    having = {
        "mlp": range(model.num_dense_layers),
        "shared_experts": moe if model.shared_ffn_size else range(0),
        "mla_up_proj": range(end if model.attention is AttentionKind.mla else 0),
    }
    return having.get(name, moe if name.startswith("moe_") else range(end))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
