"""Memory of candidates of a search, and bounds of their time; what several of them share is computed once."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphmoe.config.schema import DispatcherChoice, RunConfig
from graphmoe.model.sizes import rank_weights
from graphmoe.plan.costs.activations import stage_activations
from graphmoe.plan.costs.segment_times import SegmentTime
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.costs.speeds import Speeds
from graphmoe.plan.layout import Axis, Layout
from graphmoe.plan.pipeline.actions import Together
from graphmoe.plan.pipeline.plan import PipelinePlan, expert_ranks, num_micro_batches, pipeline_of
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table
from graphmoe.plan.pipeline.simulate import Costs
from graphmoe.plan.pipeline.walk import Walk
from graphmoe.plan.stages import StagePieces, all_pieces
from graphmoe.project.buffers import communication_bytes, own_buffer_bytes
from graphmoe.project.candidates import Again, Shape
from graphmoe.project.stage_kinds import PlaceKind, alike, place_kinds
from graphmoe.project.state import FP32, state_of
from graphmoe.project.step_time import (
    host_seconds,
    message_seconds,
    reduction_seconds,
    stage_times,
    total_time,
    update_seconds,
)

FILLING = 2
"""Micro-batches for each rank of a pipeline after which no schedule keeps more than before."""
FASTER, FASTER_ON_A_V = 0.003, 0.04
"""Share of a makespan by which a long table may be faster than its first micro-batches let expect; 0.001 was
the most that was seen, 0.027 on a V."""


class _Follows(NamedTuple):
    """Of a candidate what costs of its stages depend on, beside model and length of sequences."""

    dispatcher: DispatcherChoice
    ranks: int
    """That share the experts."""
    number: int
    """Of the kind of recompute."""


_NO_COSTS = _Follows(DispatcherChoice.local, 1, 0)
"""For tables that follow none."""


@dataclass(frozen=True)
class Plan:
    """A pipeline with as many micro-batches as fill it, and its places that may need most."""

    pipeline: PipelinePlan | None
    kinds: tuple[PlaceKind, ...]
    stages: tuple[StagePieces, ...]
    places: tuple[tuple[int, ...], ...]
    """Numbers of the stages of each place."""
    embed_on: tuple[int, ...]

    @functools.cached_property
    def walks(self) -> list[Walk]:
        """Of the table, and of one with a micro-batch more for each rank."""
        assert self.pipeline is not None
        table, virtual_stages = self.pipeline.table, len(self.stages) // len(self.places)
        more = make_table(
            table.schedule,
            len(self.places),
            table.num_micro_batches + len(self.places),
            virtual_stages,
            overlap=any(isinstance(step, Together) for step in table.ranks[-1]),
            costs=self.pipeline.costs,
        )
        return [Walk(table), Walk(more)]


class Estimates:
    """Of one model on one kind of card. ``again``: the kinds of recompute, named by their number."""

    def __init__(self, config: RunConfig, again: Sequence[Again], speeds: Speeds, *, on_nvidia: bool) -> None:
        self.config, self.model, self.again = config, config.model, again
        self.speeds, self.on_nvidia = speeds, on_nvidia
        self._storing, self._adding = (replace(speeds, adding=share) for share in (0.0, 1.0))
        self._joins = not any(kind.config.layer_ids for kind in again)
        self.element_bytes = Sizes.of(config, Layout(), on_nvidia=on_nvidia).element_bytes
        self._all = all_pieces(self.model.num_layers, self.model.mtp_depth)
        self._sizes: dict[Layout, tuple[RunConfig, Sizes]] = {}
        self._has_pool = config.graph.scope != "none"
        self._parts = functools.cache(self._find_parts)
        self._whole = functools.cache(self._find_whole)
        self._plan = functools.cache(self._make_plan)
        self._state = functools.cache(self._find_state)
        self._activations = functools.cache(self._find_activations)
        self._gradients = functools.cache(self._find_gradients)
        self._buffers = functools.cache(self._find_buffers)
        self._communication = functools.cache(self._find_communication)
        self._times = functools.cache(self._find_times)
        self._host = functools.cache(self._find_host)

    def least_bytes(self, layout: Layout) -> float:
        """State of the rank with most, no less than ranks have on average."""
        whole, found = self._whole(Layout(tp=layout.tp, ep=layout.ep, etp=layout.etp)), 0.0
        for axis, size in whole.items():
            ranks, both = layout.size(axis), FP32 + self.element_bytes
            main = FP32 if self.element_bytes != FP32 else 0
            found += size * (both + (both * (ranks > 1) + main + 2 * FP32) / ranks)
        return found / layout.pp

    def plan(self, shape: Shape, schedule: str, virtual_stages: int | None, number: int) -> Plan:
        """The pipeline of a candidate. *Raises* ConfigError for one that there is not."""
        pp, count = shape.layout.pp, num_micro_batches(shape.config, shape.layout)
        follows = _NO_COSTS
        if schedule in SCHEDULES and SCHEDULES[schedule].is_folded:
            ranks = expert_ranks(self.model, shape.layout)
            follows = _Follows(shape.config.moe.dispatcher, ranks, number)
        return self._plan(pp, schedule, virtual_stages, min(count, FILLING * pp + count % pp), follows)

    def memory(self, shape: Shape, plan: Plan, number: int) -> tuple[int, dict[str, float]]:
        """The place that needs most, and its bytes by kind."""
        self._remember(shape)
        layout, together = _with_embedding(shape.layout, plan.embed_on)
        like = _of_layer(shape.layout)
        communication = self._communication(like, layout)
        found: tuple[float, int, dict[str, float]] = (-1.0, 0, {})
        for kind in plan.kinds:
            kept = [self._activations(like, number, pieces) for pieces in kind.stages]
            memory = {
                **self._state(together, kind.stages),
                "activations": max(sum(map(float.__mul__, map(float, c), kept)) for c in kind.moments),
                "buffers": communication
                + self._buffers(like, number, kind.stages, kind.lanes if self._has_pool else 0),
            }
            total = sum(memory.values())
            if total > found[0]:
                found = total, kind.place, memory
        return found[1], found[2]

    def model_seconds(self, shape: Shape, number: int) -> float:
        """Of one micro-batch through the whole model."""
        self._remember(shape)
        count = num_micro_batches(shape.config, shape.layout)
        return self._time(_of_layer(shape.layout), number, self._all, count).total

    def least_seconds(self, shape: Shape, plan: Plan, number: int) -> float:
        """That a step takes at least: each place has its work, and must wait for the first micro-batch.

        Where backwards are not split, the last one still goes on through all stages before the place's.
        """
        count, times, message = self._of_stages(shape, plan, number)
        is_split = plan.pipeline is not None and SCHEDULES[plan.pipeline.table.schedule].splits_backward
        before, waits = 0.0, [0.0]
        for time in times:
            before += time.forward + message
            if not is_split:
                before += time.inputs + time.weights + message
            waits.append(before)
        makespan = max(waits[own[0]] + count * sum(times[n].total for n in own) for own in plan.places)
        return self._with_update(shape, plan, makespan)

    def likely_seconds(self, shape: Shape, plan: Plan, number: int) -> float:
        """That a step takes nearly, and no less: the last micro-batches of a short table, again and again."""
        count, times, message = self._of_stages(shape, plan, number)
        if plan.pipeline is None:
            return self.least_seconds(shape, plan, number)
        forward, inputs, weights = (
            tuple(getattr(time, kind) for time in times) for kind in ("forward", "inputs", "weights")
        )
        costs = Costs(forward, inputs, weights, message)
        short, longer = (walk.makespan(costs) for walk in plan.walks)
        of_each = (longer - short) / len(plan.places)
        more = count - plan.walks[0].num_micro_batches
        is_folded = SCHEDULES[plan.pipeline.table.schedule].is_folded
        makespan = (short + more * of_each) * (1 - (FASTER_ON_A_V if is_folded else FASTER))
        return self._with_update(shape, plan, makespan)

    def _with_update(self, shape: Shape, plan: Plan, makespan: float) -> float:
        """With the exchange of gradients, as far as it is not covered, and the update."""
        _, together = _with_embedding(shape.layout, plan.embed_on)
        count = num_micro_batches(shape.config, shape.layout)
        like = _of_layer(shape.layout)
        gradients = max(self._gradients(like, together, kind.stages) for kind in plan.kinds)
        moments = max(self._state(together, kind.stages)["moments"] for kind in plan.kinds)
        hidden = min(gradients * self.speeds.rates.hidden_gradients, makespan / count)
        hosts = (sum(self._host(like, plan.stages[n]) for n in own) for own in plan.places)
        step = makespan + gradients - hidden + update_seconds(moments, self.speeds)
        return max(step, count * max(hosts))

    def _of_stages(self, shape: Shape, plan: Plan, number: int) -> tuple[int, list[SegmentTime], float]:
        """Micro-batches of the step, times of all stages, and that of a message."""
        self._remember(shape)
        like, count = _of_layer(shape.layout), num_micro_batches(shape.config, shape.layout)
        times = [self._time(like, number, pieces, count) for pieces in plan.stages]
        sizes = replace(self._sizes[like][1], layout=shape.layout)
        message = message_seconds(sizes, self.speeds) if plan.pipeline else 0.0
        return count, times, message

    def _remember(self, shape: Shape) -> None:
        """The configuration and sizes that stand for all layouts whose layers are alike."""
        like = _of_layer(shape.layout)
        if like not in self._sizes:
            self._sizes[like] = shape.config, Sizes.of(shape.config, shape.layout, on_nvidia=self.on_nvidia)

    def _make_plan(
        self, pp: int, schedule: str, virtual_stages: int | None, count: int, follows: _Follows
    ) -> Plan:
        config = replace(
            self.config,
            moe=replace(self.config.moe, dispatcher=follows.dispatcher),
            recompute=self.again[follows.number].config,
        )
        pipeline = replace(
            config.pipeline, schedule=schedule, virtual_stages=virtual_stages, microbatches=None
        )
        train = replace(config.train, global_batch_size=count * config.train.micro_batch_size)
        found = pipeline_of(replace(config, train=train, pipeline=pipeline), Layout(pp=pp, ep=follows.ranks))
        stages = found.stages if found else (self._all,)
        places = tuple(found.placement.stages_of(place) if found else (0,) for place in range(pp))
        return Plan(
            found,
            tuple(place_kinds(found, self.model, joins=self._joins)),
            tuple(alike(stage, self.model) if self._joins else stage for stage in stages),
            places,
            found.embed_on if found else (0,),
        )

    def _find_parts(self, pieces: StagePieces) -> list[tuple[StagePieces, int]]:
        """The layers of a stage, and what it has beside them; how often each is there."""
        layers = [StagePieces(False, range(i, i + 1), range(0), False) for i in pieces.layers]
        if self._joins:
            layers = [alike(layer, self.model) for layer in layers]
        return [*Counter(layers).items(), (replace(pieces, layers=range(0)), 1)]

    def _find_whole(self, layout: Layout) -> Counter[Axis]:
        """Elements of a rank that has all layers, by the ranks that have them too."""
        found: Counter[Axis] = Counter()
        for weight in rank_weights(self.model, layout, [self._all]):
            found[weight.summed_over] += weight.size
        return found

    def _find_state(self, layout: Layout, stages: Sequence[StagePieces]) -> dict[str, int]:
        weights = rank_weights(self.model, layout, stages)
        return state_of(weights, layout, self.element_bytes, self.config.optim.bucket_mb)

    def _find_gradients(self, like: Layout, together: Layout, stages: Sequence[StagePieces]) -> float:
        return reduction_seconds(replace(self._sizes[like][1], layout=together), self.speeds, stages)

    def _find_activations(self, like: Layout, number: int, pieces: StagePieces) -> float:
        kept = stage_activations(self._sizes[like][1], self.again[number].config, pieces)
        return float(sum(of_part.total() for of_part in kept.values()))

    def _find_buffers(self, like: Layout, number: int, stages: Sequence[StagePieces], lanes: int) -> float:
        config, sizes = self._sizes[like]
        config = replace(config, recompute=self.again[number].config)
        return sum(own_buffer_bytes(config, sizes, stages, lanes).values())

    def _find_communication(self, like: Layout, layout: Layout) -> float:
        return communication_bytes(replace(self._sizes[like][1], layout=layout))

    def _find_host(self, like: Layout, pieces: StagePieces) -> float:
        config, sizes = self._sizes[like]
        return host_seconds(config, stage_times(config, sizes, self.speeds, pieces), self.speeds)

    def _time(self, like: Layout, number: int, pieces: StagePieces, count: int) -> SegmentTime:
        """On average of ``count`` micro-batches: the first stores its weight gradients, others add theirs."""
        both = [self._times(like, number, pieces, adds) for adds in (False, True)]
        return _weighted(both, (1 / count, (count - 1) / count))

    def _find_times(self, like: Layout, number: int, pieces: StagePieces, adds: bool) -> SegmentTime:
        if len(pieces.layers) > 1:
            parts = [(self._times(like, number, part, adds), count) for part, count in self._parts(pieces)]
            return _weighted(*zip(*parts, strict=True))
        config, sizes = self._sizes[like]
        config = replace(config, recompute=self.again[number].config)
        return total_time(stage_times(config, sizes, self._adding if adds else self._storing, pieces))


def _weighted(times: Sequence[SegmentTime], weights: Sequence[float]) -> SegmentTime:
    """The sum of times, each so often."""
    of_kinds = zip(*((t.forward, t.inputs, t.weights, t.exchange) for t in times), strict=True)
    return SegmentTime("", *(sum(map(operator.mul, kind, weights)) for kind in of_kinds))


@functools.lru_cache(maxsize=8192)
def _with_embedding(layout: Layout, embed_on: tuple[int, ...]) -> tuple[Layout, Layout]:
    """The layout, and one that is equal for all whose ranks hold the same weights."""
    layout = replace(layout, embed_on=embed_on)
    return layout, replace(layout, dp=layout.dp * layout.cp, cp=1, ring=False)


@functools.lru_cache(maxsize=8192)
def _of_layer(layout: Layout) -> Layout:
    """Equal for layouts whose ranks compute and keep the same of a layer."""
    return replace(layout, dp=1, pp=1, embed_on=(0,))
