"""Resolution of ``auto`` and ``null``."""

import copy
import dataclasses

import torch

from graphmoe.config.schema import ComputeDtype, DeviceChoice, RunConfig, cache_root, compiled_folder
from graphmoe.plan.experts import experts_of, has_experts
from graphmoe.plan.rules import parallel, run
from graphmoe.segments import lowest_stage


def resolve(config: RunConfig) -> RunConfig:
    """Return a copy with ``auto`` and ``null`` resolved; kernel backends are chosen later."""
    config = run.with_steps(run.with_dry_batch(config))
    sections = {f.name: copy.copy(getattr(config, f.name)) for f in dataclasses.fields(config)}
    config = RunConfig(**sections)
    if config.run.device is DeviceChoice.auto:
        config.run.device = DeviceChoice.cuda if torch.cuda.is_available() else DeviceChoice.cpu
    if config.precision.compute is ComputeDtype.auto:
        on_gpu = config.run.device is DeviceChoice.cuda or config.launch.fake_world is not None
        config.precision.compute = ComputeDtype.bf16 if on_gpu else ComputeDtype.fp32
    config.train.tokens = None  # the steps stand for them
    if config.data.seq_len is None:
        config.data.seq_len = parallel.seq_len_of(config)
    config.data.cache_dir = str(cache_root(config.data.cache_dir))
    config.compile.cache_dir = str(compiled_folder(config.compile.cache_dir))
    if config.launch.nproc == "auto":
        on_gpu = config.run.device is DeviceChoice.cuda
        gpus = config.launch.gpus_per_job or max(torch.cuda.device_count(), 1)
        config.launch.nproc = gpus if on_gpu else 1
    experts = experts_of(config)
    config.moe.dispatcher, config.moe.balance = experts.dispatcher, experts.balance
    config.parallel.cp_method = parallel.context_method(config.parallel, config.model)
    if config.moe.sync_free_stage == "auto":
        config.moe.sync_free_stage = lowest_stage(config.graph.scope) if has_experts(config.model) else 0
    return config
