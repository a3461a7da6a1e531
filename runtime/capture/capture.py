"""The state that all captures of a run share, and their report."""

import json
import logging
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.config.ranges import number_of
from graphmoe.runtime.capture.graphs import Graph, GraphMaker, Run
from graphmoe.runtime.host.files import dispensable

log = logging.getLogger(__name__)

REPORT_FILE = "capture_report.json"


@dataclass
class Span:
    """Neighbouring segments that replay together."""

    unit: str
    segments: tuple[str, ...]
    """Empty for the whole step."""
    places: int = 0
    """Places of the model that the segments are at, each with graphs of its own."""
    graphs: int = 0
    nodes: int | None = 0
    """Kernels, copies and memsets in the span's graphs; None where they cannot be counted."""
    seconds: float = 0.0
    """Time that the graphs took to make."""

    def make(self, maker: GraphMaker, run: Run, given: Sequence[Tensor] = (), pool: Hashable = 0) -> Graph:
        """Make one more graph, as ``GraphMaker.make``."""
        started = time.perf_counter()
        graph = maker.make(run, given, pool)
        self.graphs += 1
        self.nodes = _sum([self.nodes, graph.nodes])
        self.seconds += time.perf_counter() - started
        return graph


@dataclass
class CaptureReport:
    """Report of what was captured; ``write`` makes capture_report.json of it."""

    scope: str
    on: str
    """device, or host: where there are no graphs, a stand-in runs from the same static buffers."""
    warmup_steps: int
    """Steps that ran uncaptured before."""
    spans: list[Span] = field(default_factory=list)
    not_captured: dict[str, str] = field(default_factory=dict)
    """Segments that the scope names, and why they are not captured."""
    pool_bytes: int = 0
    """Bytes that the device's allocator took for the graphs' memory."""

    def sums(self) -> dict[str, Any]:
        """Graphs, nodes and seconds of all spans."""
        return {
            "graphs": sum(span.graphs for span in self.spans),
            "nodes": _sum([span.nodes for span in self.spans]),
            "seconds": sum(span.seconds for span in self.spans),
        }

    def write(self, folder: Path) -> None:
        """Write capture_report.json."""
        content = {**asdict(self), **self.sums()}
        (folder / REPORT_FILE).write_text(json.dumps(content, indent=1) + "\n")

    def line(self) -> str:
        """Return one line for the log."""
        made, count, seconds = self.sums().values()
        nodes = "" if count is None else f" of {number_of(count, 'node')}"
        graphs, megabytes = number_of(made, "graph"), f"{self.pool_bytes / 2**20:.0f} MiB"
        return f"captured {self.scope}: {graphs}{nodes} in {seconds:.1f} s, {megabytes} in their pool"


TensorSlot = tuple[Mapping[str, Any], str]
"""The dictionary that holds a tensor, and its key there."""


class Capture:
    """State that all captures of a run share."""

    def __init__(
        self, scope: str | Sequence[str], device: torch.device, warmup_steps: int, folder: Path | None = None
    ) -> None:
        """``folder`` gets the report, if given."""
        name = scope if isinstance(scope, str) else f"[{','.join(scope)}]"
        self._names_segments, self._folder = not isinstance(scope, str), folder
        self.maker, self.warmup_steps = GraphMaker(device), warmup_steps
        self.report = CaptureReport(name, self.maker.on, warmup_steps)
        self.steps = 0
        """Training steps that have begun."""
        self.program: int | None = 0
        """The program that steps run now, where there are several; None replays nothing."""
        self.planned = 0
        """The program that may have graphs: the last that was not None."""
        self._begun: dict[int | None, int] = {}
        """Steps of each program."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._names: list[str] = []
        self._slots: list[TensorSlot] = []
        self._addresses: list[int] | None = None
        if device.type == "cpu":
            log.info("a CPU has no graphs: graph.scope=%s calls its functions on static buffers", name)

    def publish(self) -> None:
        """Log the report of what was captured, and write it to the folder."""
        report = self.report
        report.pool_bytes = self.maker.pool_bytes()
        if self._folder is not None:
            with dispensable(self._folder / REPORT_FILE):
                report.write(self._folder)
        log.info(report.line())
        if self._names_segments:  # the names of other scopes stand for segments that a model may lack
            for segment, reason in report.not_captured.items():
                log.warning("graph.scope names %s, which is not captured: %s", segment, reason)

    def watch(self, slots: Mapping[str, TensorSlot]) -> None:
        """Watch tensors, by name, whose addresses at the first captured step graphs keep."""
        self._names, self._slots = list(slots), list(slots.values())

    def use(self, program: int | None) -> bool:
        """Let later steps run this program; each program warms up before its first graphs.

        Return whether it is a new one, which ends all graphs for good. None and back again ends none.
        """
        self.program = program
        if program is None or program == self.planned:
            return False
        self.planned = program
        self.maker.drop()
        return True

    @property
    def ready(self) -> bool:
        """Return whether graphs replay now."""
        return self.program is not None and self._begun.get(self.program, 0) > self.warmup_steps

    @property
    def is_first_replay(self) -> bool:
        """Return whether this is the step that the graphs of a program were made in."""
        return self.ready and self._begun[self.program] == self.warmup_steps + 1

    @property
    def has_captured(self) -> bool:
        """Return whether any program has been captured."""
        return self._addresses is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count a training step and run it on the stream of the graphs; the current one waits for it.

        *Raises* RuntimeError for a tensor that has moved since graphs were made.
        """
        self.steps += 1
        self._begun[self.program] = self._begun.get(self.program, 0) + 1
        if self.is_first_replay:
            self.maker.prepare()
        if self.ready:
            self._check_addresses()
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)

    def _look(self) -> list[int]:
        held = [holder.get(key) for holder, key in self._slots]
        return [0 if tensor is None else tensor.data_ptr() for tensor in held]

    def _check_addresses(self) -> None:
        """Check addresses on the host alone: 0.1 microseconds for each tensor."""
        found = self._look()
        if self._addresses is None:
            self._addresses = found
        if found == self._addresses:
            return
        moved = [n for n, a, b in zip(self._names, found, self._addresses, strict=True) if a != b]
        more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
        raise RuntimeError(
            f"{moved[0]}{more}: at another address than when graph.scope={self.report.scope} was captured, "
            f"where graphs and the optimizer look for it; change tensors in place, such as by copy_"
        )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
