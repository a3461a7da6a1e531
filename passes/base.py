"""A pass: a plain function over a graph, described by one record in the table of passes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

Stage = Literal["forward", "joint", "backward"]
"""The graph that a pass sees: a unit's forward before it is differentiated, forward and backward in one
graph, or the backward alone."""


class MadeBy(NamedTuple):
    """The operation that made an input of a unit, in the unit that hands it on; a placeholder's
    ``meta["made_by"]``."""

    target: str
    """The operation, such as graphmoe::routing_plan."""
    call: str
    """Tells the calls of one operation apart."""
    part: int
    """Position among the results."""

    def at(self, position: int) -> MadeBy:
        """The same of a unit at a place of its own: units alike share their graphs, not their calls."""
        return self._replace(call=f"{position}:{self.call}")


class Rewrites(NamedTuple):
    """Changes that one pass made to one graph."""

    matches: int
    """Places that were rewritten."""
    left: tuple[str, ...] = ()
    """Why each candidate that looks alike was left as it is, one line each."""
    absent: str = ""
    """The reason where there is no candidate: what is in the graph instead."""
    expected: bool = True
    """False where the graph is known to compute the same in a form that the pass is not for."""


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
    """Promise that results keep their bits, or that sums are taken in another order or rounded at another
    place."""
    segments: tuple[str, ...] = ()
    """Segments that have the pattern: a unit with all of them is expected to match."""
    knobs: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Passes whose operations it joins."""

    def expects(self, segments: tuple[str, ...]) -> bool:
        """Return whether a graph of these segments should match."""
        return bool(self.segments) and set(self.segments) <= set(segments)

    def fingerprint(self) -> bytes:
        """Name, stage, parameters and source: what a hash of passes follows.

        Raises TypeError for what is no plain function in a source file, or parameters of no plain value.
        """
        plain = inspect.isfunction(self.run)
        source = Path(plain and inspect.getsourcefile(inspect.unwrap(self.run)) or "")
        if not source.is_file():
            raise TypeError(f"{self.run!r} is no plain function in a source file")
        try:
            knobs = json.dumps(self.knobs, sort_keys=True)
        except TypeError as error:
            raise TypeError(f"pass {self.name}: parameters must be plain values: {error}") from error
        return f"{self.name} {self.stage} {knobs}".encode() + source.read_bytes()
