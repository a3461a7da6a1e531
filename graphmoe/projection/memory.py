"""What each rank of a run needs, in bytes by kind, and where its activations are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from graphmoe.config import ConfigError, DpShard, RunConfig
from graphmoe.layout import Layout
from graphmoe.pipeline_layout import all_pieces
from graphmoe.pipeline_plan import PipelinePlan, plan_of
from graphmoe.projection.activations import Bytes, stage_activations
from graphmoe.projection.buffers import buffer_bytes
from graphmoe.projection.sizes import Sizes
from graphmoe.projection.state import state_of
from graphmoe.projection.weights import rank_weights
from runtime.pipeline.validate import peaks

MEMORY_KINDS = ("params", "grads", "main_params", "moments", "activations", "buffers", "total")


@dataclass(frozen=True)
class PlaceMemory:
    """Bytes of the ranks at one place along pp; they are alike."""

    place: int
    state: dict[str, int]
    activations: float
    """At most, over all micro-batches in flight."""
    by_segment: Bytes
    """Of one micro-batch, of all stages of the place."""
    by_part: dict[str, Bytes]
    """The same by layer."""
    buffers: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.state.values()) + self.activations + sum(self.buffers.values())

    def kinds_gb(self) -> dict[str, float]:
        """Decimal GB by kind."""
        sizes = {**self.state, "activations": self.activations, "buffers": sum(self.buffers.values())}
        return {kind: size / 1e9 for kind, size in {**sizes, "total": self.total}.items()}


def exact_memory(config: RunConfig, layout: Layout, *, pads: bool) -> list[PlaceMemory]:
    """What each place along pp needs of a resolved configuration. *Raises* ConfigError for what is not known.

    ``pads``: kernels of the card want equal heads in attention.
    """
    _refuse_unknown(config)
    plan = plan_of(config, layout)
    if plan is not None:
        layout = replace(layout, embed_on=plan.embed_on)
    sizes = Sizes.of(config, layout, pads=pads)
    return [_place_memory(config, sizes, plan, place) for place in range(layout.pp)]


def _place_memory(config: RunConfig, sizes: Sizes, plan: PipelinePlan | None, place: int) -> PlaceMemory:
    model = config.model
    whole = {0: all_pieces(model.num_layers, model.mtp_depth)}
    own = whole if plan is None else plan.own_stages(place)
    by_stage = {number: stage_activations(sizes, config.recompute, pieces) for number, pieces in own.items()}
    by_part: dict[str, Bytes] = {}
    for stage in by_stage.values():
        for part, kept in stage.items():
            by_part[part] = by_part.get(part, Counter()) + kept
    activations, lanes = _in_flight(by_stage, plan, place)
    weights = rank_weights(model, sizes.layout, own.values())
    return PlaceMemory(
        place,
        state_of(weights, sizes.layout, sizes.element_bytes, config.optim.bucket_mb),
        activations,
        sum(by_part.values(), Counter()),
        by_part,
        buffer_bytes(config, sizes, [*own.values()], lanes),
    )


def _in_flight(
    by_stage: dict[int, dict[str, Bytes]], plan: PipelinePlan | None, place: int
) -> tuple[float, float]:
    """Activations of all micro-batches that a place has in flight at most, and how many stages of them."""
    of_stage = {number: sum(kept.total() for kept in parts.values()) for number, parts in by_stage.items()}
    if plan is None:
        return sum(of_stage.values()), 1
    stages = range(len(plan.stages))
    most = peaks(plan.table, [of_stage.get(stage, 0) for stage in stages])[place]
    return most, peaks(plan.table, [1] * len(stages))[place]


def _refuse_unknown(config: RunConfig) -> None:
    """*Raises* ConfigError for what changes memory in ways that are not counted here."""
    problems = []
    if config.parallel.dp_shard is DpShard.fsdp2:
        problems.append("parallel.dp_shard=fsdp2 gathers weights for each layer; use parallel.dp_shard=zero1")
    if not config.compile.enabled:
        problems.append("compile.enabled=false keeps what autograd keeps; use compile.enabled=true")
    if config.passes.enabled is not None or config.passes.disabled:
        problems.append("passes.enabled and passes.disabled change what is kept; leave them out")
    if problems:
        raise ConfigError("not projected: " + "; ".join(problems))
