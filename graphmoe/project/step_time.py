"""Time of a step: segments of every stage, the pipeline's simulation, gradients and the update."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from graphmoe.config.schema import DpShard, RunConfig
from graphmoe.model.sizes import flops_per_token, rank_weights, reduced_elements
from graphmoe.optim import rule_of
from graphmoe.plan.costs.rates import Speeds
from graphmoe.plan.costs.segment_times import SegmentTime, stage_times, sum_of
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.layout import Axis, Layout, layout_of
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.pipeline.plan import SIMULATED, PipelinePlan, costs_of, num_micro_batches
from graphmoe.plan.pipeline.schedules import make_table, schedule_of
from graphmoe.plan.pipeline.simulate import Costs, makespan_of
from graphmoe.plan.plan import Plan, plan_of
from graphmoe.segments import FULL_ITERATION, segments_of
from graphmoe.training.floors import update_seconds
from graphmoe.training.memory import PlaceMemory


def step_time(
    plan: Plan, sizes: Sizes, places: list[PlaceMemory], speeds: Speeds, bubble: float | None = None
) -> dict[str, Any]:
    """Return projected seconds of a step and its parts, and throughput, as fields of the document.

    Times by segment: one micro-batch on the slowest position along pp. Exchange: waits for other ranks, over
    all micro-batches. Exposed gradients: not covered by computation. A step is no shorter than the host needs
    to launch it. ``bubble``, the share of micro-batch time that a rank waits, replaces the simulated one.
    """
    config, layout, count = plan.config, plan.layout, plan.num_micro_batches
    speeds = replace(speeds, adding=(count - 1) / count)
    own = [*map(plan.stage_numbers, range(layout.pp))]
    times = [stage_times(config, sizes, speeds, pieces) for pieces in plan.stages]
    totals = [sum_of("", of_stage) for of_stage in times]
    busy = [sum(totals[number].total for number in numbers) for numbers in own]
    if plan.pipeline is None:
        makespan, waits = count * busy[0], 0.0
    else:
        totals = [sum_of("", [time, late_start(config, speeds)]) for time in totals]
        makespan = _makespan(plan, plan.pipeline, costs_of(totals, message_seconds(sizes, speeds)))
        waits = 1 - count * sum(busy) / (makespan * layout.pp)
    if bubble is not None:
        makespan, waits = count * sum(busy) / len(busy) / (1 - bubble), bubble
    owned = [plan.own_stages(place) for place in range(layout.pp)]
    of_places = [reduction_seconds(config, sizes, speeds, each) for each in owned]
    gradients = exposed_seconds(of_places, count, makespan, speeds)
    update = max(update_seconds(config.optim, place.owned, speeds) for place in places)
    of_host = [host_seconds(config, of_stage, speeds) for of_stage in times]
    host = count * max(sum(of_host[number] for number in numbers) for numbers in own)
    makespan = at_the_power_limit(makespan, count * max(busy), gradients + update, speeds)
    step = max(makespan + gradients + update, host)
    rate = config.train.global_batch_size * sizes.seq_len / step / layout.size("world")
    slowest = own[max(range(layout.pp), key=busy.__getitem__)]
    forward_s, backward_s = defaultdict[str, float](float), defaultdict[str, float](float)
    for time in (time for number in slowest for time in times[number]):
        forward_s[time.name] += time.forward
        backward_s[time.name] += time.inputs + time.weights
    return {
        "step_time_s": step,
        "bubble": waits,
        "tokens_per_s_per_gpu": rate,
        "mfu": rate * flops_per_token(config.model, sizes.seq_len) / (speeds.card.tflops * 1e12),
        "time_s": {
            "forward_by_segment": dict(forward_s),
            "backward_by_segment": dict(backward_s),
            "exposed_exchange": count * sum(totals[number].exchange for number in slowest),
            "exposed_gradients": gradients,
            "update": update,
            "host": host,
        },
    }


def late_start(config: RunConfig, speeds: Speeds) -> SegmentTime:
    """Return the wait of a stage's forward, dgrad and wgrad for the launch of their first kernels."""
    wait = 0.0 if config.graph.scope == FULL_ITERATION else speeds.rates.host_us * 1e-6
    return SegmentTime("", wait, wait, wait * schedule_of(config.pipeline.schedule).splits_backward)


def short_plan(config: RunConfig, num_ranks: int) -> Plan:
    """Return the plan, with a pipeline of at most `SIMULATED` micro-batches a rank. *Raises* ConfigError."""
    layout = Layout.of(config.parallel, num_ranks)
    count, most = num_micro_batches(config, layout), SIMULATED * layout.pp
    is_wrong = config.pipeline.microbatches not in (None, count)
    keeps_all = layout.pp > 1 and schedule_of(config.pipeline.schedule).keeps_all
    if layout.pp == 1 or count < most + layout.pp or keeps_all or is_wrong:
        return plan_of(config, num_ranks)
    batch = (most + count % layout.pp) * config.train.micro_batch_size * layout.dp
    pipeline = replace(config.pipeline, microbatches=None)
    short = replace(config, train=replace(config.train, global_batch_size=batch), pipeline=pipeline)
    return replace(plan_of(short, num_ranks), config=config, train=config.train, num_micro_batches=count)


