"""Dry run of one rank's step on tensors without data: ``launch.fake_world``, docs/projection.md.

A pipeline rank runs its stages by the schedule's table. Process groups have torch's "fake" backend. Tensors
are fake CPU tensors, since autograd needs a GPU build for the backward of fake GPU tensors.
"""

import functools
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from graphmoe.config.progress import working
from graphmoe.config.schema import AttentionBackend, DeltaNetBackend, RunConfig
from graphmoe.optim.rule import StepScalars
from graphmoe.optim.storage import Region, update_stored
from graphmoe.optim.zero1 import Optimizer
from graphmoe.plan.layout import Axis
from graphmoe.plan.pipeline.plan import PipelinePlan
from graphmoe.plan.pipeline.schedules import make_table
from graphmoe.plan.pipeline.transfers import moments_of
from graphmoe.plan.plan import Plan, plan_of
from graphmoe.plan.rules.unused import without_effect
from graphmoe.runtime.dispatch import shared_bytes
from graphmoe.training.dry_run.collectives import CollectiveLog
from graphmoe.training.dry_run.model import GraphSegments, fake_build, fake_executor, fake_mesh
from graphmoe.training.dry_run.watch import MemoryLog, StepWatch, WatchedChannels, WatchedSteps
from graphmoe.training.memory import memory_of_places
from graphmoe.training.micro_batches import Add, Pipelined, micro_batches_of
from graphmoe.training.step import TrainStep

log = logging.getLogger(__name__)

ROUNDS = (2, 3, 4, 6, 8, 16)  # micro-batches per pipeline rank that are tried for a shorter step
NOT_COUNTED = (
    "gaps and rounding of the allocator",
    "buffers of NCCL or RCCL, and of dispatchers other than symm",
    "the context of the device and the code of kernels",
    "workspaces of matrix products and attention",
    "private pools of captured graphs",
)


