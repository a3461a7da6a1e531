"""Time of a step in which this rank waits for others, on its device's clock, inside of graphs too."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graphmoe.ops import IN_USE


class Waits:
    """Nanoseconds of waits since `begin`, on the device."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self._counts = False

    def begin(self, *, counts: bool) -> None:
        """Reset to 0. Without ``counts`` only waits in graphs count, at no cost on the host."""
        self._counts = counts
        self.total.zero_()

    @property
    def active(self) -> bool:
        return self._counts or (self.total.is_cuda and torch.cuda.is_current_stream_capturing())

    def add_clock(self, sign: int) -> None:
        """Add the time, times ``sign``, to the total. No device sync."""
        if self.total.is_cuda:
            from graphmoe.ops.waits_kernel import add_clock

            add_clock(self.total, sign)
        else:
            self.total += sign * time.perf_counter_ns()


def use_waits(waits: Waits | None) -> None:
    """Set what counts this process's waits; None counts nothing."""
    IN_USE.waits = waits


@contextmanager
def waiting() -> Iterator[None]:
    """Context of a collective that the host or the current stream waits for."""
    waits: Waits | None = IN_USE.waits
    if waits is None or not waits.active:
        yield
        return
    waits.add_clock(-1)
    try:
        yield
    finally:
        waits.add_clock(1)
