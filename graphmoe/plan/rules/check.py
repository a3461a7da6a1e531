"""The check of a configuration: ranges of values, rules that join keys, and values behind auto and null."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphmoe.config.ranges import FP32, PATH, AtMost, Range, SchemaField, fields_of
from graphmoe.config.schema import (
    ComputeDtype,
    ConfigError,
    DeviceChoice,
    RunConfig,
    cache_root,
    compiled_folder,
    is_path,
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
LEAST_FP32, MOST_FP32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
LARGEST_BELOW_ONE = 1 - 2**-24


def check(config: RunConfig) -> None:
    """Raise one ConfigError that lists every violated rule, if there is any."""
    problems = violations(config)
    if problems:
        raise ConfigError("\n  ".join(["the configuration cannot run:", *problems]))


def violations(config: RunConfig) -> list[str]:
    """Return every violated rule of a configuration, each with valid values. Pure."""
    fields = [*fields_of(config)]
    if unusable := [line for field in fields for line in [*_item_rules(field), *_integer_rules(field)]]:
        return unusable  # with which other rules cannot compute
    config = with_dry_batch(config)
    train, model, parallel = config.train, config.model, config.parallel
    compiles, scope, seq_len = config.compile.enabled, config.graph.scope, seq_len_of(config)
    own = [
        *(line for field in fields for line in _range_rules(field)),
        *model_rules(model),
        *router_rules(model),
        *batch_rules(train.global_batch_size, train.micro_batch_size),
    ]
    return [
        *own,
        *_name_rules(config.run.name),
        *(line for field in fields for line in [*_path_rules(field), *_fp32_rules(field)]),
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
        *pipeline_rules(config),
        *tensor_parallel_rules(parallel, model, seq_len),
        *shard_rules(parallel, scope),
        *context_parallel_rules(parallel, model, seq_len),
    ]


def resolve(config: RunConfig) -> RunConfig:
    """Return a copy with values for ``auto`` and ``null``; backends of kernels are chosen later."""
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
    """Return the tokens of a sequence, where ``data.seq_len`` may be null."""
    return config.data.seq_len or min(config.model.context_length, DEFAULT_SEQ_LEN)


def _item_rules(field: SchemaField) -> Iterator[str]:
    """Refuse items of another type than their list's, and texts that UTF-8 has not: OmegaConf takes both."""
    key, values = field.key, field.value
    if typing.get_origin(field.hint) is list and any(type(v) is not field.hint.__args__[0] for v in values):
        wanted = {int: "whole numbers", str: "texts"}[field.hint.__args__[0]]
        yield f"{key}={values} must be a list of {wanted}"
    texts = [*values, *values.values()] if isinstance(values, dict) else _items(values)
    if any(isinstance(text, str) and re.search("[\ud800-\udfff]", text) for text in texts):
        yield f"{key}={ascii(values)} has half a character; write it in UTF-8"


def _integer_rules(field: SchemaField) -> Iterator[str]:
    """Refuse integers of more than 64 bits, and those above what stands beside the field."""
    limit = next((mark.limit for mark in field.marks if isinstance(mark, AtMost)), 2**63 - 1)
    for value in _items(field.value):
        if not isinstance(value, int):
            continue
        digits = str(value)
        shown = digits if len(digits) < 30 else f"{digits[:10]}...({len(digits)} digits)"
        if not -(2**63) <= value < 2**63:
            yield f"{field.key}={shown} needs more than 64 bits; use at most {limit}"
        elif value > limit:
            yield f"{field.key}={shown} is too large; use at most {limit}"


def _range_rules(field: SchemaField) -> Iterator[str]:
    """Refuse numbers out of their range; infinity and NaN are out of every range."""
    for mark in field.marks:
        if not isinstance(mark, Range) or field.value is None:
            continue
        if not math.isfinite(field.value):
            yield f"{field.key}={field.value} must be finite and {mark.wanted}"
        elif not mark.holds(field.value):
            yield f"{field.key}={field.value} must be {mark.wanted}"


def _fp32_rules(field: SchemaField) -> Iterator[str]:
    """Refuse numbers that become 0, infinite or 1 in fp32; other rules speak of those out of range."""
    key, value = field.key, field.value
    if FP32 not in field.marks or not math.isfinite(value) or value == 0:
        return
    held = ctypes.c_float(value).value
    if not LEAST_FP32 <= abs(held) <= MOST_FP32:
        rounded = "too small for" if abs(held) < LEAST_FP32 else "infinite in"
        yield f"{key}={value} is {rounded} fp32; use a number from {LEAST_FP32:.2g} to {MOST_FP32:.2g}"
    elif any(isinstance(mark, Range) and mark.holds(value) and not mark.holds(held) for mark in field.marks):
        yield f"{key}={value} is {held:.0f} in fp32; use at most {LARGEST_BELOW_ONE:.8f}"


def _path_rules(field: SchemaField) -> Iterator[str]:
    """Refuse paths that no file can have."""
    for path in _items(field.value) if PATH in field.marks else ():
        if path and not is_path(path):
            yield f"{field.key}={ascii(path)[1:-1]} can name no file; use at most 255 bytes between slashes"


def _name_rules(name: str) -> Iterator[str]:
    """Refuse names that no folder of a run can have."""
    if name in ("", ".", "..") or set("/\\\0") & set(name):
        yield f"run.name='{name}' can name no folder; use one without slashes, as run.name=my-run"
    elif not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        shown = ascii(name[:40])
        yield f"run.name={shown} names a folder: use at most {LONGEST_NAME} bytes, all of them printable"


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _layout_rules(config: RunConfig, *, can_plan: bool) -> Iterator[str]:
    """Yield violated rules of the number of ranks, as far as it is known.

    ``can_plan`` says that the model and the batch can be.
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
