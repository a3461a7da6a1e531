"""Plan of a run: all that follows from its configuration and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphmoe.config.schema import (
    CheckpointConfig,
    CompileConfig,
    ComputeDtype,
    DataConfig,
    GraphConfig,
    HostConfig,
    LaunchConfig,
    LogConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ParallelConfig,
    PassesConfig,
    PrecisionConfig,
    ProfileConfig,
    RunConfig,
    RunSection,
    TrainConfig,
    Transport,
)
from graphmoe.plan.costs.rates import Speeds
from graphmoe.plan.costs.segment_times import SegmentTime, stage_times
from graphmoe.plan.costs.sizes import Sizes, refuse_unknown
from graphmoe.plan.experts import (
    Arrivals,
    ExpertPlan,
    arrivals_of,
    experts_of,
    routed_tokens,
    transport_of_run,
)
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.layouts import StagePieces, all_pieces
from graphmoe.plan.pipeline.plan import PipelinePlan, num_micro_batches, pipeline_of
from graphmoe.plan.pipeline.schedules import schedule_of
from graphmoe.plan.recompute import Recompute
from graphmoe.plan.slots import weight_places
from graphmoe.segments import FULL_ITERATION, segments_of

if TYPE_CHECKING:
    import torch

# configuration keys that are not sections of a plan
DECIDED = ("pipeline", "recompute", "sweep", "format")


@dataclass(frozen=True)
class Plan(ExpertPlan, Arrivals):
    """Decisions about a run on a number of ranks; made by ``plan_of``."""

    config: RunConfig
    """For records and estimates; a run reads the fields below."""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    moe: MoEConfig
    graph: GraphConfig
    compile: CompileConfig
    passes: PassesConfig
    checkpoint: CheckpointConfig
    host: HostConfig
    log: LogConfig
    launch: LaunchConfig
    profile: ProfileConfig
    run: RunSection
    layout: Layout
    pipeline: PipelinePlan | None
    """Stages and schedule of the pipeline; None if each rank has all layers."""
    stages: tuple[StagePieces, ...]
    splits_backward: bool
    ep_overlap: bool
    transport: Transport | None
    """Transport of dispatcher symm, never auto; None with other dispatchers."""
    num_micro_batches: int
    seq_len: int
    tokens: int
    """Tokens of a micro-batch that a rank routes."""
    ignores_labels: bool
    """True if labels may be ignored: losses are then means over the trained tokens of the global batch."""
    recompute: Recompute
    dtype: torch.dtype
    captures_step: bool
    captured: frozenset[str]
    """Segments that are captured in their own graphs."""
    fp8_skips: frozenset[int]
    """Layers without fp8, counted from the first."""

    @property
    def global_micro_batches(self) -> int:
        return self.num_micro_batches * self.layout.dp

    @property
    def weight_places(self) -> int:
        return weight_places(self.parallel.dp_shard, in_turns=self.ep_overlap)

    def replica_bytes(self, backends: str) -> int:
        """Return weight and gradient bytes sent per replica and micro-batch; ``backends``: of experts."""
        numbers = 3 * self.model.hidden_size * self.model.expert_ffn_size
        times, in_fp8 = 1 if self.keeps_replicas else 2, self.experts_in_fp8
        # fp32 sums are sent in fp32
        of_gradient = 4 if in_fp8 or backends.split(",")[-1] == "triton" else self.dtype.itemsize
        return numbers * (times * (1 if in_fp8 else self.dtype.itemsize) + of_gradient)

    def sizes(self, *, on_nvidia: bool) -> Sizes:
        return Sizes.from_config(self.config, self.layout, on_nvidia=on_nvidia)

    def segment_times(self, speeds: Speeds, pieces: StagePieces) -> list[SegmentTime]:
        """Return a micro-batch's times in a compiled stage. *Raises* ConfigError for unknown costs."""
        config = replace(self.config, compile=replace(self.compile, enabled=True))
        refuse_unknown(config)
        return stage_times(config, self.sizes(on_nvidia=speeds.card.is_nvidia), speeds, pieces)

    def with_its_transport(self) -> Plan:
        """Return the plan with symm's transport resolved for the run's devices."""
        if self.transport is None:
            return self
        moe = replace(self.moe, transport=self.transport)
        return replace(self, config=replace(self.config, moe=moe), moe=moe)

    def stage_numbers(self, place: int) -> tuple[int, ...]:
        return self.pipeline.placement.stages_of(place) if self.pipeline else (0,)

    def own_stages(self, place: int) -> list[StagePieces]:
        return [self.stages[number] for number in self.stage_numbers(place)]


def dtype_of(compute: ComputeDtype) -> torch.dtype:
    import torch

    return {ComputeDtype.bf16: torch.bfloat16, ComputeDtype.fp32: torch.float32}[compute]


def plan_of(config: RunConfig, num_ranks: int) -> Plan:
    """Return the plan of a resolved configuration. *Raises* ConfigError."""
    model, layout, scope = config.model, Layout.of(config.parallel, num_ranks), config.graph.scope
    pipeline = pipeline_of(config, layout)
    if pipeline is not None:
        layout = replace(layout, embed_on=pipeline.embed_on)
    tokens, num_layers = routed_tokens(config, layout), model.num_layers + model.mtp_depth
    assert config.data.seq_len is not None
    return Plan(
        **vars(experts_of(config)),
        **vars(arrivals_of(config.moe, model, layout, tokens)),
        config=config,
        **{name: section for name, section in vars(config).items() if name not in DECIDED},
        layout=layout,
        pipeline=pipeline,
        stages=pipeline.stages if pipeline else (all_pieces(model.num_layers, model.mtp_depth),),
        splits_backward=pipeline is not None and schedule_of(config.pipeline.schedule).splits_backward,
        ep_overlap=config.pipeline.ep_overlap,
        transport=transport_of_run(config),
        num_micro_batches=num_micro_batches(config, layout),
        seq_len=config.data.seq_len,
        tokens=tokens,
        ignores_labels=config.data.document_mask,
        recompute=Recompute.of(config.recompute),
        dtype=dtype_of(config.precision.compute),
        captures_step=scope == FULL_ITERATION,
        captured=frozenset(segments_of(scope)),
        fp8_skips=frozenset(layer % num_layers for layer in config.precision.fp8_skip_layers),
    )
