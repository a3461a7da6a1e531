"""The check of a configuration: ranges of values, rules that join keys, and values behind auto and null."""

import copy
import dataclasses
import math
from collections.abc import Iterator

import torch

from graphmoe.config.ranges import fields_of, form_rules, range_rules, type_rules
from graphmoe.config.schema import (
    ComputeDtype,
    ConfigError,
    DeviceChoice,
    RunConfig,
    cache_root,
    compiled_folder,
)
from graphmoe.plan.experts import dispatcher_of, has_experts
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.plan import plan_problems
from graphmoe.plan.rules.experts import (
    dispatch_rules,
    one_node_rules,
    overlap_rules,
    stage_rules,
    vendor_dispatch_rules,
)
from graphmoe.plan.rules.model import model_rules, router_rules
from graphmoe.plan.rules.parallel import (
    batch_rules,
    context_method,
    context_parallel_rules,
    pipeline_rules,
    rank_batch_rules,
    shard_rules,
    tensor_parallel_rules,
)
from graphmoe.plan.rules.run import (
    checkpoint_rules,
    compile_rules,
    data_rules,
    dry_run_rules,
    graph_rules,
    launch_rules,
    lr_schedule_rules,
    profile_rules,
    rank_rules,
    recompute_rules,
    with_dry_batch,
)
from graphmoe.segments import lowest_stage

DEFAULT_SEQ_LEN = 4096
LONGEST_NAME = 200
"""Bytes of a run's name: file systems take 255, and numbers and endings are added."""


def check(config: RunConfig) -> None:
    """Raise one ConfigError that lists every violated rule, if there is any."""
    problems = violations(config)
    if problems:
        raise ConfigError("\n  ".join(["the configuration cannot run:", *problems]))


def violations(config: RunConfig) -> list[str]:
    """Return every violated rule of a configuration, each with valid values. Pure."""
    fields = [*fields_of(config)]
    if unusable := [line for field in fields for line in type_rules(field)]:
        return unusable  # other rules cannot compute with such values
    config = with_dry_batch(config)
    train, model, parallel = config.train, config.model, config.parallel
    compiles, scope, seq_len = config.compile.enabled, config.graph.scope, seq_len_of(config)
    own = [
        *(line for field in fields for line in range_rules(field)),
        *model_rules(model),
        *router_rules(model),
        *batch_rules(train.global_batch_size, train.micro_batch_size),
        *pipeline_rules(config),
    ]
    return [
        *own,
        *_name_rules(config.run.name),
        *(line for field in fields for line in form_rules(field)),
        *lr_schedule_rules(config.optim, train.steps),
        *data_rules(config.data, model),
        *checkpoint_rules(config.checkpoint),
        *compile_rules(model.attention_backend, compiles),
        *graph_rules(scope, compiles),
        *dispatch_rules(config.moe, parallel, model),
        *one_node_rules(config.moe, parallel, config.launch.nproc, config.launch.nodes),
        *vendor_dispatch_rules(config.moe, parallel, model, config.precision.compute),
        *stage_rules(config.moe, parallel, scope, model, compiles),
        *overlap_rules(config),
        *recompute_rules(config.recompute, model, compiles),
        *profile_rules(config),
        *launch_rules(config.launch),
        *dry_run_rules(config),
        *_layout_rules(config, can_plan=not own),
        *tensor_parallel_rules(parallel, model, seq_len),
        *shard_rules(parallel, scope),
        *context_parallel_rules(parallel, model, seq_len),
    ]


def resolve(config: RunConfig) -> RunConfig:
    """Return a copy with values for ``auto`` and ``null``; backends of kernels are chosen later."""
    config = with_dry_batch(config)
    sections = {f.name: copy.copy(getattr(config, f.name)) for f in dataclasses.fields(config)}
    config = RunConfig(**sections)
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
    """Return the tokens of a sequence, where ``data.seq_len`` may be null."""
    return config.data.seq_len or min(config.model.context_length, DEFAULT_SEQ_LEN)


def _name_rules(name: str) -> Iterator[str]:
    if name in ("", ".", "..") or set("/\\\0") & set(name):
        yield f"run.name='{name}' can name no folder; use one without slashes, as run.name=my-run"
    elif not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        shown = ascii(name[:40])
        yield f"run.name={shown} names a folder: use at most {LONGEST_NAME} bytes, all of them printable"


def _layout_rules(config: RunConfig, *, can_plan: bool) -> Iterator[str]:
    """Yield violated rules of the number of ranks, as far as it is known.

    ``can_plan`` is True where the model, the batch and the schedule violate no rules of their own.
    """
    launch, parallel = config.launch, config.parallel
    counts = [value for value in (launch.nproc, launch.nodes) if type(value) is int]
    if launch.fake_world is not None:
        counts = [launch.fake_world, 1]
    ranks, exact = math.prod(counts), len(counts) == 2  # or a divisor of their number
    if min(parallel.dp or 1, parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.etp, ranks) < 1:
        return
    try:
        layout = Layout.of(parallel, ranks)
    except ConfigError as error:
        if exact:
            yield str(error)
        return
    if exact:
        yield from rank_rules(config.profile, ranks)
    if problems := [*rank_batch_rules(config.train, layout, ranks)]:
        yield from problems
    elif exact and can_plan:
        yield from plan_problems(config, layout)
