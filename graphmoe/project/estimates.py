"""Estimates for a search's candidates: exact memory of the worst rank, approximate step time."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from graphmoe.config.schema import Fp8Recipe, ModelConfig, RecomputeConfig, RunConfig
from graphmoe.model.sizes import state_bytes
from graphmoe.optim.storage import kept_of
from graphmoe.plan.attention import is_linear
from graphmoe.plan.costs.activations import stage_activations
from graphmoe.plan.costs.rates import Speeds
from graphmoe.plan.costs.segment_times import SegmentTime, stage_times, sum_of
from graphmoe.plan.costs.sizes import Sizes, deferred_bytes, overlaps
from graphmoe.plan.experts import is_moe
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.check import in_flight, largest
from graphmoe.plan.pipeline.layouts import StagePieces, all_pieces
from graphmoe.plan.pipeline.plan import PipelinePlan, expert_ranks, num_micro_batches, pipeline_of
from graphmoe.plan.pipeline.schedules import make_table, placement_of, schedule_of
from graphmoe.plan.pipeline.schedules.v_shaped import COMPARED
from graphmoe.plan.pipeline.simulate import Costs, makespan_of
from graphmoe.plan.recompute import Recompute
from graphmoe.plan.slots import weight_places
from graphmoe.project.candidates import Candidate
from graphmoe.project.step_time import (
    Reduction,
    at_the_power_limit,
    exposed_seconds,
    host_seconds,
    late_start,
    message_seconds,
    reduction_seconds,
)
from graphmoe.segments import segments_of
from graphmoe.training.floors import owned_of, update_seconds
from graphmoe.training.memory import beside_bytes, communication_bytes, num_slots, own_buffer_bytes

FILLING = 2  # micro-batches for each rank of a pipeline after which no schedule keeps more than before
RANKS = 4  # the waits of a longer pipeline are estimated by those of one with so many ranks
Stages = tuple[StagePieces, ...]


class PlaceKind(NamedTuple):
    """Group of pipeline positions with equal stages; ``place`` is the one with most memory."""

    place: int
    stages: Stages
    moments: tuple[tuple[int, ...], ...]  # counts of `in_flight` whenever a rank keeps most


class Like(NamedTuple):
    """Key of cached results, equal for all layouts in which a rank computes and saves the same."""

    layout: Layout
    micro_batch_size: int
    fp8: Fp8Recipe
    dispatcher: str
    overlaps: bool
    scope: str


class ShortPipeline(NamedTuple):
    places: tuple[PlaceKind, ...]
    embed_on: tuple[int, ...] = (0,)


class _State(NamedTuple):
    sizes: dict[str, float]
    reduction: Reduction
    update_s: float


class _Stage(NamedTuple):
    time: SegmentTime
    host_s: float
    activations: float
    deferred: float
    beside: float
    """Those of a second micro-batch slot."""


class Estimates:
    """Estimator of one model on one kind of card; what candidates share is computed once."""

    def __init__(self, config: RunConfig, kinds: Mapping[str, RecomputeConfig], speeds: Speeds) -> None:
        self.config, self.model, self.kinds = config, config.model, kinds
        self.speeds, self.on_nvidia = speeds, speeds.card.is_nvidia
        self._plain = Sizes.from_config(config, Layout(), on_nvidia=self.on_nvidia)
        self._all = all_pieces(self.model.num_layers, self.model.mtp_depth)
        by_number = config.precision.fp8_skip_layers or any(kind.layer_ids for kind in kinds.values())
        self._alike_in = None if by_number else self.model
        self._sizes: dict[Like, tuple[RunConfig, Sizes]] = {}
        self._pipelines: dict[tuple[object, ...], ShortPipeline] = {}
        self._stage = functools.cache(self._estimate_stage)
        self._state = functools.cache(self._estimate_state)
        self._buffers = functools.cache(self._estimate_buffers)

    def least_bytes(self, layout: Layout) -> float:
        """Return bytes of weights, gradients, optimizer, mean over pp: lower bound of the largest rank's."""
        return sum(self._state(_of_weights(layout, (0,)), (self._all,), False).sizes.values()) / layout.pp

    def pipeline(self, candidate: Candidate) -> ShortPipeline:
        """Return the pipeline of a candidate. *Raises* ConfigError if there is none."""
        config, layout = candidate.config, candidate.layout
        name, asked = config.pipeline.schedule, num_micro_batches(config, layout)
        facts, count = schedule_of(name), asked
        if not facts.keeps_all:
            # a table of pairs needs one micro-batch more per rank until it repeats
            pairs = facts.is_folded and (config.pipeline.ep_overlap or facts.build is facts.build_overlapped)
            count = min(count, (FILLING + pairs) * layout.pp + count % layout.pp)
        overlap = config.pipeline.ep_overlap
        key: tuple[object, ...] = (layout.pp, name, config.pipeline.virtual_stages, count, overlap)
        if facts.is_folded:  # the table follows times of stages
            own = config.precision.fp8, config.moe.dispatcher, min(asked, COMPARED * layout.pp)
            key += (*own, expert_ranks(self.model, layout), candidate.kind)
        if key not in self._pipelines:
            train = replace(config.train, global_batch_size=count * config.train.micro_batch_size * layout.dp)
            short = replace(config, train=train, pipeline=replace(config.pipeline, microbatches=None))
            self._pipelines[key] = self._short(pipeline_of(short, layout, asked))
        return self._pipelines[key]

    def _short(self, plan: PipelinePlan | None) -> ShortPipeline:
        if plan is None:
            return ShortPipeline((PlaceKind(0, (self._all,), ((1, 0),)),))
        return ShortPipeline(place_kinds(plan, self._alike_in), plan.embed_on)

    def memory(self, candidate: Candidate, pipeline: ShortPipeline) -> tuple[int, dict[str, float]]:
        """Return the position along pp that needs most memory, and its bytes by kind."""
        like, kind = self._like(candidate), candidate.kind
        layout = replace(candidate.layout, embed_on=pipeline.embed_on)
        communication = communication_bytes(replace(self._sizes[like][1], layout=layout))
        has_pool = candidate.config.graph.scope != "none"
        needs = []
        for place in pipeline.places:
            stages = [self._stage(like, kind, pieces) for pieces in place.stages]
            kept = [*(stage.activations for stage in stages), *(stage.deferred for stage in stages)]
            slots = num_slots(candidate.layout.pp > 1, candidate.config.pipeline.ep_overlap)
            lanes = max(slots, *map(sum, place.moments)) if has_pool else 0
            activations = max(
                sum(count * size for count, size in zip(counts, kept, strict=True))
                for counts in place.moments
            )
            activations += (slots - 1) * sum(stage.beside for stage in stages)
            buffers = communication + self._buffers(like, kind, place.stages, lanes)
            in_turns = candidate.config.pipeline.ep_overlap
            state = self._state(_of_weights(layout, pipeline.embed_on), place.stages, in_turns).sizes
            needs.append((place.place, {**state, "activations": activations, "buffers": buffers}))
        return max(needs, key=lambda need: sum(need[1].values()))

    def model_seconds(self, candidate: Candidate) -> float:
        return self._stage(self._like(candidate), candidate.kind, self._all).time.total

    def tokens_per_s_per_gpu(self, candidate: Candidate, pipeline: ShortPipeline) -> float:
        """Estimate the throughput from the busiest pipeline position's time; all ranks wait equally long."""
        like, kind, layout = self._like(candidate), candidate.kind, candidate.layout
        weights = _of_weights(layout, pipeline.embed_on)
        count = num_micro_batches(candidate.config, layout)
        of_places = [[self._stage(like, kind, each) for each in place.stages] for place in pipeline.places]
        busiest = max(sum(stage.time.total for stage in stages) for stages in of_places)
        makespan = count * busiest
        if layout.pp > 1:
            busiest += len(of_places[0]) * late_start(candidate.config, self.speeds).total
            each, further = self._waits(candidate)
            makespan = busiest * (count * each + (layout.pp - 1) * further)
        in_turns = candidate.config.pipeline.ep_overlap
        states = [self._state(weights, place.stages, in_turns) for place in pipeline.places]
        exposed = exposed_seconds([state.reduction for state in states], count, makespan, self.speeds)
        update = max(state.update_s for state in states)
        host = count * max(sum(stage.host_s for stage in stages) for stages in of_places)
        tokens = self.config.train.global_batch_size * self._plain.seq_len / layout.size("world")
        rest = exposed + update
        makespan = at_the_power_limit(makespan, count * busiest, rest, self.speeds)
        return tokens / max(makespan + rest, host)

    def _waits(self, candidate: Candidate) -> tuple[float, float]:
        like = self._like(candidate)
        pipeline, pp = candidate.config.pipeline, candidate.layout.pp
        stages = placement_of(pipeline.schedule, pp, pipeline.virtual_stages).num_stages
        late = late_start(candidate.config, self.speeds).scaled(stages)
        time = sum_of("", [self._stage(like, candidate.kind, self._all).time, late])
        message = message_seconds(replace(self._sizes[like][1], layout=candidate.layout), self.speeds)
        shares = [round(20 * share / time.total) / 20 for share in (time.forward, time.inputs, time.weights)]
        # rounded, so that a few pipelines stand for all
        delay = float(f"{message * pp / time.total:.1g}")
        asked = pipeline.schedule, pipeline.virtual_stages, pipeline.ep_overlap
        return _waits_of(min(pp, RANKS), *asked, tuple(shares), delay)

    def _like(self, candidate: Candidate) -> Like:
        config, layout = candidate.config, replace(candidate.layout, dp=1, pp=1, embed_on=(0,))
        own = config.train.micro_batch_size, config.precision.fp8, config.moe.dispatcher
        like = Like(layout, *own, overlaps(config, candidate.layout), str(config.graph.scope))
        if like not in self._sizes:
            sizes = Sizes.from_config(config, candidate.layout, on_nvidia=self.on_nvidia)
            self._sizes[like] = config, sizes
        return like

    def _with_recompute(self, like: Like, kind: str) -> tuple[RunConfig, Sizes]:
        config, sizes = self._sizes[like]
        return replace(config, recompute=self.kinds[kind]), sizes

    def _estimate_stage(self, like: Like, kind: str, pieces: StagePieces) -> _Stage:
        config, sizes = self._with_recompute(like, kind)
        times = stage_times(config, sizes, self.speeds, pieces)
        kept = stage_activations(sizes, Recompute.of(config.recompute), pieces)
        host_s = host_seconds(config, times, self.speeds)
        saved = float(sum(part.total() for part in kept.values()))
        beside = float(beside_bytes(kept, segments_of(config.graph.scope)))
        return _Stage(sum_of("", times), host_s, saved, deferred_bytes(sizes, pieces, saved), beside)

    def _estimate_state(self, layout: Layout, stages: Stages, in_turns: bool) -> _State:
        optim = self.config.optim
        owned = owned_of(optim, self.model, layout, stages)
        return _State(
            state_bytes(
                self.model,
                layout,
                stages,
                bucket_mb=optim.bucket_mb,
                element_bytes=self._plain.element_bytes,
                kept=kept_of(optim),
                grad_shard=optim.grad_shard,
                weight_places=weight_places(self.config.parallel.dp_shard, in_turns=in_turns),
                offload=optim.offload,
            ),
            reduction_seconds(self.config, replace(self._plain, layout=layout), self.speeds, stages),
            update_seconds(optim, owned, self.speeds),
        )

    def _estimate_buffers(self, like: Like, kind: str, stages: Stages, lanes: int) -> float:
        config, sizes = self._with_recompute(like, kind)
        recompute = Recompute.of(config.recompute)
        return sum(own_buffer_bytes(recompute, config.moe, config.graph, sizes, stages, lanes).values())


