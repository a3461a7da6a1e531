"""The pipeline of a run: stages, their ranks, and the schedule's table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from graphmoe.config.schema import ConfigError, ModelConfig, RunConfig
from graphmoe.plan.costs.hardware import GPUS_PER_NODE
from graphmoe.plan.costs.segment_times import SegmentTime, modelled_message, modelled_parts, stage_costs
from graphmoe.plan.experts import adapted_of
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline import Placement, Table
from graphmoe.plan.pipeline.balance import balanced_layout, default_layout, measured_parts
from graphmoe.plan.pipeline.layouts import StagePieces, needs_embedding, parse_layout, pieces_of, short_layout
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table, placement_of, schedule_rules
from graphmoe.plan.pipeline.simulate import Costs, Timeline, simulate
from graphmoe.plan.recompute import Recompute


@dataclass(frozen=True)
class PipelinePlan:
    """The pipeline of a run with pp > 1."""

    layout: str
    stages: tuple[StagePieces, ...]
    table: Table
    costs: Costs
    """Estimated or configured times of the stages; some schedules' tables depend on them."""
    embed_on: tuple[int, ...]

    @property
    def placement(self) -> Placement:
        return self.table.placement

    @property
    def stages_of_places(self) -> list[list[StagePieces]]:
        numbers = map(self.placement.stages_of, range(self.placement.num_ranks))
        return [[self.stages[number] for number in of_place] for of_place in numbers]

    def pieces_of_place(self, place: int) -> list[str]:
        """Return the stages of a pipeline rank as layout strings: ``['Et', 'L']``."""
        pieces = parse_layout(self.layout)
        return [short_layout([pieces[number]]) for number in self.placement.stages_of(place)]

    def describe(self) -> str:
        return (
            f"pipeline.schedule={self.table.schedule}: {len(self.stages)} stages on "
            f"{self.placement.num_ranks} ranks, {self.table.num_micro_batches} micro-batches a step, "
            f"layout {self.layout}"
        )


def pipeline_of(config: RunConfig, layout: Layout, stands_for: int | None = None) -> PipelinePlan | None:
    """Return the pipeline of a run, None if pp = 1; ``stands_for``: of `make_table`. *Raises* ConfigError."""
    if layout.pp == 1:
        return None
    if problems := [*_schedule_problems(config, layout)]:
        raise ConfigError("; ".join(problems))
    pipeline, model = config.pipeline, config.model
    placement = placement_of(pipeline.schedule, layout.pp, pipeline.virtual_stages)
    text = pipeline.layout or _balanced(config, placement)
    stages = pieces_of(text, model.num_layers, model.mtp_depth, placement.num_stages)
    costs = _costs(config, layout, text)
    asked = pipeline.schedule, layout.pp, num_micro_batches(config, layout), pipeline.virtual_stages
    table = make_table(*asked, overlap=pipeline.ep_overlap, costs=costs, stands_for=stands_for)
    embeds = (
        placement.rank_of[number]
        for number, stage in enumerate(stages)
        if needs_embedding(stage, tied=model.tie_embeddings)
    )
    found = PipelinePlan(text, stages, table, costs, tuple(sorted(set(embeds))))
    if model.lora_rank:
        _refuse_idle_ranks(found, model)
    return found


def _refuse_idle_ranks(pipeline: PipelinePlan, model: ModelConfig) -> None:
    for place, stages in enumerate(pipeline.stages_of_places):
        layers = [i for own in stages for i in (*own.layers, *(model.num_layers + k for k in own.mtp))]
        if not any(adapted_of(model, i) for i in layers):
            raise ConfigError(
                f"model.lora_targets=[{','.join(model.lora_targets)}] leaves rank {place} of the pipeline "
                f"({', '.join(pipeline.pieces_of_place(place))}) nothing to train; use model.lora_targets="
                f"[attention], or a pipeline.layout that gives each rank a layer"
            )


def with_one_micro_batch(config: RunConfig, layout: Layout) -> RunConfig:
    train = replace(config.train, global_batch_size=config.train.micro_batch_size * layout.dp)
    return replace(config, train=train, pipeline=replace(config.pipeline, microbatches=None))


def _balanced(config: RunConfig, placement: Placement) -> str:
    if not config.pipeline.costs:
        return default_layout(config.model, config.data.seq_len or 1, placement.rank_of)
    try:
        return balanced_layout(tuple(_given_parts(config)), placement.rank_of)
    except ConfigError as error:
        raise ConfigError(f"pipeline.costs={config.pipeline.costs}: {error}") from error


def expert_ranks(model: ModelConfig, layout: Layout) -> int:
    """Return the ep size that time estimates assume: 1, or the ranks of one or two nodes."""
    ranks = layout.size("ep_etp")
    alike = ranks if ranks == 1 else GPUS_PER_NODE if ranks <= GPUS_PER_NODE else 2 * GPUS_PER_NODE
    return min(alike, model.num_experts) or 1


