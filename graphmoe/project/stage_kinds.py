"""Stages that need and take the same, whichever layers they have, and places of a pipeline that need most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from graphmoe.config.schema import ModelConfig
from graphmoe.plan.pipeline.check import in_flight
from graphmoe.plan.pipeline.plan import PipelinePlan
from graphmoe.plan.stages import StagePieces, all_pieces

Moments = tuple[tuple[int, ...], ...]
"""Micro-batches that are kept of each stage of a rank, at the moments when that is most."""


@dataclass(frozen=True)
class PlaceKind:
    """A place along pp, as far as its memory is concerned."""

    place: int
    stages: tuple[StagePieces, ...]
    moments: Moments

    @property
    def lanes(self) -> int:
        """Stages of micro-batches that are in flight at most."""
        return max(map(sum, self.moments))


def alike(pieces: StagePieces, model: ModelConfig) -> StagePieces:
    """The same for all stages with as many dense and MoE layers, and else the same pieces."""
    dense = sum(i < model.num_dense_layers for i in pieces.layers)
    first = model.num_dense_layers - dense
    return replace(pieces, layers=range(first, first + len(pieces.layers)))


def place_kinds(plan: PipelinePlan | None, model: ModelConfig, *, joins: bool) -> list[PlaceKind]:
    """The places of a pipeline, or the one of no pipeline, without those that surely need less than another.

    ``joins``: layers of a kind are treated alike, so stages may stand for each other.
    """
    if plan is None:
        return [PlaceKind(0, (all_pieces(model.num_layers, model.mtp_depth),), ((1,),))]
    stages = [alike(stage, model) if joins else stage for stage in plan.stages]
    by_stages: dict[tuple[StagePieces, ...], list[PlaceKind]] = {}
    for place, moments in enumerate(in_flight(plan.table)):
        own = tuple(stages[number] for number in plan.placement.stages_of(place))
        others = by_stages.setdefault(own, [])
        if any(_covers(other.moments, moments) for other in others):
            continue
        others[:] = [other for other in others if not _covers(moments, other.moments)]
        others.append(PlaceKind(place, own, moments))
    return [kind for kinds in by_stages.values() for kind in kinds]


def _covers(more: Moments, less: Iterable[tuple[int, ...]]) -> bool:
    """Whether for each moment there is one that keeps no less of any stage; lanes are no fewer then."""
    return all(any(all(map(int.__le__, counts, other)) for other in more) for counts in less)
