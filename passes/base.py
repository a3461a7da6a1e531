"""What a pass is: a plain function over a graph, described by one record in the table of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Stage = Literal["forward", "joint", "backward"]
"""The graph that a pass sees: a unit's forward before it is differentiated, forward and backward in one
graph, or the backward alone."""


class Rewrites(NamedTuple):
    """What one pass did to one graph."""

    matches: int
    """Places that were rewritten."""
    kept: tuple[str, ...] = ()
    """Why each candidate that looks alike was left as it is, one line each."""


@dataclass(frozen=True)
class PassSpec:
    """One pass: what it runs, where, and what it promises about numbers."""

    name: str
    run: Callable[..., Any]
    """``run(graph, **knobs)`` rewrites the graph in place and returns Rewrites, or their number.

    split_backward, the one pass of the stage "backward", makes two graphs of one instead.
    """
    stage: Stage
    numerics: Literal["bitwise", "allclose"]
    segments: tuple[str, ...] = ()
    """Segments that have the pattern: a unit with all of them is expected to match."""
    knobs: dict[str, Any] = field(default_factory=dict)

    def expects(self, segments: tuple[str, ...]) -> bool:
        """Whether a graph of these segments should match."""
        return bool(self.segments) and set(self.segments) <= set(segments)