def _costs(config: RunConfig, layout: Layout, text: str) -> Costs:
    # all ranks compute the same, from the configuration alone
    model, seq_len, again = config.model, config.data.seq_len or 1, Recompute.of(config.recompute)
    is_joint = config.moe.dispatcher == "alltoall"
    ranks = expert_ranks(model, layout)
    parts = modelled_parts(model, seq_len, again, expert_ranks=ranks, joint_experts=is_joint)
    message = modelled_message(model, seq_len)
    if config.pipeline.costs:
        # pipeline.costs gives a part's measured time; F, I and W get their modelled shares of it
        before = sum(part.total for part in parts)
        given = zip(parts, _given_parts(config), strict=True)
        parts = [part.scaled(ms / part.total if part.total else 0.0) for part, (_, ms) in given]
        message *= sum(part.total for part in parts) / before
    if not config.compile.enabled:
        parts = [replace(part, inputs=part.inputs + part.weights, weights=0.0) for part in parts]
    return costs_of(stage_costs(parse_layout(text), parts), message)


def costs_of(stages: Sequence[SegmentTime], message: float) -> Costs:
    forward, inputs, weights = (
        tuple(getattr(stage, kind) for stage in stages) for kind in ("forward", "inputs", "weights")
    )
    return Costs(forward, inputs, weights, message)


def _given_parts(config: RunConfig) -> list[tuple[str, float]]:
    given = dict(map(_cost, config.pipeline.costs))
    if len(given) < len(config.pipeline.costs):
        raise ConfigError("pipeline.costs has more than one time for a part; leave one entry per part")
    return measured_parts(config.model, given)


def _cost(entry: str) -> tuple[str, float]:
    name, _, value = entry.partition(":")
    try:
        return name, float(value)
    except ValueError:
        raise ConfigError(f"'{entry}' must be a part and its milliseconds, such as moe:6.7") from None


def num_micro_batches(config: RunConfig, layout: Layout) -> int:
    return config.train.global_batch_size // (config.train.micro_batch_size * layout.dp)


def _schedule_problems(config: RunConfig, layout: Layout) -> Iterator[str]:
    pipeline, train = config.pipeline, config.train
    if pipeline.layout is not None and pipeline.costs:
        yield (
            f"pipeline.layout={pipeline.layout} says what each stage has, and pipeline.costs would balance "
            f"them; leave one out"
        )
    count = num_micro_batches(config, layout)
    if pipeline.microbatches not in (None, count):
        wanted = pipeline.microbatches * train.micro_batch_size * layout.dp
        yield (
            f"pipeline.microbatches={pipeline.microbatches}, and train.global_batch_size="
            f"{train.global_batch_size} over train.micro_batch_size={train.micro_batch_size} times "
            f"{layout.dp} data-parallel ranks is {count}; use pipeline.microbatches={count}, or "
            f"train.global_batch_size={wanted}"
        )
    if count:
        yield from schedule_rules(
            pipeline.schedule, layout.pp, count, pipeline.virtual_stages, overlap=pipeline.ep_overlap
        )


PLAIN = "1f1b"
SIMULATED = 16  # most simulated micro-batches per pipeline rank: tables of thousands take seconds


def run_slower_than_1f1b(config: RunConfig, layout: Layout) -> str | None:
    """Return a message if simulation finds 1f1b faster than the run's schedule. *Raises* ConfigError."""
    if layout.pp == 1 or config.pipeline.ep_overlap or config.pipeline.schedule == PLAIN:
        return None  # what pairs hide is not known here
    most = SIMULATED * layout.pp * config.train.micro_batch_size * layout.dp
    train = replace(config.train, global_batch_size=min(config.train.global_batch_size, most))

    def timeline_of(name: str) -> Timeline | None:
        own = replace(config.pipeline, microbatches=None)
        if name != own.schedule:
            own = replace(own, schedule=name, virtual_stages=None, layout=None)
        try:
            pipeline = pipeline_of(replace(config, train=train, pipeline=own), layout)
        except ConfigError:
            return None
        return simulate(pipeline.table, pipeline.costs) if pipeline else None

    words = slower_than_1f1b(config.pipeline.schedule, timeline_of)
    if words is None or train == config.train:
        return words
    return f"{words} ({SIMULATED * layout.pp} of {num_micro_batches(config, layout)} micro-batches)"


def slower_than_1f1b(schedule: str, timeline_of: Callable[[str], Timeline | None]) -> str | None:
    """Return a message, which may name a faster schedule, if 1f1b is faster than ``schedule``; else None."""
    if schedule == PLAIN:
        return None
    own, plain = timeline_of(schedule), timeline_of(PLAIN)
    if own is None or plain is None or own.makespan <= plain.makespan * (1 + 1e-9):
        return None
    kept = max(own.peak_activations)
    found = ((name, timeline_of(name)) for name in SCHEDULES if name not in (schedule, PLAIN))
    others = {PLAIN: plain, **{name: timeline for name, timeline in found if timeline}}
    fitting = {name: t for name, t in others.items() if max(t.peak_activations) <= kept}
    best = min(fitting, key=lambda name: fitting[name].makespan, default=None)
    if best is None or fitting[best].makespan >= own.makespan:
        instead = "no schedule with so few activations is faster"
    else:
        instead = f"use {best}, the fastest with no more activations: {_shown(fitting[best])}"
    return (
        f"{schedule} is slower than {PLAIN} by simulation: {_shown(own)}, {PLAIN} {_shown(plain)}; {instead}"
    )


def _shown(timeline: Timeline) -> str:
    return f"bubble {timeline.bubble:.1%} with {max(timeline.peak_activations):g} activations"
