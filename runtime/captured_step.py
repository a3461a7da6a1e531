"""A training step that replays from one graph: ``graph.scope=full_iteration``."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.graphs import DeviceGraph, Graph, HostGraph

log = logging.getLogger(__name__)
REPORT_FILE = "capture_report.json"
Step = Callable[[Iterable[Tensor]], Tensor]
"""Micro-batches on the device -> the step's metrics."""


@dataclass(frozen=True)
class CaptureReport:
    """What was captured."""

    scope: str
    on: str
    """device, or host: where there are no graphs, a stand-in runs from the same static buffers."""
    graphs: int
    warmup_steps: int
    """Steps that ran uncaptured before."""
    seconds: float
    pool_bytes: int
    """What the device's allocator took for the graph's memory."""


def write_capture_report(folder: Path, report: CaptureReport) -> None:
    """Write capture_report.json."""
    (folder / REPORT_FILE).write_text(json.dumps(asdict(report), indent=1) + "\n")


class CapturedStep:
    """Calls ``step`` for some steps to warm up, then captures it and replays.

    Micro-batches are copied into static buffers: from pinned memory by a stream of its own, while the
    device still works on the step before. The next step overwrites the result.
    """

    def __init__(
        self, step: Step, device: torch.device, warmup_steps: int, captured: Callable[[CaptureReport], None]
    ) -> None:
        """``captured`` is told once what was captured; ``warmup_steps`` >= 1, where compilers still work."""
        self._step, self._device, self._captured = step, device, captured
        self._warmup_steps = self._left = warmup_steps
        self._static: list[Tensor] = []
        self._graph: Graph | None = None
        self._streams = _Streams(device) if device.type == "cuda" else None

    def __call__(self, batches: Iterable[Tensor]) -> Tensor:
        """The metrics of one step. *Raises* ValueError for a micro-batch of another shape."""
        given = list(batches)
        if not self._static:
            self._static = [torch.empty_like(batch, device=self._device) for batch in given]
        self._check(given)
        if self._streams is not None:
            with self._streams.step(self._static, given):
                return self._run(given)
        for static, batch in zip(self._static, given, strict=True):
            static.copy_(batch)
        return self._run(given)

    def say_if_nothing(self) -> None:
        """Warn, at the end of a run, if it was too short to capture anything."""
        if self._graph is None:
            log.warning(
                "graph.scope=full_iteration captured nothing: the run did %d steps, and "
                "graph.warmup_steps=%d run uncaptured first",
                self._warmup_steps - self._left,
                self._warmup_steps,
            )

    def _check(self, given: Sequence[Tensor]) -> None:
        for number, (batch, static) in enumerate(zip(given, self._static, strict=True)):
            if (batch.shape, batch.dtype) != (static.shape, static.dtype):
                raise ValueError(
                    f"segment embed: the tokens of micro-batch {number} are {batch.dtype} "
                    f"{list(batch.shape)}, and the step's buffers are {static.dtype} {list(static.shape)}; "
                    f"graph.scope=none takes any shape"
                )

    def _run(self, given: Sequence[Tensor]) -> Tensor:
        if self._left:
            self._left -= 1
            return self._step(self._static)
        if self._graph is None:
            self._graph = self._capture(given)
        return self._graph.replay()

    def _capture(self, given: Sequence[Tensor]) -> Graph:
        started = time.perf_counter()
        graph: DeviceGraph | HostGraph
        if self._streams is not None:
            graph = DeviceGraph(lambda: self._step(self._static), self._streams.compute)
        else:
            graph = HostGraph(lambda: self._step(self._static), given)
        report = CaptureReport(
            scope="full_iteration",
            on="host" if self._streams is None else "device",
            graphs=1,
            warmup_steps=self._warmup_steps,
            seconds=time.perf_counter() - started,
            pool_bytes=graph.pool_bytes,
        )
        self._captured(report)
        return graph


class _Streams:
    """The stream that steps run on, captured or not, and the one that brings their tokens."""

    def __init__(self, device: torch.device) -> None:
        self.compute, self._copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._staging: list[Tensor] = []
        self._arrived, self._taken = torch.cuda.Event(), torch.cuda.Event()

    @contextmanager
    def step(self, static: Sequence[Tensor], given: Sequence[Tensor]) -> Iterator[None]:
        """Bring the tokens into ``static``, and run what is inside on ``compute``. No device sync."""
        if not self._staging:
            self._staging = [torch.empty_like(tensor) for tensor in static]
        outside = torch.cuda.current_stream(self.compute.device)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._taken)
            for staged, batch in zip(self._staging, given, strict=True):
                staged.copy_(batch, non_blocking=True)
            self._arrived.record()
        self.compute.wait_stream(outside)
        with torch.cuda.stream(self.compute):
            self.compute.wait_event(self._arrived)
            for tensor, staged in zip(static, self._staging, strict=True):
                tensor.copy_(staged)
            self._taken.record()
            yield
        outside.wait_stream(self.compute)