def dry_run(config: RunConfig) -> dict[str, Any]:
    """Run one rank's step; return its collectives and memory as plain values.

    ``config`` is resolved. *Raises* ConfigError for a layout that does not fit the ranks, WrongGroup for a
    process group that differs from the layout's.
    """
    launch, started = config.launch, time.perf_counter()
    assert launch.fake_world is not None
    _say_what_is_left_out(config)
    model = replace(
        config.model, attention_backend=AttentionBackend.auto, delta_net_backend=DeltaNetBackend.auto
    )
    plan = plan_of(replace(config, model=model), launch.fake_world)
    for line in without_effect(plan, launch.fake_world):
        log.warning(line)
    layout, pipeline = plan.layout, plan.pipeline
    projected = []
    if pipeline:
        padded = replace(model, attention_backend=AttentionBackend.padded_flash)  # the dry run's backend
        as_run = replace(plan, config=replace(plan.config, model=padded), model=padded)
        places = memory_of_places(as_run, on_nvidia=torch.version.hip is None)
        projected = [round(place.total - place.buffers["communication"]) for place in places]
    rank = launch.fake_rank
    if rank is None:
        rank = projected.index(max(projected)) * layout.size("stage") if projected else 0
    place = layout.index("pp", rank)
    run = plan if pipeline is None else shortened(plan, pipeline, place)
    collectives, memory = _step(run, rank)
    num_run = run.pipeline.table.num_micro_batches if run.pipeline else 1
    alike = Fraction(plan.num_micro_batches, num_run)
    card = round(launch.fake_memory_gb * 2**30)
    axes: tuple[Axis, ...] = ("dp", "cp", "tp", "pp", "edp", "ep", "etp")
    return {
        "model": config.model.name,
        "num_experts": config.model.num_experts,
        "world": launch.fake_world,
        "rank": rank,
        "layout": {axis: layout.size(axis) for axis in axes},
        "seq_len": config.data.seq_len,
        "micro_batch_size": config.train.micro_batch_size,
        "global_batch_size": config.train.global_batch_size,
        "micro_batches": plan.num_micro_batches,
        "micro_batches_run": num_run,
        "recompute_all": config.recompute.all,
        "shards_weights": plan.weight_places > 0,
        "compute": config.precision.compute.value,
        "fp8": config.precision.fp8.value,
        "groups": {axis: list(layout.group(axis, rank)) for axis in axes},
        "pipeline": pipeline
        and {
            "schedule": pipeline.table.schedule,
            "layout": pipeline.layout,
            "pp_rank": place,
            "stages": [*pipeline.placement.stages_of(place)],
            "pieces": pipeline.pieces_of_place(place),
            "projected_bytes_by_pp_rank": projected,
        },
        "collectives": collectives.to_json({"forward": alike, "backward": alike}),
        "memory": {
            "state_bytes": {kind: size for kind, size in memory.held.items() if size},
            "host_bytes": memory.host_bytes,
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


def shortened(plan: Plan, pipeline: PipelinePlan, place: int) -> Plan:
    """Return the plan with the fewest micro-batches and equal activation peaks at pipeline rank ``place``.

    Returns the plan itself if it has few micro-batches or no shorter table is equal.
    """
    asked, table, pp = plan.config.pipeline, pipeline.table, plan.layout.pp
    counts = [each * pp + plan.num_micro_batches % pp for each in ROUNDS]
    if counts[0] >= plan.num_micro_batches:
        return plan
    moments = moments_of(table, place)
    for count in itertools.takewhile(plan.num_micro_batches.__gt__, counts):
        sizes = pp, count, asked.virtual_stages
        short = make_table(asked.schedule, *sizes, overlap=asked.ep_overlap, costs=pipeline.costs)
        if moments_of(short, place) == moments:
            return replace(plan, pipeline=replace(pipeline, table=short))
    return plan


def _step(plan: Plan, rank: int) -> tuple[CollectiveLog, MemoryLog]:
    memory = MemoryLog()
    with fake_mesh(plan, rank) as mesh:
        collectives = CollectiveLog(mesh)
        watch = StepWatch(collectives, memory)
        model, optimizer = fake_build(plan, mesh)
        if plan.compile.enabled:
            optimizer.update_stored = _update_compiled
        sizes = plan.sizes(on_nvidia=torch.version.hip is None)
        shared = torch.empty(shared_bytes(sizes, plan.moe, plan.graph), dtype=torch.uint8)
        memory.hold("shared", [shared])
        segments = fake_executor(plan, watch, optimizer.gradient_of, optimizer.weight_forms)
        micro_batches = micro_batches_of(
            plan,
            model,
            optimizer.executor(segments),
            mesh,
            deferring=segments.deferring if isinstance(segments, GraphSegments) else None,
            open_channels=functools.partial(WatchedChannels, watch),
        )
        run_watched(TrainStep(plan, optimizer, micro_batches, mesh), watch, memory)
    return collectives, memory


def run_watched(step: TrainStep, watch: StepWatch, memory: MemoryLog) -> None:
    """Run the step on zeros: one micro-batch, or all of a pipeline's table."""
    config, optimizer, micro_batches = step.plan.config, step.optimizer, step.micro_batches
    assert isinstance(optimizer, Optimizer) and config.data.seq_len is not None
    on_host = ("main_weights", "moments") if config.optim.offload else ()
    state = _state(step.model, optimizer)
    for kind in [kind for kind in state if kind not in on_host]:
        memory.hold(kind, state[kind])
    if on_host:
        memory.hold("slots", optimizer.slots)
        memory.leave([tensor for kind in on_host for tensor in state[kind]])
    table = step.plan.pipeline.table if step.plan.pipeline else None
    count, train = step.plan.num_micro_batches if table else 1, micro_batches.train

    def watched(batches: Iterable[Tensor], add: Add, weights: Tensor | None = None) -> None:
        watch.phase = "forward"
        train(batches, add, weights)
        watch.phase = "update"

    micro_batches.train = watched  # type: ignore[method-assign]
    shape = config.train.micro_batch_size, config.data.seq_len + 1
    with working("the step") as say, watch:
        if table and isinstance(micro_batches, Pipelined):
            num_moves = len(table.ranks[step.mesh.index("pp")])
            micro_batches.pipeline.recorder = WatchedSteps(watch, num_moves, say)
        step(torch.zeros(shape, dtype=torch.int64) for _ in range(count))


def _update_compiled(region: Region, scalars: StepScalars, *, eager: bool) -> None:
    if region.grad.dim() == 3:  # matrices; an elementwise update is one kernel, without memory of its own
        update_stored(region, scalars, eager=eager)


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Sequence[Tensor]]:
    families = optimizer.families
    return {
        "weights": [*(t for f in families for t in (*f.wholes, f.weight_shard)), *optimizer.frozen.values()],
        "main_weights": [f.main for f in families],
        "gradients": [
            *(t for f in families for t in (*f.gradient_views().values(), f.grad_shard)),
            *(f.staging.memory for f in families if f.staging),
        ],
        "moments": [tensor for f in families for of in (f.moments, f.rows) for tensor in of.values()],
        "buffers": [*model.buffers()],
    }


def _say_what_is_left_out(config: RunConfig) -> None:
    if config.compile.enabled:
        log.info("dry run: segments are traced, rewritten and cut as in a compiled run, but not compiled")
    if config.run.auto:
        log.info("auto: %s", ", ".join(config.run.auto))
    automatic = {note.partition("=")[0] for note in config.run.auto}
    if config.graph.scope != "none" and "graph.scope" not in automatic:
        log.warning("graph.scope=%s has no effect on a dry run: nothing is captured", config.graph.scope)
    overlap_is_asked = config.pipeline.ep_overlap and "pipeline.ep_overlap" not in automatic
    if overlap_is_asked and config.parallel.pp == 1:
        log.warning("pipeline.ep_overlap=true overlaps nothing in a dry run, which runs one micro-batch")
    elif overlap_is_asked:
        log.info(
            "dry run: the forward and backward that pipeline.ep_overlap=true overlaps run one after the other"
        )
    for key in ("attention_backend", "delta_net_backend"):
        if (name := getattr(config.model, key)) != "auto":
            log.warning("model.%s=%s has no effect on a dry run, which uses auto", key, name)
