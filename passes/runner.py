"""PassRunner: runs the passes of one stage after another over a graph, and reports what each did."""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from graphmoe.passes.base import PassSpec, Rewrites, Stage
from graphmoe.passes.split_backward import SplitBackward

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassReport:
    """Changes that one pass made to the graph of one unit."""

    name: str
    unit: str
    matches: int
    nodes_before: int
    nodes_after: int
    saved_bytes_before: int | None
    """Bytes kept for the backward without this pass; None where they are not measured."""
    saved_bytes_after: int | None
    ms: float
    left: tuple[str, ...]
    """Why each candidate was left as it is; why there is none where the unit should have one."""


class PassRunner:
    """Runs an ordered list of passes; lints, times and counts each."""

    def __init__(self, specs: Sequence[PassSpec], dump_folder: Path | None = None) -> None:
        self.specs = tuple(specs)
        self._dump_folder = dump_folder

    def uuid(self) -> str:
        """Hash of this folder's sources, those of passes from elsewhere, parameters and order."""
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
        """Run every pass of the stage over ``module`` in place.

        ``saved_bytes`` measures what a graph keeps for its backward; it is called where a pass matched.
        """
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
            left = rewrites.left
            if not rewrites.matches and spec.expects(segments):
                left = left or (rewrites.absent or "the graph has nothing that looks like its pattern",)
                if rewrites.expected:
                    log.warning("pass %s changed nothing in %s: %s", spec.name, unit, "; ".join(left))
            reports.append(
                PassReport(
                    spec.name, unit, rewrites.matches, before, after, bytes_before, bytes_after, ms, left
                )
            )
        return reports

    @property
    def splits_backward(self) -> bool:
        return any(spec.stage == "backward" for spec in self.specs)

    def split_report(self, backward: fx.GraphModule, split: SplitBackward, unit: str) -> list[PassReport]:
        """The report of split_backward, which the caller ran: how many operations went to W."""
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
