"""Records of passes (plain functions that rewrite a graph), reports of what they did, and their runner."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import fx

from graphmoe.passes.matching import name_of
from graphmoe.passes.split_backward import SplitBackward

log = logging.getLogger(__name__)
Stage = Literal["forward", "joint", "backward"]
"""Graph that a pass gets: a unit's forward before differentiation, the joint graph (the forward if there is
no backward), or the backward."""


class MadeBy(NamedTuple):
    """Record of the operation, in another unit, that produced an input; ``meta["made_by"]`` of the input."""

    target: str
    call: str  # distinguishes calls of one operation
    part: int

    def at(self, position: int) -> MadeBy:
        # equal units share their graphs, but not their calls
        return self._replace(call=f"{position}:{self.call}")


class Rewrites(NamedTuple):
    matches: int
    left: tuple[str, ...] = ()  # why each similar candidate was left unchanged
    absent: str = ""  # description of a graph without candidates
    expected: bool = True  # False if the graph computes the same in a form that the pass does not handle


def rewrite(
    replace: Callable[..., str | None], candidates: Iterable[tuple[Any, ...]], absent: str = ""
) -> Rewrites:
    """Call ``replace`` with each candidate, a node and its data.

    ``replace`` returns None if it replaced the node, else the reason, or "" for an unrelated node.
    """
    reasons = [(node, replace(node, *rest)) for node, *rest in candidates]
    left = [f"{name_of(node)}: {reason}" for node, reason in reasons if reason]
    return Rewrites(sum(reason is None for _, reason in reasons), tuple(left), absent)


@dataclass(frozen=True)
class PassSpec:
    """Record of one pass: its function, stage, numerics and knobs (keyword arguments)."""

    name: str
    run: Callable[..., Any]
    """``run(graph, **knobs)`` rewrites the graph in place and returns Rewrites, or their number.

    split_backward, the only pass of the stage "backward", returns two graphs instead.
    """
    stage: Stage
    numerics: Literal["bitwise", "allclose"]
    """bitwise: results are unchanged; allclose: another order of sums or another rounding."""
    segments: tuple[str, ...] = ()
    """Segments that have the pass's pattern: a unit with all of these is expected to match."""
    knobs: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Names of passes whose operations this pass fuses."""
    optional: bool = False
    """True if the pass runs only if knobs, which may be empty, are given for its name."""
    skips: frozenset[int] = frozenset()
    """Layers in which the pass does not run."""

    def fingerprint(self) -> bytes:
        """Return bytes to hash: name, stage, knobs, source. TypeError if knobs or ``run`` are not plain."""
        plain = inspect.isfunction(self.run)
        source = Path(plain and inspect.getsourcefile(inspect.unwrap(self.run)) or "")
        if not source.is_file():
            raise TypeError(f"{self.run!r} is not a plain function in a source file")
        try:
            knobs = json.dumps(self.knobs, sort_keys=True)
        except TypeError as error:
            raise TypeError(f"pass {self.name}: parameters must be plain values: {error}") from error
        return f"{self.name} {self.stage} {knobs}".encode() + source.read_bytes()


@dataclass(frozen=True)
class PassReport:
    """Changes that a pass made to the graph of a unit."""

    name: str
    unit: str
    matches: int
    nodes_before: int
    nodes_after: int
    saved_bytes_before: int | None
    """Bytes of saved activations without this pass; None if not measured."""
    saved_bytes_after: int | None
    ms: float
    left: tuple[str, ...]
    """Why each candidate was left unchanged, or why there is none in a unit that should match."""
    warning: str = ""
    """Log line if a pass did not match but should have."""

    def warn(self) -> None:
        if self.warning:
            log.warning("%s", self.warning)


class PassRunner:
    """Runner of an ordered list of passes; times each, lints its graph and counts its rewrites."""

    def __init__(self, specs: Sequence[PassSpec], dump_folder: Path | None = None) -> None:
        self.specs = tuple(specs)
        self._dump_folder = dump_folder

    def of_layer(self, layer: int | None) -> PassRunner:
        """Return a runner of the passes that a layer does not skip; None: outside of layers."""
        if not any(layer in spec.skips for spec in self.specs):
            return self
        return PassRunner([spec for spec in self.specs if layer not in spec.skips], self._dump_folder)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs)

    def uuid(self) -> str:
        """Return a hash of this folder's sources, those of plug-in passes, knobs and order."""
        digest = hashlib.sha256()
        for source in sorted(Path(__file__).parent.glob("*.py")):  # passes share their vocabulary
            digest.update(source.read_bytes())
        for spec in self.specs:
            digest.update(spec.fingerprint())
        return digest.hexdigest()

    def run(
        self,
        stage: Stage,
        module: fx.GraphModule,
        unit: str,
        segments: tuple[str, ...] = (),
        saved_bytes: Callable[[fx.GraphModule], int] | None = None,
    ) -> list[PassReport]:
        """Run a stage's passes over ``module`` in place; ``saved_bytes`` measures its saved activations."""
        reports = []
        kept_bytes: int | None = None  # of the graph as it is now
        for spec in (spec for spec in self.specs if spec.stage == stage):
            before = _num_operations(module.graph)
            before_text = self._text(module)
            if kept_bytes is None and saved_bytes is not None:
                kept_bytes = saved_bytes(module)
            started = time.perf_counter()
            rewrites = _run(spec, module)
            ms = (time.perf_counter() - started) * 1e3
            bytes_before = bytes_after = kept_bytes
            if rewrites.matches and saved_bytes is not None:
                bytes_after = kept_bytes = saved_bytes(module)
            if rewrites.matches:
                self._dump(spec.name, unit, before_text, self._text(module))
            after = _num_operations(module.graph)
            left, warning = rewrites.left, ""
            if not rewrites.matches and spec.segments and {*spec.segments} <= {*segments}:
                left = left or (rewrites.absent or "the graph has nothing that looks like its pattern",)
                if rewrites.expected:
                    warning = f"pass {spec.name} changed nothing in {unit}: {'; '.join(left)}"
            counts = (rewrites.matches, before, after, bytes_before, bytes_after)
            reports.append(PassReport(spec.name, unit, *counts, ms, left, warning))
            reports[-1].warn()
        return reports

    @property
    def splits_backward(self) -> bool:
        return any(spec.stage == "backward" for spec in self.specs)

    def split_report(self, backward: fx.GraphModule, split: SplitBackward, unit: str) -> list[PassReport]:
        """Return a report on ``split``, which the pass split_backward made; [] if that is not in the list."""
        if not self.splits_backward:
            return []
        before = _num_operations(backward.graph)
        after = _num_operations(split.inputs.graph) + _num_operations(split.weights.graph)
        return [
            PassReport("split_backward", unit, split.nodes_moved, before, after, None, None, split.ms, ())
        ]

    def _text(self, module: fx.GraphModule) -> str:
        return module.print_readable(print_output=False) if self._dump_folder else ""

    def _dump(self, name: str, unit: str, before: str, after: str) -> None:
        if self._dump_folder is None:
            return
        self._dump_folder.mkdir(parents=True, exist_ok=True)
        number = 1 + len(list(self._dump_folder.glob("*.before.py")))
        for when, text in (("before", before), ("after", after)):
            (self._dump_folder / f"{number:03d}.{unit}.{name}.{when}.py").write_text(text)


def _run(spec: PassSpec, module: fx.GraphModule) -> Rewrites:
    result = spec.run(module.graph, **spec.knobs)
    rewrites = Rewrites(result) if isinstance(result, int) else result
    if not isinstance(rewrites, Rewrites):
        raise TypeError(f"pass {spec.name} returned {result!r}, not the number of its rewrites")
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return rewrites


def _num_operations(graph: fx.Graph) -> int:
    return sum(node.op == "call_function" for node in graph.nodes)
