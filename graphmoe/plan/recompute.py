"""Recomputation: the segments and parts that the backward recomputes, and their layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphmoe.config.schema import RecomputeConfig
from graphmoe.segments import LAYER_SEGMENTS, Segment


@dataclass(frozen=True)
class UnitRecompute:
    """The segments that one compile unit recomputes; equal units can share code."""

    regions: tuple[frozenset[str], ...] = ()
    """Runs of consecutive segments, each recomputed from its inputs."""
    parts: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()
    """Segments whose saved activations are in host memory."""

    def __bool__(self) -> bool:
        return bool(self.regions or self.parts)


NOTHING = UnitRecompute()


@dataclass(frozen=True)
class Recompute:
    all: bool = False
    segments: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    layers: frozenset[int] = frozenset()
    """Layers that ``segments`` and ``parts`` apply to; whole layers if both are empty."""
    offload: frozenset[str] = frozenset()
    """Segments whose saved activations are in host memory."""

    @classmethod
    def of(cls, config: RecomputeConfig) -> Recompute:
        segments, parts, offload = map(frozenset, (config.segments, config.ops, config.offload))
        return cls(config.all, segments, parts, frozenset(config.layer_ids), offload)

    @property
    def on_device(self) -> Recompute:
        """Return the same with all saved activations on the device."""
        return replace(self, offload=frozenset())

    def __bool__(self) -> bool:
        return bool(self.all or self.segments or self.parts or self.layers)

    def words(self) -> str:
        """Return the recomputed segments and their layers as text, for a log."""
        named = ", ".join(sorted(self.segments | self.parts)) or "all segments"
        layers = ", ".join(map(str, sorted(self.layers)))
        return f"{named} of {f'layers {layers}' if layers else 'every layer'}"

    def covers(self, segment: str, layer: int | None) -> bool:
        """Return whether a segment is recomputed as a whole."""
        if segment not in LAYER_SEGMENTS or not self._reaches(layer):
            return False
        named = self.segments or self.parts
        return self.all or segment in self.segments or bool(self.layers and not named)

    def parts_of(self, *layers: int | None) -> frozenset[str]:
        return self.parts if any(map(self._reaches, layers)) else frozenset()

    def of_unit(self, segments: Sequence[Segment]) -> UnitRecompute:
        covered = [run for again, run in self.runs(segments) if again]
        regions = tuple(frozenset(segment.name for segment in run) for run in covered)
        own = self.offload & {segment.name for segment in segments if segment.layer is not None}
        return UnitRecompute(regions, self.parts_of(*(segment.layer for segment in segments)), own)

    def runs(self, segments: Sequence[Segment]) -> list[tuple[bool, list[Segment]]]:
        """Return (recomputed or not, segments) for each run of consecutive segments, in order."""

        def covered(segment: Segment) -> bool:
            # received tensors are saved: recomputing them would communicate again
            return segment.stream != "comm" and self.covers(segment.name, segment.layer)

        return [(again, [*run]) for again, run in itertools.groupby(segments, key=covered)]

    def _reaches(self, layer: int | None) -> bool:
        return layer is not None and (not self.layers or layer in self.layers)
