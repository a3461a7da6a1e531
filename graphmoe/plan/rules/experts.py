"""Rules of how routed experts are spread over ranks, and of how far their layers wait for the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from graphmoe.config.schema import (
    DeviceChoice,
    DispatcherChoice,
    DpShard,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PassesConfig,
    RunConfig,
    Transport,
)
from graphmoe.plan.receive_budget import WORST_CASE
from graphmoe.plan.rules.values import divisors
from graphmoe.segments import (
    CAPTURABLE,
    DISPATCHER_STAGES,
    FULL_ITERATION,
    SYNC_FREE_STAGES,
    lowest_stage,
    segments_of,
    waiting_segments,
)


def has_experts(model: ModelConfig) -> bool:
    """Whether any layer has routed experts."""
    return model.mtp_depth > 0 or model.num_layers > model.num_dense_layers


def dispatcher_of(moe: MoEConfig, parallel: ParallelConfig) -> DispatcherChoice:
    """The dispatcher that a configuration asks for; never auto."""
    if moe.dispatcher is not DispatcherChoice.auto:
        return moe.dispatcher
    alone = parallel.ep * parallel.etp == 1
    return DispatcherChoice.local if alone else DispatcherChoice.alltoall


def transport_of(config: RunConfig, *, on_nvidia: bool) -> Transport | None:
    """Who moves the rows of symm, never auto; None with other dispatchers.

    auto takes copy engines where products run beside transfers and copies take no multiprocessor from them.
    """
    if dispatcher_of(config.moe, config.parallel) is not DispatcherChoice.symm:
        return None
    if config.moe.transport is not Transport.auto:
        return config.moe.transport
    return Transport.copy_engine if config.pipeline.ep_overlap and on_nvidia else Transport.pull


def transport_of_run(config: RunConfig) -> Transport | None:
    """``transport_of`` on the devices of the run itself, whose configuration is resolved.

    A dry run is of GPUs of the vendor that this torch is built for (AMD's for ROCm, else NVIDIA's), whatever
    this machine has.
    """
    on_gpu = config.run.device is DeviceChoice.cuda or config.launch.fake_world is not None
    return transport_of(config, on_nvidia=on_gpu and torch.version.hip is None)


def reads_peers(moe: MoEConfig, parallel: ParallelConfig) -> bool:
    """Whether ranks reach the memory of each other's GPUs, so that each must see those of the others."""
    return dispatcher_of(moe, parallel) not in (DispatcherChoice.local, DispatcherChoice.alltoall)


def dispatch_rules(moe: MoEConfig, parallel: ParallelConfig, model: ModelConfig) -> Iterator[str]:
    """Violated rules of ``moe.dispatcher``, ``parallel.ep`` and ``parallel.etp``."""
    for key, ranks, whole, size in (
        ("ep", parallel.ep, "num_experts", model.num_experts),
        ("etp", parallel.etp, "expert_ffn_size", model.expert_ffn_size),
    ):
        if ranks < 1 or size < 1:
            continue  # of these other rules speak
        if ranks > 1 and not has_experts(model):
            yield f"parallel.{key}={ranks} shares out experts, and the model has none; use parallel.{key}=1"
        elif size % ranks:
            yield (
                f"model.{whole}={size} cannot be split over parallel.{key}={ranks}; use a divisor of {size}: "
                f"{', '.join(map(str, divisors(size)))}"
            )
    if moe.dispatcher is DispatcherChoice.local and parallel.ep * parallel.etp > 1:
        yield (
            f"moe.dispatcher=local leaves tokens on their rank, which holds 1 / {parallel.ep} of the experts "
            f"and 1 / {parallel.etp} of each (parallel.ep, parallel.etp); use moe.dispatcher=auto or alltoall"
        )
    if moe.dispatcher is DispatcherChoice.symm and parallel.ep * parallel.etp == 1:
        yield (
            "moe.dispatcher=symm exchanges between ranks that share the experts, and parallel.ep * "
            "parallel.etp is 1; use moe.dispatcher=auto or local"
        )
    budget = moe.receive_budget
    is_number = type(budget) in (int, float) and 0 < budget < math.inf
    if budget != WORST_CASE and not is_number:
        yield f"moe.receive_budget={budget!r} must be a number greater than 0, or {WORST_CASE}"


