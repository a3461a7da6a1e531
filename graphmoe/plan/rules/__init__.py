"""Check of a configuration by ranges of values and rules across keys; resolution of auto and null."""

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator

from graphmoe.config.choices import look_up
from graphmoe.config.ranges import fields_of, form_rules, own_code, range_rules, spelled, type_rules
from graphmoe.config.schema import (
    ComputeDtype,
    ConfigError,
    DeviceChoice,
    RunConfig,
    cache_root,
    compiled_folder,
)
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.plan import pipeline_of
from graphmoe.plan.rules import lora, model, parallel, recompute, run
from graphmoe.plan.rules.auto import auto_rules, presumed, value_of, with_values
from graphmoe.plan.rules.unused import of_experts

# rules that must hold before a pipeline can be planned
FIRST = (model.model_rules, model.router_rules, parallel.batch_rules, parallel.pipeline_rules)
# each yields the rules that a configuration violates
RULES = (
    run.name_rules,
    run.length_rules,
    run.fault_rules,
    run.lr_schedule_rules,
    run.data_rules,
    run.unread_data_rules,
    run.checkpoint_rules,
    run.precision_rules,
    run.graph_rules,
    recompute.recompute_rules,
    run.profile_rules,
    run.launch_rules,
    run.dry_run_rules,
    model.dispatch_rules,
    model.load_rules,
    model.one_node_rules,
    model.vendor_dispatch_rules,
    model.stage_rules,
    model.overlap_rules,
    parallel.attention_rules,
    parallel.layer_rules,
    parallel.tensor_parallel_rules,
    parallel.matrix_rules,
    parallel.clip_rules,
    parallel.storage_rules,
    parallel.context_parallel_rules,
    lora.lora_rules,
)

FUNCTIONS = ("optim.schedule", "data.source")  # keys whose plug-in is a function


def check(config: RunConfig, given: Collection[str] = ()) -> None:
    """Raise one ConfigError that lists every violated rule; ``given``: typed keys. Imports plug-ins."""
    if problems := violations(config, given):
        raise ConfigError("\n  ".join(problems))
    for key, path in own_code(config):
        look_up({}, path, key, Callable if key in FUNCTIONS else object)


def violations(config: RunConfig, given: Collection[str] = ()) -> list[str]:
    """Return a message, with valid values, for every violated rule. Pure."""
    fields = [*fields_of(config)]
    if unusable := [*(line for field in fields for line in type_rules(field)), *auto_rules(config)]:
        return unusable  # other rules cannot compute with such values
    unread = of_experts(config, given)
    wrong = [
        f"{key}={spelled(value_of(config, key))} is for MoE layers, and a model of model.num_experts=0 has "
        f"none; leave it out"
        for key in unread
    ]
    config = presumed(run.with_steps(run.with_dry_batch(with_values(config, unread))))
    ranges = [line for field in fields for line in range_rules(field)]
    own = [*ranges, *(line for rule in FIRST for line in rule(config))]
    return [
        *wrong,
        *own,
        *(line for field in fields for line in form_rules(field)),
        *(line for rule in RULES for line in rule(config)),
        *_layout_rules(config, can_plan=not own),
    ]


def _layout_rules(config: RunConfig, *, can_plan: bool) -> Iterator[str]:
    launch, sizes = config.launch, config.parallel
    counts = [value for value in (launch.nproc, launch.nodes) if type(value) is int]
    if launch.fake_world is not None:
        counts = [launch.fake_world, 1]
    ranks, exact = math.prod(counts), len(counts) == 2  # or a divisor of their number
    if min(sizes.dp or 1, sizes.tp, sizes.cp, sizes.pp, sizes.ep, sizes.etp, ranks) < 1:
        return
    try:
        layout = Layout.of(sizes, ranks)
    except ConfigError as error:
        if exact:
            yield str(error)
        return
    profiled = config.profile.ranks
    if exact and config.profile.steps and max(profiled, default=0) >= ranks:
        yield f"profile.ranks={profiled} has a rank that is none of {ranks}; use 0 to {ranks - 1}"
    if problems := [*parallel.rank_batch_rules(config.train, layout, ranks)]:
        yield from problems
    elif exact and can_plan:
        try:
            pipeline_of(config, layout)
        except ConfigError as error:
            yield str(error)


def resolve(config: RunConfig) -> RunConfig:
    """Return a copy with ``null`` and most of ``auto`` resolved.

    graphmoe.training.auto decides keys that depend on devices; kernel backends are chosen later.
    """
    import torch

    config = run.with_steps(run.with_dry_batch(config))
    sections = {f.name: copy.copy(getattr(config, f.name)) for f in dataclasses.fields(config)}
    config = RunConfig(**sections)
    if config.run.device is DeviceChoice.auto:
        config.run.device = DeviceChoice.cuda if torch.cuda.is_available() else DeviceChoice.cpu
    if config.precision.compute is ComputeDtype.auto:
        on_gpu = config.run.device is DeviceChoice.cuda or config.launch.fake_world is not None
        config.precision.compute = ComputeDtype.bf16 if on_gpu else ComputeDtype.fp32
    config.train.tokens = None  # train.steps has replaced it
    if config.data.seq_len is None:
        config.data.seq_len = parallel.seq_len_of(config)
    config.data.cache_dir = str(cache_root(config.data.cache_dir))
    config.compile.cache_dir = str(compiled_folder(config.compile.cache_dir))
    if config.launch.nproc == "auto":
        on_gpu = config.run.device is DeviceChoice.cuda
        gpus = config.launch.gpus_per_job or max(torch.cuda.device_count(), 1)
        config.launch.nproc = gpus if on_gpu else 1
    config.parallel.cp_method = parallel.context_method(config.parallel, config.model)
    return config
