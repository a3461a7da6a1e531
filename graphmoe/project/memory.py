"""Bytes that each rank of a run needs, by kind, and where its activations are."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graphmoe.config.schema import ConfigError, DpShard, RunConfig
from graphmoe.model.sizes import Weight, rank_weights
from graphmoe.plan.buckets import BufferLayout
from graphmoe.plan.costs.activations import Bytes, stage_activations
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.check import peaks
from graphmoe.plan.pipeline.layouts import all_pieces
from graphmoe.plan.pipeline.plan import PipelinePlan, pipeline_of
from graphmoe.plan.plan import Plan
from graphmoe.plan.recompute import Recompute
from graphmoe.project.buffers import buffer_bytes, ranks_of
from graphmoe.run.files import PROJECTION_FILE, write_json

log = logging.getLogger(__name__)

MEMORY_KINDS = ("params", "grads", "main_params", "moments", "activations", "buffers", "total")
OUTSIDE_ALLOCATOR = ("communication", "dispatch")
"""Buffers that torch's allocator does not hold: communicators', and memory that ranks share."""
FP32 = 4


@dataclass(frozen=True)
class PlaceMemory:
    """Bytes of the ranks at one place along pp; they are alike."""

    place: int
    state: dict[str, int]
    activations: float
    """Most activations of all micro-batches in flight."""
    by_segment: Bytes
    """Activations of one micro-batch on all stages of the place, by segment."""
    by_part: dict[str, Bytes]
    """Activations of one micro-batch by layer."""
    buffers: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.state.values()) + self.activations + sum(self.buffers.values())

    def kinds_gb(self) -> dict[str, float]:
        """Return decimal GB by kind."""
        sizes = {**self.state, "activations": self.activations, "buffers": sum(self.buffers.values())}
        return {kind: size / 1e9 for kind, size in {**sizes, "total": self.total}.items()}


def exact_memory(
    config: RunConfig, layout: Layout, *, on_nvidia: bool, plan: PipelinePlan | None = None
) -> list[PlaceMemory]:
    """Return the memory of each place along pp of a resolved configuration.

    ``on_nvidia`` as in `Sizes.from_config`. ``plan`` takes the place of the run's own. *Raises* ConfigError
    for a configuration whose memory is not known here.
    """
    refuse_unknown(config)
    plan = plan or pipeline_of(config, layout)
    if plan is not None:
        layout = replace(layout, embed_on=plan.embed_on)
    sizes, model = Sizes.from_config(config, layout, on_nvidia=on_nvidia), config.model
    pieces = plan.stages if plan else (all_pieces(model.num_layers, model.mtp_depth),)
    stages = [stage_activations(sizes, Recompute.of(config.recompute), own) for own in pieces]
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
                state_bytes(weights, layout, sizes.element_bytes, config.optim.bucket_mb),
                activations[place],
                sum(by_part.values(), Counter()),
                by_part,
                buffer_bytes(config, sizes, own, lanes[place]),
            )
        )
    return places


def refuse_unknown(config: RunConfig) -> None:
    """Raise ConfigError for settings that change memory in ways that are not counted here."""
    problems = []
    if config.parallel.dp_shard is DpShard.fsdp2:
        problems.append("parallel.dp_shard=fsdp2 gathers weights for each layer; use parallel.dp_shard=zero1")
    if not config.compile.enabled:
        problems.append("compile.enabled=false keeps what autograd keeps; use compile.enabled=true")
    if config.passes.enabled is not None or config.passes.disabled:
        problems.append("passes.enabled and passes.disabled change what is kept; leave them out")
    if problems:
        raise ConfigError("not projected: " + "; ".join(problems))


def state_bytes(
    weights: Sequence[Weight], layout: Layout, element_bytes: int, bucket_mb: float
) -> dict[str, int]:
    """Return bytes by kind as flat buffers hold them: whole weights and gradients, and shards of all."""
    families: dict[Any, list[Weight]] = {}
    for weight in weights:
        families.setdefault(ranks_of(layout, weight.summed_over), []).append(weight)
    found = dict.fromkeys(MEMORY_KINDS[:4], 0)
    for members in families.values():
        ranks = layout.size(members[0].summed_over)
        size = BufferLayout.of(members, ranks, 0, bucket_mb * 1e6 / FP32).size
        shard = size // ranks
        is_rounded = element_bytes != FP32
        found["params"] += element_bytes * (size + (shard if ranks > 1 else 0))
        found["grads"] += FP32 * (size + (shard if ranks > 1 else 0))
        found["main_params"] += FP32 * shard if is_rounded else 0
        found["moments"] += 2 * FP32 * shard
    return found


def write_projected_memory(folder: Path, plan: Plan) -> None:
    """Write the projected memory to a run's folder; no error of a projection ends the run."""
    try:
        write_json(folder / PROJECTION_FILE, projected_memory(plan))
    except Exception as error:
        log.warning("no projected memory in the report: %s: %s", type(error).__name__, error)


def projected_memory(plan: Plan) -> dict[str, Any]:
    """Return GiB by kind for each place along pp as ``places``, or the reason against it as ``why_not``.

    ``buffers`` are only those in torch's allocator; other buffers are kinds of their own, and ``total`` is of
    all kinds.
    """
    try:
        run, on_nvidia = with_its_transport(plan), torch.version.hip is None
        places = exact_memory(run, plan.layout, on_nvidia=on_nvidia, plan=plan.pipeline)
    except ConfigError as error:
        return {"why_not": str(error)}
    return {"places": [_gib_by_kind(place) for place in places]}


def with_its_transport(plan: Plan) -> RunConfig:
    """Return the configuration with the transport that the run chooses on its own devices, never auto."""
    config, transport = plan.config, plan.transport
    return config if transport is None else replace(config, moe=replace(config.moe, transport=transport))


def allocated_bytes(place: PlaceMemory) -> float:
    """Bytes of a place in torch's allocator, as torch.cuda.max_memory_allocated counts them."""
    return place.total - sum(_outside(place).values())


def _gib_by_kind(place: PlaceMemory) -> dict[str, float]:
    outside = _outside(place)
    sizes = {
        **place.state,
        "activations": place.activations,
        "buffers": sum(place.buffers.values()) - sum(outside.values()),
        **outside,
        "total": place.total,
    }
    return {kind: size / 2**30 for kind, size in sizes.items()}


def _outside(place: PlaceMemory) -> dict[str, float]:
    return {kind: place.buffers[kind] for kind in OUTSIDE_ALLOCATOR}
