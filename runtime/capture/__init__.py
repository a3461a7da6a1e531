"""State that all captures of a run share, their report, and the step captured as one graph."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.config.ranges import number_of
from graphmoe.runtime.capture.graphs import Graph, GraphMaker, Span
from graphmoe.runtime.capture.nodes import MadeBy
from graphmoe.runtime.host.files import dispensable
from graphmoe.segments import FULL_ITERATION, profiler_range

log = logging.getLogger(__name__)

REPORT_FILE = "capture_report.json"


@dataclass
class CaptureReport:
    """Report of all captured spans, written to capture_report.json."""

    scope: str
    # "device", or "host": a stand-in without graphs runs on the same static buffers
    on: str
    warmup_steps: int
    spans: list[Span] = field(default_factory=list)
    # segments that the scope names, and the reason for each
    not_captured: dict[str, str] = field(default_factory=dict)
    # that the allocator holds for the graphs
    pool_bytes: int = 0

    def sums(self) -> dict[str, Any]:
        nodes = [span.nodes for span in self.spans]
        return {
            "graphs": sum(span.graphs for span in self.spans),
            "nodes": None if None in nodes else sum(count or 0 for count in nodes),
            "seconds": sum(span.seconds for span in self.spans),
        }

    def write(self, folder: Path) -> None:
        content = {**asdict(self), **self.sums()}
        (folder / REPORT_FILE).write_text(json.dumps(content, indent=1) + "\n")

    def line(self) -> str:
        made, count, seconds = self.sums().values()
        nodes = "" if count is None else f" of {number_of(count, 'node')}"
        graphs, megabytes = number_of(made, "graph"), f"{self.pool_bytes / 2**20:.0f} MiB"
        return f"captured {self.scope}: {graphs}{nodes} in {seconds:.1f} s, {megabytes} in their pool"


TensorSlot = tuple[Mapping[str, Any], str]  # the dictionary that holds a tensor, and its key there
Step = Callable[[Iterable[Tensor]], Tensor]  # micro-batches -> the step's metrics


class Capture:
    """State shared by all captures of a run."""

    def __init__(
        self, scope: str | Sequence[str], device: torch.device, warmup_steps: int, folder: Path | None = None
    ) -> None:
        """The report is written to ``folder``, if given."""
        name = scope if isinstance(scope, str) else f"[{','.join(scope)}]"
        self._names_segments, self._folder = not isinstance(scope, str), folder
        self.maker, self.warmup_steps = GraphMaker(device), warmup_steps
        self.report = CaptureReport(name, self.maker.on, warmup_steps)
        self.steps = 0  # training steps begun
        self.program: int | None = 0  # of receive levels, for the next steps; None: no replays
        self.made_by: list[MadeBy] = []  # nodes of the newest graph of a whole step, by segment
        self.planned = 0  # last program that was not None: only it may have graphs
        self._begun: dict[int | None, int] = {}  # steps by program
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._names: list[str] = []
        self._slots: list[TensorSlot] = []
        self._addresses: list[int] | None = None
        if device.type == "cpu":
            log.info("a CPU has no graphs: graph.scope=%s calls its functions on static buffers", name)

    def publish(self) -> None:
        """Log the report and write it to the folder."""
        report = self.report
        report.pool_bytes = self.maker.pool_bytes()
        if self._folder is not None:
            with dispensable(self._folder / REPORT_FILE):
                report.write(self._folder)
        log.info(report.line())
        if self._names_segments:  # other scopes may cover segments that a model lacks
            for segment, reason in report.not_captured.items():
                log.warning("graph.scope names %s, which is not captured: %s", segment, reason)

    def watch(self, slots: Mapping[str, TensorSlot]) -> None:
        """Register named tensors that graphs read in place; `step` checks that their addresses stay."""
        self._names, self._slots = list(slots), list(slots.values())

    def use(self, program: int | None) -> bool:
        """Select the program (dispatchers) of later steps. If new: free graphs, warm up, return True."""
        self.program = program
        if program is None or program == self.planned:
            return False
        self.planned = program
        self.maker.drop()
        return True

    @property
    def ready(self) -> bool:
        return self.program is not None and self._begun.get(self.program, 0) > self.warmup_steps

    @property
    def is_first_replay(self) -> bool:
        """Return whether this step is the first after warm-up: it captures graphs and replays them."""
        return self.ready and self._begun[self.program] == self.warmup_steps + 1

    @property
    def has_captured(self) -> bool:
        return self._addresses is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count a step and run it on the graphs' stream. *Raises* RuntimeError if a watched tensor moved."""
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

    def _check_addresses(self) -> None:
        held = [holder.get(key) for holder, key in self._slots]  # on the host, 0.1 us for each tensor
        found = [0 if tensor is None else tensor.data_ptr() for tensor in held]
        if self._addresses is None:
            self._addresses = found
        if found == self._addresses:
            return
        moved = [n for n, a, b in zip(self._names, found, self._addresses, strict=True) if a != b]
        more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
        raise RuntimeError(
            f"{moved[0]}{more} moved after graph.scope={self.report.scope} was captured; graphs and the "
            f"optimizer read the old address, so change tensors in place, such as by copy_"
        )