def one_node_rules(moe: MoEConfig, parallel: ParallelConfig, nproc: object, nodes: object) -> Iterator[str]:
    """Violated rules of dispatchers that reach the GPUs of one node only, where ranks are counted.

    Ranks that share the experts are neighbours, so they are of one node if those of a node are whole groups.
    """
    sharing = parallel.ep * parallel.etp
    if moe.dispatcher is not DispatcherChoice.symm or type(nproc) is not int or type(nodes) is not int:
        return
    if nodes > 1 and sharing > 0 and nproc % sharing:
        yield (
            f"moe.dispatcher=symm reads the memory of other GPUs of one node, and a node's {nproc} ranks are "
            f"no multiple of parallel.ep * parallel.etp = {sharing}; share the experts out to a divisor of "
            f"{nproc}, or use moe.dispatcher=alltoall"
        )


def splits_backward(passes: PassesConfig) -> bool:
    """Whether the pass runs that makes weight gradients apart from those of inputs."""
    enabled = passes.enabled is None or "split_backward" in passes.enabled
    return enabled and "split_backward" not in passes.disabled


def overlap_rules(config: RunConfig) -> Iterator[str]:
    """Violated rules of ``pipeline.ep_overlap``."""
    if not config.pipeline.ep_overlap:
        return
    choice, scope = dispatcher_of(config.moe, config.parallel), config.graph.scope
    if not reads_peers(config.moe, config.parallel):
        instead = (
            "moe.dispatcher=symm" if config.parallel.ep * config.parallel.etp > 1 else "parallel.ep=2 or more"
        )
        yield (
            f"pipeline.ep_overlap=true hides transfers that the host does not wait for, and "
            f"moe.dispatcher={choice.value} has none; use {instead}"
        )
    if not config.compile.enabled:
        yield "pipeline.ep_overlap=true runs compiled units; use compile.enabled=true"
    if not splits_backward(config.passes):
        yield (
            "pipeline.ep_overlap=true makes weight gradients apart from those of inputs; let the pass "
            "split_backward run (passes.enabled, passes.disabled)"
        )
    if config.parallel.dp_shard is DpShard.fsdp2:
        yield (
            "pipeline.ep_overlap=true runs two layers at a time, and parallel.dp_shard=fsdp2 gathers one; "
            "use parallel.dp_shard=zero1"
        )
    if scope not in ("none", FULL_ITERATION):
        yield (
            f"pipeline.ep_overlap=true runs other units between those that graph.scope={scope} captures; use "
            f"graph.scope={FULL_ITERATION} or none"
        )


def stage_rules(
    moe: MoEConfig, parallel: ParallelConfig, scope: object, model: ModelConfig, compiles: bool
) -> Iterator[str]:
    """Violated rules of ``moe.sync_free_stage``, with what ``graph.scope`` captures."""
    stage = moe.sync_free_stage
    if stage != "auto" and (type(stage) is not int or stage not in SYNC_FREE_STAGES):
        yield f"moe.sync_free_stage={stage!r} must be auto, 0, 1, 2 or 3"  # True and 1.0 equal 1
    elif isinstance(scope, str | list) and has_experts(model):
        dispatcher = dispatcher_of(moe, parallel).value
        highest = DISPATCHER_STAGES[dispatcher]
        why = f"moe.dispatcher={dispatcher} lets the host count the rows that arrive"
        alone = parallel.ep * parallel.etp == 1
        instead = f"moe.dispatcher={'local' if alone else 'symm'}"
        waiting = waiting_segments(scope, highest)
        if waiting:
            kept = _without(waiting, scope, compiles)
            yield (
                f"graph.scope={scope} captures {', '.join(waiting)}, and {why}; use graph.scope={kept}, or "
                f"{instead}"
            )
        elif stage != "auto" and stage > highest:
            yield (
                f"moe.sync_free_stage={stage} promises that dispatch does not wait for the host, and {why}; "
                f"use moe.sync_free_stage={highest} or auto, or {instead}"
            )
        elif stage != "auto":
            yield from _too_low(stage, scope, compiles)


def _too_low(stage: int, scope: str | list[str], compiles: bool) -> Iterator[str]:
    waiting = waiting_segments(scope, stage)
    if waiting:
        yield (
            f"graph.scope={scope} captures {', '.join(waiting)}, which may wait for the host at "
            f"moe.sync_free_stage={stage}; use moe.sync_free_stage={lowest_stage(scope)} or auto, or "
            f"graph.scope={_without(waiting, scope, compiles)}"
        )


def _without(waiting: Sequence[str], scope: str | list[str], compiles: bool) -> str:
    """The scope without some of its segments."""
    kept = [name for name in (segments_of(scope) or CAPTURABLE) if name not in waiting and compiles]
    return f"[{','.join(kept)}]" if kept else "none"
