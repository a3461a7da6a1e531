"""Time of a step: segments of every stage, the pipeline's simulation, gradients and the update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from graphmoe.config.schema import DispatcherChoice, RunConfig
from graphmoe.model.sizes import flops_per_token, rank_weights
from graphmoe.plan.costs.hardware import GPUS_PER_NODE
from graphmoe.plan.costs.rates import Speeds
from graphmoe.plan.costs.segment_times import (
    SegmentTime,
    embed_time,
    head_time,
    join_time,
    sum_of,
    times_of_layers,
)
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.layout import Axis
from graphmoe.plan.pipeline.layouts import StagePieces, all_pieces
from graphmoe.plan.pipeline.plan import PipelinePlan, num_micro_batches
from graphmoe.plan.pipeline.simulate import Costs, simulate
from graphmoe.plan.recompute import Recompute
from graphmoe.project.memory import PlaceMemory
from graphmoe.segments import FULL_ITERATION, segments_of

UPDATE_BYTES = 34
"""Bytes that the compiled update moves for each parameter that a rank owns (docs/architecture.md)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step; those by segment are of one micro-batch on the slowest place along pp."""

    step_s: float
    bubble: float
    """Share of the time of the micro-batches in which a rank of a pipeline waits."""
    forward_s: dict[str, float]
    backward_s: dict[str, float]
    exchange_s: float
    """Part of forward and backward in which the rank waits for others, over all micro-batches of the step."""
    gradients_s: float
    """Exchange of gradients and weights that no computation covers."""
    update_s: float
    host_s: float
    """Time of the host to start all work that is not in one graph; a step is not shorter."""
    tokens_per_s_per_gpu: float
    mfu: float


def step_time(
    config: RunConfig,
    sizes: Sizes,
    places: list[PlaceMemory],
    speeds: Speeds,
    plan: PipelinePlan | None,
    bubble: float | None = None,
) -> StepTime:
    """Project a step. ``bubble`` takes the place of the simulated one.

    Each micro-batch beyond those of the plan's table adds the time of the slowest place.
    """
    layout = sizes.layout
    count = num_micro_batches(config, layout)
    model = config.model
    speeds = replace(speeds, adding=(count - 1) / count)
    stages = plan.stages if plan else (all_pieces(model.num_layers, model.mtp_depth),)
    times = [stage_times(config, sizes, speeds, pieces) for pieces in stages]
    totals = [sum_of("", of_stage) for of_stage in times]
    busy = [
        sum(totals[number].total for number in (plan.placement.stages_of(place) if plan else (0,)))
        for place in range(layout.pp)
    ]
    if plan is None:
        makespan, waits = count * busy[0], 0.0
    else:
        message = message_seconds(sizes, speeds)
        forward, inputs, weights = (
            tuple(getattr(total, kind) for total in totals) for kind in ("forward", "inputs", "weights")
        )
        timeline = simulate(plan.table, Costs(forward, inputs, weights, message))
        makespan = timeline.makespan + (count - plan.table.num_micro_batches) * max(busy)
        waits = 1 - count * sum(busy) / (makespan * layout.pp)
    if bubble is not None:
        makespan, waits = count * sum(busy) / len(busy) / (1 - bubble), bubble
    slowest = max(range(layout.pp), key=busy.__getitem__)
    own = plan.placement.stages_of(slowest) if plan else (0,)
    owned = [plan.own_stages(place).values() if plan else stages for place in range(layout.pp)]
    gradients = max(reduction_seconds(sizes, speeds, of_place) for of_place in owned)
    hidden = min(gradients * speeds.rates.hidden_gradients, makespan / count)
    gradients -= hidden
    update = update_seconds(max(place.state["moments"] for place in places), speeds)
    host = count * max(
        sum(
            host_seconds(config, times[number], speeds)
            for number in (plan.placement.stages_of(p) if plan else (0,))
        )
        for p in range(layout.pp)
    )
    step = max(makespan + gradients + update, host)
    tokens = config.train.global_batch_size * sizes.seq_len
    rate = tokens / step / layout.size("world")
    return StepTime(
        step,
        waits,
        *_by_segment([time for number in own for time in times[number]]),
        count * sum(totals[number].exchange for number in own),
        gradients,
        update,
        host,
        rate,
        rate * flops_per_token(model, sizes.seq_len).total / (speeds.card.tflops * 1e12),
    )


def stage_times(config: RunConfig, sizes: Sizes, speeds: Speeds, pieces: StagePieces) -> list[SegmentTime]:
    """Return the times of a stage's segments."""
    model, found = config.model, list[SegmentTime]()
    hidden = speeds.rates.hidden_exchange if config.pipeline.ep_overlap else 0.0
    counts = config.moe.dispatcher is DispatcherChoice.alltoall
    if pieces.embed:
        found.append(embed_time(sizes, speeds))
    recompute = Recompute.of(config.recompute)
    of_mtp = [model.num_layers + k for k in pieces.mtp]
    indices = (*pieces.layers, *of_mtp)
    for times in times_of_layers(sizes, speeds, recompute, indices, host_counts=counts, hidden=hidden):
        found += times
    found += [join_time(sizes, speeds)] * len(of_mtp)
    if pieces.loss:
        found.append(head_time(sizes, speeds, model.mtp_depth + 1))
    return found


def _by_segment(times: list[SegmentTime]) -> tuple[dict[str, float], dict[str, float]]:
    """Sum forward and backward by segment."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for time in times:
        forward[time.name] = forward.get(time.name, 0) + time.forward
        backward[time.name] = backward.get(time.name, 0) + time.inputs + time.weights
    return forward, backward


def message_seconds(sizes: Sizes, speeds: Speeds) -> float:
    """Seconds from the end of an action to the arrival of its state at the next stage, by the slowest hop."""
    return speeds.pass_on(sizes.state, in_node=sizes.layout.size("world") <= GPUS_PER_NODE)


def reduction_seconds(sizes: Sizes, speeds: Speeds, stages: Iterable[StagePieces]) -> float:
    """Seconds to sum the gradients of a place along pp and to gather its weights.

    The last backward and the next forward go on meanwhile.
    """
    layout = sizes.layout
    strides: dict[Axis, int] = {"edp": layout.ep * layout.etp, "dp_cp": layout.tp, "embed": layout.tp}
    num_bytes: dict[Axis, int] = {}
    for weight in rank_weights(sizes.model, layout, stages):
        axis = weight.summed_over
        num_bytes[axis] = num_bytes.get(axis, 0) + (4 + sizes.element_bytes) * weight.size
    return sum(
        speeds.gather(size, layout.size(axis), strides.get(axis, 1)) for axis, size in num_bytes.items()
    )


def update_seconds(moments_bytes: float, speeds: Speeds) -> float:
    """Seconds of the update on the rank with most moments, which are 8 bytes for each parameter."""
    return moments_bytes / 8 * UPDATE_BYTES / speeds.hbm


def host_seconds(config: RunConfig, times: list[SegmentTime], speeds: Speeds) -> float:
    """Seconds in which the host starts the segments of a stage for one micro-batch.

    Captured neighbours in a layer are one graph, which is started once.
    """
    scope = config.graph.scope
    if scope == FULL_ITERATION:
        return 0.0
    captured = segments_of(scope)
    names = [time.name for time in times]
    follows = [before in captured and name in captured and name != "attn" for before, name in pairwise(names)]
    starts = len(names) - sum(follows)
    return 2 * starts * speeds.rates.host_us * 1e-6
