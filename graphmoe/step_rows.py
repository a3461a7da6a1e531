"""Metrics of the steps since the last read, kept on the device."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.model.moe import ROUTER_STATS

SCALARS = ("loss", "mtp_loss", "grad_norm", "lr", "skipped", "skipped_total", "longest_skip", *ROUTER_STATS)


Mark = torch.cuda.Event | float
"""A moment: an event of the device, or the host's clock in seconds."""
Interval = tuple[Mark, Mark]


class StepRow(NamedTuple):
    """One step, as read by the host."""

    step: int
    seconds: float
    values: dict[str, float]
    """By the names in ``SCALARS``."""
    load: list[float]
    """Largest over mean load of the experts, for each MoE layer."""


@torch.no_grad()
def device_row(scalars: dict[str, Tensor], counts_LE: Tensor) -> Tensor:
    """A step's row: ``SCALARS``, then the largest over mean expert load of each MoE layer; fp32."""
    load_L = counts_LE.amax(dim=1) / counts_LE.float().mean(dim=1).clamp_min(1e-9)
    return torch.cat([torch.stack([scalars[name].float() for name in SCALARS]), load_L])


class StepRows:
    """A device buffer of metrics, one row a step; the host reads all rows at once."""

    def __init__(self, capacity: int, num_moe_layers: int, device: torch.device) -> None:
        self.buffer = torch.zeros(capacity, len(SCALARS) + num_moe_layers, device=device)
        self.steps: list[int] = []
        self.clock = StepClock(device)

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, step: int, row: Tensor) -> None:
        """Keep the row of a finished step, from ``device_row``. No device sync."""
        self.buffer[len(self.steps)].copy_(row)
        self.steps.append(step)
        self.clock.mark()

    def hand_over(self) -> PendingRows:
        """The rows since the last time, on their way to the host. No device sync."""
        rows = self.buffer[: len(self.steps)]
        pending = PendingRows(self.steps, rows, self.clock.hand_over())
        self.steps = []
        return pending


class PendingRows:
    """Rows on their way to the host."""

    def __init__(self, steps: list[int], rows: Tensor, intervals: list[Interval]) -> None:
        self._steps, self._intervals = steps, intervals
        self._host = torch.empty(rows.shape, pin_memory=rows.is_cuda).copy_(rows, non_blocking=True)
        self._arrived = torch.cuda.Event() if rows.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[StepRow]:
        """The rows; waits until they are there, not for what the device was given after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        parts = zip(self._steps, self._intervals, self._host.tolist(), strict=True)
        return [
            StepRow(step, seconds(*interval), dict(zip(SCALARS, row, strict=False)), row[len(SCALARS) :])
            for step, interval, row in parts
        ]


class StepClock:
    """Time between marks: device events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Mark] = []
        self.restart()

    def restart(self) -> None:
        """Start the next interval here, so that what came before counts for no step."""
        self._marks = [self._now()]

    def mark(self) -> None:
        """End an interval here and start the next. No device sync."""
        self._marks.append(self._now())

    def hand_over(self) -> list[Interval]:
        """Each finished interval since the last time, for ``seconds``. No device sync."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        self._marks = self._marks[-1:]
        return pairs

    def _now(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def seconds(start: Mark, end: Mark) -> float:
    """Length of an interval that the device has finished."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return start.elapsed_time(end) / 1e3
