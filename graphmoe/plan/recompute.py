"""Recompute that a run asks for: the segments and parts that a backward computes again, and their layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from graphmoe.config.schema import RecomputeConfig
from graphmoe.segments import LAYER_SEGMENTS, Segment


@dataclass(frozen=True)
class UnitRecompute:
    """Recompute in one compile unit. Equal for units that are treated alike."""

    regions: tuple[frozenset[str], ...] = ()
    """Runs of neighbouring segments, each computed again from what enters it."""
    parts: frozenset[str] = frozenset()
    """Pieces of segments whose results are not kept."""

    def __bool__(self) -> bool:
        return bool(self.regions or self.parts)


NOTHING = UnitRecompute()


@dataclass(frozen=True)
class Recompute:
    """Recompute that a run asks for; none without arguments."""

    all: bool = False
    segments: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    layers: frozenset[int] = frozenset()
    """Layers to which ``segments`` and ``parts`` apply; whole layers where there are none of these."""

    @classmethod
    def of(cls, config: RecomputeConfig) -> Recompute:
        """Take the recompute from a checked configuration."""
        return cls(config.all, frozenset(config.segments), frozenset(config.ops), frozenset(config.layer_ids))

    def __bool__(self) -> bool:
        return bool(self.all or self.segments or self.parts or self.layers)

    def words(self) -> str:
        """Name for a log the segments that are computed again, and their layers."""
        named = ", ".join(sorted(self.segments | self.parts)) or "all segments"
        layers = ", ".join(map(str, sorted(self.layers)))
        return f"{named} of {f'layers {layers}' if layers else 'every layer'}"

    def covers(self, segment: str, layer: int | None) -> bool:
        """Return True where a segment is computed again as a whole."""
        if segment not in LAYER_SEGMENTS or not self._reaches(layer):
            return False
        named = self.segments or self.parts
        return self.all or segment in self.segments or bool(self.layers and not named)

    def parts_of(self, *layers: int | None) -> frozenset[str]:
        """Return the parts that are not kept of segments of these layers."""
        return self.parts if any(map(self._reaches, layers)) else frozenset()

    def of_unit(self, segments: Sequence[Segment]) -> UnitRecompute:
        """Return the recompute in neighbouring segments of a layer."""
        covered = [run for again, run in self.runs(segments) if again]
        regions = tuple(frozenset(segment.name for segment in run) for run in covered)
        return UnitRecompute(regions, self.parts_of(*(segment.layer for segment in segments)))

    def runs(self, segments: Sequence[Segment]) -> list[tuple[bool, list[Segment]]]:
        """Return runs of neighbouring segments, covered or not, in order; what other ranks sent is kept."""

        def covered(segment: Segment) -> bool:
            return segment.stream != "comm" and self.covers(segment.name, segment.layer)

        return [(again, [*run]) for again, run in itertools.groupby(segments, key=covered)]

    def _reaches(self, layer: int | None) -> bool:
        return layer is not None and (not self.layers or layer in self.layers)
