"""What is captured, and how it is reported."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from runtime.graphs import GraphMaker

REPORT_FILE = "capture_report.json"


@dataclass
class Span:
    """Neighbouring segments that replay together."""

    unit: str
    segments: tuple[str, ...]
    """Empty for the whole step."""
    places: int = 0
    """Places of the model that they are at, each with graphs of its own."""
    graphs: int = 0
    seconds: float = 0.0
    """Time that the graphs took to make."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Counts a graph that is made inside."""
        started = time.perf_counter()
        yield
        self.graphs += 1
        self.seconds += time.perf_counter() - started


@dataclass
class CaptureReport:
    """What was captured; ``write`` makes capture_report.json of it."""

    scope: str
    on: str
    """device, or host: where there are no graphs, a stand-in runs from the same static buffers."""
    warmup_steps: int
    """Steps that ran uncaptured before."""
    spans: list[Span] = field(default_factory=list)
    not_captured: dict[str, str] = field(default_factory=dict)
    """Segments that the scope names, and why they are not captured."""
    pool_bytes: int = 0
    """What the device's allocator took for the graphs' memory."""

    @property
    def graphs(self) -> int:
        return sum(span.graphs for span in self.spans)

    @property
    def seconds(self) -> float:
        return sum(span.seconds for span in self.spans)

    def write(self, folder: Path) -> None:
        """Write capture_report.json."""
        content = {**asdict(self), "graphs": self.graphs, "seconds": self.seconds}
        (folder / REPORT_FILE).write_text(json.dumps(content, indent=1) + "\n")

    def line(self) -> str:
        """One line for the log."""
        return (
            f"captured {self.scope}: {self.graphs} graphs in {self.seconds:.1f} s, "
            f"{self.pool_bytes / 2**20:.0f} MiB in their pool"
        )


class Capture:
    """What everything that is captured in a run shares."""

    def __init__(self, scope: str, device: torch.device, warmup_steps: int) -> None:
        self.maker, self.warmup_steps = GraphMaker(device), warmup_steps
        self.report = CaptureReport(scope, self.maker.on, warmup_steps)
        self.steps = 0
        """Training steps that have begun."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def ready(self) -> bool:
        """Whether graphs replay by now."""
        return self.steps > self.warmup_steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count a training step and run it on the stream of the graphs; the current one waits for it."""
        self.steps += 1
        if self.steps == self.warmup_steps + 1:
            self.maker.prepare()
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)
