"""Metrics of the steps since the last read, kept on the device."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.model.moe import ROUTER_STATS

SCALARS = ("loss", "mtp_loss", "grad_norm", "lr", "skipped", "skipped_total", "longest_skip", *ROUTER_STATS)


class StepRow(NamedTuple):
    """One step, as read by the host."""

    step: int
    seconds: float
    values: dict[str, float]
    """By the names in ``SCALARS``."""
    load: list[float]
    """Largest over mean load of the experts, for each MoE layer."""


class StepRows:
    """A device buffer of metrics, one row a step; the host reads all rows at once."""

    def __init__(self, capacity: int, num_moe_layers: int, device: torch.device) -> None:
        self.buffer = torch.zeros(capacity, len(SCALARS) + num_moe_layers, device=device)
        self.steps: list[int] = []
        self.clock = StepClock(device)

    def __len__(self) -> int:
        return len(self.steps)

    @torch.no_grad()
    def append(self, step: int, scalars: dict[str, Tensor], counts_LE: Tensor) -> None:
        """Keep the row of a finished step. No device sync."""
        row = torch.stack([scalars[name].float() for name in SCALARS])
        load_L = counts_LE.amax(dim=1) / counts_LE.float().mean(dim=1).clamp_min(1e-9)
        self.buffer[len(self.steps)].copy_(torch.cat([row, load_L]))
        self.steps.append(step)
        self.clock.mark()

    def read(self) -> list[StepRow]:
        """The rows since the last read; waits for the device."""
        values = self.buffer[: len(self.steps)].tolist()
        rows = [
            StepRow(step, seconds, dict(zip(SCALARS, row, strict=False)), row[len(SCALARS) :])
            for step, seconds, row in zip(self.steps, self.clock.read(), values, strict=True)
        ]
        self.steps = []
        return rows


class StepClock:
    """Time between marks: device events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []
        self.restart()

    def restart(self) -> None:
        """Start the next interval here, so that what came before counts for no step."""
        self._marks = [self._now()]

    def mark(self) -> None:
        """End an interval here and start the next. No device sync."""
        self._marks.append(self._now())

    def read(self) -> list[float]:
        """Seconds of each finished interval since the last read; the device must be idle."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        seconds = [self._between(start, end) for start, end in pairs]
        self._marks = self._marks[-1:]
        return seconds

    def _now(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _between(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        if isinstance(start, float):
            assert isinstance(end, float)
            return end - start
        assert not isinstance(end, float)
        return start.elapsed_time(end) / 1e3
