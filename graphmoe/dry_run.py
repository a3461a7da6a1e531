"""One step of one rank of a layout on tensors without data: ``launch.fake_world``, docs/dry_run.md.

Nothing is computed and nothing is sent. The process groups are those of the layout on torch's backend
"fake"; weights, gradients, optimizer state and activations are fake tensors, on the CPU: autograd cannot run
a backward of fake GPU tensors where torch was built without a GPU. Operations of the project have the same
results on both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphmoe.config import AttentionBackend, RunConfig
from graphmoe.layout import Layout
from graphmoe.micro_batches import OneAfterTheOther
from graphmoe.model import build_model
from graphmoe.model.moe import Experts
from graphmoe.model.transformer import Transformer
from graphmoe.ops.collectives import use_groups
from graphmoe.optim import Optimizer
from graphmoe.optimizers import DTYPES
from graphmoe.receive_budget import routed_tokens
from graphmoe.segments import Executor, run_segments
from graphmoe.torch_compat import FakeTensorMode, fake_process_group, tensors_of
from graphmoe.train_step import TrainStep
from passes import PassRunner, select_passes
from runtime.arriving_weights import ArrivingWeights
from runtime.dispatch import make_dispatcher
from runtime.dispatch.alltoall import AllToAll
from runtime.dispatch.balanced import BalancedAllToAll
from runtime.dry.collectives import CollectiveLog
from runtime.dry.memory import MemoryLog
from runtime.dry.segments import GraphSegments, Running, ToldSegments
from runtime.dry.watch import StepWatch
from runtime.mesh import Mesh
from runtime.recompute import Recompute, RecomputedSegments

log = logging.getLogger(__name__)

NOT_COUNTED = (
    "gaps and rounding of the allocator",
    "buffers of NCCL or RCCL",
    "the context of the device and the code of kernels",
    "workspaces of matrix products and attention",
    "private pools of captured graphs",
)


def dry_run(config: RunConfig) -> dict[str, Any]:
    """Run the step of ``launch.fake_rank``; what it would send and hold, as plain values.

    ``config`` is resolved. *Raises* ConfigError for a layout that does not fit the ranks, WrongGroup where
    a collective is not among the ranks that the layout says.
    """
    launch = config.launch
    assert launch.fake_world is not None
    _say_what_is_left_out(config)
    started = time.perf_counter()
    layout = Layout.of(config.parallel, launch.fake_world)
    with fake_process_group(launch.fake_world, launch.fake_rank):
        mesh = Mesh(layout)
        use_groups(mesh)
        try:
            collectives, memory, micro_batches = _step(config, mesh)
        finally:
            use_groups(None)
    times = {"forward": micro_batches, "backward": micro_batches}
    card = round(launch.fake_memory_gb * 2**30)
    return {
        "model": config.model.name,
        "world": launch.fake_world,
        "rank": launch.fake_rank,
        "layout": {axis: layout.size(axis) for axis in ("dp", "cp", "tp", "pp", "edp", "ep", "etp")},
        "seq_len": config.data.seq_len,
        "micro_batch_size": config.train.micro_batch_size,
        "global_batch_size": config.train.global_batch_size,
        "micro_batches": micro_batches,
        "recompute_all": config.recompute.all,
        "compute": config.precision.compute.value,
        "groups": {
            axis: list(layout.group(axis, launch.fake_rank))
            for axis in ("dp", "cp", "tp", "edp", "ep", "etp")
        },
        "collectives": collectives.to_json(times),
        "memory": {
            "state_bytes": {kind: size for kind, size in memory.held.items() if size},
            "peak_bytes": memory.peak_bytes,
            "peak_in": memory.peak_phase,
            "at_peak_bytes": {kind: size for kind, size in memory.peak.items() if size},
            "activation_bytes_by_segment": {
                name or "other": size for name, size in memory.peak_by_segment.items() if size
            },
            "peak_bytes_by_phase": memory.peaks,
            "not_counted": list(NOT_COUNTED),
        },
        "card_bytes": card,
        "fits": memory.peak_bytes <= card,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _step(config: RunConfig, mesh: Mesh) -> tuple[CollectiveLog, MemoryLog, int]:
    """Forward and backward of one micro-batch, and the update; and how many micro-batches a step has."""
    collectives, memory, running = CollectiveLog(mesh), MemoryLog(), Running()
    # A fallback would run what has no fake on zeros, as large as what they stand for.
    with FakeTensorMode(allow_fallback_kernels=False):
        model = fake_model(config, mesh)
        optimizer = Optimizer(model, config.optim, config.train, mesh)
        execute = ArrivingWeights(_executor(config, optimizer, running), optimizer.wait_for)
        num_global = config.train.global_batch_size // config.train.micro_batch_size
        micro_batches = OneAfterTheOther(model, execute, num_global)
        step = TrainStep(config, model, optimizer, micro_batches, mesh)
        run_watched(step, StepWatch(collectives, memory, running), memory)
    return collectives, memory, step.num_micro_batches


def run_watched(step: TrainStep, watch: StepWatch, memory: MemoryLog) -> None:
    """The step with one micro-batch, of zeros."""
    assert isinstance(step.optimizer, Optimizer)
    for kind, tensors in _state(step.model, step.optimizer).items():
        memory.hold(kind, tensors)
    with watch:
        step(_one_batch(step.config, watch))


def _one_batch(config: RunConfig, watch: StepWatch) -> Iterator[Tensor]:
    """A micro-batch; tells the watch when the step asks for it, and when it asks for another."""
    assert config.data.seq_len is not None
    watch.phase = "forward"
    yield torch.zeros(config.train.micro_batch_size, config.data.seq_len + 1, dtype=torch.int64)
    watch.phase = "update"


def fake_model(config: RunConfig, mesh: Mesh) -> Transformer:
    """What the rank of a mesh has of the model, without data; called inside a FakeTensorMode.

    Its dispatcher assumes balanced experts where the host would count rows.
    """
    dispatcher = make_dispatcher(config, mesh)
    if isinstance(dispatcher, AllToAll):
        tokens = routed_tokens(config, mesh.layout)
        dispatcher = BalancedAllToAll(mesh, config.model.num_experts, tokens, config.model.top_k)
    model = build_model(
        replace(config.model, attention_backend=AttentionBackend.auto),
        device="meta",
        dtype=DTYPES[config.precision.compute],
        seed=None,
        execution=config.moe,
        layout=mesh.layout,
        rank=mesh.rank,
        dispatcher=dispatcher,
    )
    places = [*tensors_of(model).values()]
    fakes = {meta: _fake(meta) for meta in (holder[key] for holder, key in places)}
    for holder, key in places:
        holder[key] = fakes[holder[key]]
    if isinstance(dispatcher, BalancedAllToAll):
        for module in model.modules():
            if isinstance(module, Experts):
                module.assumed_rows = dispatcher.expert_rows
    return model


def _fake(meta: Tensor) -> Tensor:
    """What stands for a parameter or buffer on the meta device."""
    fake = torch.empty(meta.shape, dtype=meta.dtype)
    if isinstance(meta, nn.Parameter):
        fake = nn.Parameter(fake)
        if hasattr(meta, "parallel"):
            fake.parallel = meta.parallel  # type: ignore[attr-defined]
    return fake


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Sequence[Tensor]]:
    """What is there all the time. A shard of one rank alone is the whole buffer, which counts once."""
    families = optimizer.families
    return {
        "weights": [tensor for f in families for tensor in (f.weight, f.weight_shard)],
        "main_weights": [f.main for f in families],
        "gradients": [tensor for f in families for tensor in (f.grad, f.grad_shard)],
        "moments": [tensor for f in families for tensor in (f.exp_avg, f.exp_avg_sq)],
        "buffers": [*model.buffers()],
    }


def _executor(config: RunConfig, optimizer: Optimizer, running: Running) -> Executor:
    """What keeps for the backward what the run's own executor keeps."""
    recompute = Recompute.of(config.recompute)
    if not config.compile.enabled:
        return ToldSegments(RecomputedSegments(recompute) if recompute else run_segments, running)

    def runner(trains: bool) -> PassRunner:
        knobs: dict[str, dict[str, Any]] = {
            "fuse_loss": {"needs_grad": trains},
            "fuse_experts": {"backend": "triton"},
        }
        return PassRunner(select_passes(config.passes, knobs), None)

    return GraphSegments(running, runner, optimizer.gradient_of, recompute=recompute)


def _say_what_is_left_out(config: RunConfig) -> None:
    """Log what of the configuration makes no difference to a dry run."""
    if config.compile.enabled:
        log.info("dry run: segments are traced, rewritten and cut as a compiled run does, and not compiled")
    if config.graph.scope != "none":
        log.warning("graph.scope=%s has no effect on a dry run: nothing is captured", config.graph.scope)
    if config.pipeline.ep_overlap:
        log.warning("pipeline.ep_overlap=true has no effect on a dry run, which runs one micro-batch")
    if config.model.attention_backend is not AttentionBackend.auto:
        name = config.model.attention_backend.value
        log.warning("model.attention_backend=%s has no effect on a dry run, which takes auto", name)