def place_kinds(plan: PipelinePlan, model: ModelConfig | None) -> tuple[PlaceKind, ...]:
    """Group pipeline positions by equal stages, or with ``model`` by their number of layers of each kind."""
    groups: dict[Stages, list[tuple[int, tuple[tuple[int, ...], ...]]]] = {}
    for place, (own, moments) in enumerate(zip(plan.stages_of_places, in_flight(plan.table), strict=True)):
        stages = tuple(stage if model is None else _alike(stage, model) for stage in own)
        groups.setdefault(stages, []).append((place, moments))
    return tuple(
        PlaceKind(
            max(group, key=lambda member: max(map(sum, member[1])))[0],
            stages,
            largest(counts for _, moments in group for counts in moments),
        )
        for stages, group in groups.items()
    )


def _alike(pieces: StagePieces, model: ModelConfig) -> StagePieces:
    # the first layers of the model that have experts and delta nets in the same places
    kinds, own = [(is_moe(model, i), is_linear(model, i)) for i in range(model.num_layers)], pieces.layers
    starts = range(own.start + 1)
    first = next(i for i in starts if kinds[i : i + len(own)] == kinds[own.start : own.stop])
    return replace(pieces, layers=range(first, first + len(own)))


@functools.lru_cache(maxsize=4096)
def _waits_of(
    ranks: int, schedule: str, virtual: int | None, overlap: bool, shares: tuple[float, ...], message: float
) -> tuple[float, float]:
    placement = placement_of(schedule, ranks, virtual)
    costs = Costs.of_rank(placement, *shares, comm=message)
    makespans = []
    for number in (2 * ranks, 4 * ranks):
        table = make_table(schedule, ranks, number, virtual, overlap=overlap, costs=costs)
        makespans.append(makespan_of(table, costs))
    each = (makespans[1] - makespans[0]) / (2 * ranks)
    return each, (makespans[0] - 2 * ranks * each) / (ranks - 1)


def _of_weights(layout: Layout, embed_on: tuple[int, ...]) -> Layout:
    return replace(layout, dp=layout.dp * layout.cp, cp=1, ring=False, embed_on=embed_on)