def _makespan(plan: Plan, pipeline: PipelinePlan, costs: Costs) -> float:
    long, asked = pipeline.table, plan.config.pipeline
    makespan = makespan_of(long, costs)
    if (missing := plan.num_micro_batches - long.num_micro_batches) == 0:
        return makespan
    fewer = SIMULATED // 2 * plan.layout.pp
    sizes = plan.layout.pp, long.num_micro_batches - fewer, asked.virtual_stages
    short = make_table(asked.schedule, *sizes, overlap=asked.ep_overlap, costs=pipeline.costs)
    # the micro-batches that the table lacks go on at its pace
    return makespan + missing * (makespan - makespan_of(short, costs)) / fewer


def at_the_power_limit(makespan: float, busy: float, rest: float, speeds: Speeds) -> float:
    """Return a makespan with slower clocks; ``busy``: seconds of GEMMs, ``rest``: of the step after it."""
    return makespan * (1 + speeds.rates.power_cap * busy / (makespan + rest))


def message_seconds(sizes: Sizes, speeds: Speeds) -> float:
    """Return seconds to send one micro-batch's hidden states to the next stage over the slowest link."""
    return speeds.pass_on(sizes.state, in_node=sizes.layout.size("world") <= speeds.card.linked)


class Reduction(NamedTuple):
    """Seconds of a pp rank's communication of gradients and weights, with what overlap hides."""

    last: float
    """Gradient reduction and weight gather of a step with one micro-batch."""
    earlier: float
    """Gradient reduction of each micro-batch but one, with ``optim.grad_shard``; with fsdp2 gathers too."""


def reduction_seconds(
    config: RunConfig, sizes: Sizes, speeds: Speeds, stages: Sequence[StagePieces]
) -> Reduction:
    """Return the time of a pp rank's gradient reductions and weight gathers."""
    layout, model = sizes.layout, sizes.model
    strides: dict[Axis, int] = {"edp": layout.ep * layout.etp, "dp_cp": layout.tp, "embed": layout.tp}
    trained, earlier = Counter[Axis](), Counter[Axis]()
    for weight in rank_weights(model, layout, stages):
        if weight.requires_grad:
            trained[layout_of(weight).summed_over] += weight.numel()
    optim, shards_weights = config.optim, config.parallel.dp_shard is DpShard.fsdp2
    if optim.grad_shard or shards_weights:
        whole = rule_of(optim.name).matrices is not None
        earlier = reduced_elements(model, layout, stages, optim.bucket_mb, whole=whole)
    # a forward and a backward gather weights, and the last micro-batch's first gather is counted above
    gathers = sizes.element_bytes * shards_weights
    last = {a: (4 + sizes.element_bytes) * n + gathers * earlier[a] for a, n in trained.items()}
    earlier = Counter({axis: (4 + 2 * gathers) * count for axis, count in earlier.items()})

    def seconds(num_bytes: Mapping[Axis, int]) -> float:
        pairs = num_bytes.items()
        return sum(speeds.gather(size, layout.num_shards(axis), strides.get(axis, 1)) for axis, size in pairs)

    def between_replicas(axis: Axis, num_bytes: int) -> float:
        shards = layout.num_shards(axis)
        replicas, stride = layout.size(axis) // shards, shards * strides.get(axis, 1)
        return 2 * speeds.gather(num_bytes / shards, replicas, stride) if replicas > 1 else 0.0

    of_replicas = sum(between_replicas(axis, 4 * count) for axis, count in trained.items())
    return Reduction(seconds(last) + of_replicas, seconds(earlier))


def exposed_seconds(reductions: Sequence[Reduction], count: int, makespan: float, speeds: Speeds) -> float:
    """Return the seconds of the slowest pp rank's reductions that ``count`` micro-batches do not cover."""

    def exposed(seconds: float) -> float:
        return seconds - min(seconds * speeds.rates.hidden_gradients, makespan / count)

    return exposed(max(each.last for each in reductions)) + (count - 1) * exposed(
        max(each.earlier for each in reductions)
    )


def host_seconds(config: RunConfig, times: list[SegmentTime], speeds: Speeds) -> float:
    """Return seconds in which the host launches a stage's segments; adjacent captured ones are one launch."""
    scope = config.graph.scope
    if scope == FULL_ITERATION:
        return 0.0
    captured = segments_of(scope)
    names = [time.name for time in times]
    follows = [before in captured and name in captured and name != "attn" for before, name in pairwise(names)]
    starts = len(names) - sum(follows)
    return 2 * starts * speeds.rates.host_us * 1e-6
