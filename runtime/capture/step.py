"""A whole step that replays from one graph: ``graph.scope=full_iteration``."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from graphmoe.runtime.capture.capture import Capture, Span
from graphmoe.runtime.capture.graphs import Graph
from graphmoe.segments import FULL_ITERATION, profiler_range

Step = Callable[[Iterable[Tensor]], Tensor]
"""Micro-batches -> the step's metrics."""


class CapturedStep:
    """A step that runs uncaptured while the capture warms up, then replays.

    Micro-batches are copied into static buffers: from pinned memory on a side stream, while the device
    still works on the step before. The next step overwrites the result.
    """

    def __init__(self, step: Step, device: torch.device, capture: Capture) -> None:
        self._step, self._device, self._capture = step, device, capture
        self._static: list[Tensor] = []
        self._span = Span(FULL_ITERATION, (), places=1)
        self._graph: tuple[int, Graph] | None = None
        """The program of the capture that replayed last, and its graph."""
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
                self._arrivals.wait()
            for static, batch in zip(self._static, arrived, strict=True):
                static.copy_(batch)
            if self._arrivals is not None:
                self._arrivals.taken()
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
        return self._span.make(self._capture.maker, lambda: (self._step(self._static),), given)


class _Arrivals:
    """Copies of tokens from pinned memory to the device, while it works on the step before."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._staging: list[Tensor] = []
        self._arrived, self._taken = torch.cuda.Event(), torch.cuda.Event()

    def bring(self, given: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Start to copy tokens to tensors that hold them once ``wait`` has been queued. No device sync."""
        if not self._staging:
            self._staging = [torch.empty_like(tensor) for tensor in like]
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._taken)
            for staged, batch in zip(self._staging, given, strict=True):
                staged.copy_(batch, non_blocking=True)
            self._arrived.record()
        return self._staging

    def wait(self) -> None:
        """Let the current stream wait for the tokens."""
        torch.cuda.current_stream().wait_event(self._arrived)

    def taken(self) -> None:
        """Note that the current stream needs the tokens no more."""
        self._taken.record()
