"""What each rank of a run needs, in bytes by kind, and where its activations are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphmoe.config.schema import ConfigError, DpShard, RunConfig
from graphmoe.model.sizes import rank_weights
from graphmoe.plan.costs.activations import Bytes, stage_activations
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.check import peaks
from graphmoe.plan.pipeline.plan import PipelinePlan, pipeline_of
from graphmoe.plan.stages import all_pieces
from graphmoe.project.buffers import buffer_bytes
from graphmoe.project.state import state_of

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


def exact_memory(
    config: RunConfig, layout: Layout, *, on_nvidia: bool, plan: PipelinePlan | None = None
) -> list[PlaceMemory]:
    """What each place along pp needs of a resolved configuration. *Raises* ConfigError for what is not known.

    ``on_nvidia`` as in `Sizes.of`. ``plan`` takes the place of the run's own.
    """
    refuse_unknown(config)
    plan = plan or pipeline_of(config, layout)
    if plan is not None:
        layout = replace(layout, embed_on=plan.embed_on)
    sizes, model = Sizes.of(config, layout, on_nvidia=on_nvidia), config.model
    pieces = plan.stages if plan else (all_pieces(model.num_layers, model.mtp_depth),)
    stages = [stage_activations(sizes, config.recompute, own) for own in pieces]
    of_stage = [sum(kept.total() for kept in parts.values()) for parts in stages]
    activations: Sequence[float] = of_stage if plan is None else peaks(plan.table, of_stage)
    lanes: Sequence[float] = [1] if plan is None else peaks(plan.table, [1] * len(stages))
    places = []
    for place in range(layout.pp):
        numbers = plan.placement.stages_of(place) if plan else (0,)
        own = [pieces[number] for number in numbers]
        by_part: dict[str, Bytes] = {}
        for part, kept in (item for number in numbers for item in stages[number].items()):
            by_part[part] = by_part.get(part, Counter()) + kept
        weights = rank_weights(model, layout, own)
        places.append(
            PlaceMemory(
                place,
                state_of(weights, layout, sizes.element_bytes, config.optim.bucket_mb),
                activations[place],
                sum(by_part.values(), Counter()),
                by_part,
                buffer_bytes(config, sizes, own, lanes[place]),
            )
        )
    return places


def refuse_unknown(config: RunConfig) -> None:
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