class CapturedStep:
    """A whole step (``graph.scope=full_iteration``): uncaptured while warming up, then one graph.

    Micro-batches are copied to static buffers; from pinned memory on a side stream, overlapped with the
    previous step. The next step overwrites the result.
    """

    def __init__(self, step: Step, device: torch.device, capture: Capture) -> None:
        self._step, self._device, self._capture = step, device, capture
        self._static: list[Tensor] = []
        self._span = Span(FULL_ITERATION, (), places=1)
        self._graph: tuple[int, Graph] | None = None  # with its program
        self._arrivals = _Arrivals(device) if device.type == "cuda" else None

    def __call__(self, batches: Iterable[Tensor]) -> Tensor:
        """Return the metrics of one step. *Raises* ValueError for a micro-batch of another shape."""
        given = list(batches)
        if not self._static:
            self._static = [torch.empty_like(batch, device=self._device) for batch in given]
        self._check(given)
        arrived = given if self._arrivals is None else self._arrivals.bring(given, self._static)
        with self._capture.step():
            if self._arrivals is not None:
                torch.cuda.current_stream().wait_event(self._arrivals.arrived)
            for static, batch in zip(self._static, arrived, strict=True):
                static.copy_(batch)
            if self._arrivals is not None:
                self._arrivals.taken.record()
            if not self._capture.ready:
                return self._step(self._static)
            if self._graph is None or self._graph[0] != self._capture.planned:
                self._graph = self._capture.planned, self._make(given)
            with profiler_range(FULL_ITERATION, "replay"):
                return self._graph[1].replay()[0]

    def _check(self, given: Sequence[Tensor]) -> None:
        for number, (batch, static) in enumerate(zip(given, self._static, strict=True)):
            if (batch.shape, batch.dtype) != (static.shape, static.dtype):
                raise ValueError(
                    f"segment embed: the tokens of micro-batch {number} are {batch.dtype} "
                    f"{list(batch.shape)}, and the step's buffers are {static.dtype} {list(static.shape)}; "
                    f"graph.scope=none takes any shape"
                )

    def _make(self, given: Sequence[Tensor]) -> Graph:
        if not self._span.graphs:
            self._capture.report.spans.append(self._span)
        graph = self._span.make(self._capture.maker, lambda: (self._step(self._static),), given)
        self._capture.made_by = graph.made_by()
        return graph


class _Arrivals:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._staging: list[Tensor] = []
        # the copies are complete; the step has read them
        self.arrived, self.taken = torch.cuda.Event(), torch.cuda.Event()

    def bring(self, given: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Start copies of ``given`` to device buffers shaped as ``like``; return these. No device sync."""
        if not self._staging:
            self._staging = [torch.empty_like(tensor) for tensor in like]
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self.taken)
            for staged, batch in zip(self._staging, given, strict=True):
                staged.copy_(batch, non_blocking=True)
            self.arrived.record()
        return self._staging
