"""Metrics of the steps since the last read, copied from the device to the host."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.model.moe import ROUTER_STATS
from graphmoe.plan.experts import Load
from graphmoe.runtime.launch.stamps import wait_for

OF_STEP = ("loss", "mtp_loss", "grad_norm", "lr", "skipped", "skipped_total", "longest_skip", "rank_load")
SCALARS = (*OF_STEP, *ROUTER_STATS)
RECEIVED = ("receive_load", "void")
"""Scalars of a run that makes room for arriving rows without a count: the most that arrived at any rank at
once, over a balanced routing, and 1.0 where there was no room."""
REPLICATED = ("planned_rank_load", "replicas", "replica_gb")
"""Scalars of such a run with replicas of experts: the most slots that arrived at a rank at once, over the
mean; replicas in a micro-batch, of all MoE layers and ranks of ep together; and the GB that they move."""


Mark = torch.cuda.Event | float
"""A moment: an event of the device, or the host's clock in seconds."""
Interval = tuple[tuple[Mark, Mark], ...]
"""Start and end of each part: a pause lies between two of them."""


class StepRow(NamedTuple):
    """One step, as read by the host."""

    step: int
    seconds: float
    values: dict[str, float]
    """By the names in ``SCALARS``, and in ``RECEIVED`` and ``REPLICATED`` where there are such."""
    load_LE: Tensor
    """Load of each expert over the mean of its MoE layer, fp32 on the host."""

    @property
    def load(self) -> list[float]:
        """Largest over mean load of the experts, for each MoE layer."""
        return self.load_LE.amax(dim=1).tolist()


@torch.no_grad()
def device_row(
    scalars: dict[str, Tensor], counts_LE: Tensor, ep: int = 1, received_L2: Tensor | None = None
) -> Tensor:
    """Return a step's fp32 row: ``SCALARS``, loads of all experts; with ``RECEIVED`` where room is planned.

    There ``received_L2``, the `plan.experts.Load` of each MoE layer, is behind all. ``REPLICATED`` follow
    ``RECEIVED`` with replicas.

    A load is over the mean of its MoE layer. The scalar ``rank_load`` is the largest of the ``ep`` ranks that
    share the experts, copies together, the mean of all layers: the one with most is waited for.
    """
    load_LE = over_mean(counts_LE)
    of_ranks_L = over_mean(counts_LE.unflatten(1, (ep, -1)).sum(dim=2)).amax(dim=1)
    scalars = {**scalars, "rank_load": of_ranks_L.mean() if len(of_ranks_L) else load_LE.new_ones(())}
    names = names_of(RECEIVED[0] in scalars, REPLICATED[0] in scalars)
    row = [torch.stack([scalars[name].float() for name in names]), load_LE.flatten()]
    return torch.cat(row if received_L2 is None else [*row, received_L2.flatten().float()])


def over_mean(counts_LX: Tensor) -> Tensor:
    """Divide counts of experts or ranks by the mean of their layer, [L, X] fp32."""
    return counts_LX / counts_LX.float().mean(dim=1, keepdim=True).clamp_min(1e-9)


def names_of(planned: bool, replicated: bool) -> tuple[str, ...]:
    """Names of a row's scalars; ``planned``: there is room for what arrives, ``replicated``: of replicas."""
    return SCALARS + RECEIVED * planned + REPLICATED * replicated


class StepRows:
    """Metrics of the last steps, one row each, copied to the host as soon as the device has made them.

    The host waits where it reads them, and for those that it reads only.
    """

    def __init__(
        self,
        capacity: int,
        experts: tuple[int, int],
        device: torch.device,
        *,
        planned: bool = False,
        replicated: bool = False,
    ) -> None:
        """``capacity`` rows at most are there between two reads; ``experts``: MoE layers, experts of each."""
        self._names, self._experts = names_of(planned, replicated), experts
        on_gpu = device.type == "cuda"
        self._end = len(self._names) + math.prod(experts)
        """Place behind the loads of experts."""
        self._host = torch.zeros(capacity, self._end + 2 * experts[0] * planned, pin_memory=on_gpu)
        self._arrived = [torch.cuda.Event() for _ in range(capacity)] if on_gpu else []
        self._steps: list[int] = []
        self._next = 0
        """Place of the next row in the ring."""
        self.clock = StepClock(device)

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, step: int, row: Tensor) -> None:
        """Take the row of a step, from ``device_row``. No device sync."""
        assert len(self) < len(self._host)
        self.clock.mark()  # before the row: who has that has the time too
        self._host[self._next].copy_(row, non_blocking=True)
        if self._arrived:
            self._arrived[self._next].record()
        self._next = (self._next + 1) % len(self._host)
        self._steps.append(step)

    def drop(self, count: int) -> None:
        """Forget the last rows, of steps that are void. Their time is that of the next row."""
        self._steps = self._steps[: len(self) - count]
        self._next = (self._next - count) % len(self._host)
        self.clock.drop(count)

    def received(self, step: int) -> tuple[bool, list[Load]]:
        """Return whether a step is void, and what arrived in each MoE layer, where room is planned.

        Waits for that step, not for later ones.
        """
        row = self._row(self._steps.index(step))
        loads = row[self._end :].view(-1, 2).tolist()
        return self._scalars(row)["void"] > 0, [Load(int(rows), int(slots)) for rows, slots in loads]

    def read(self, last: int | None = None) -> list[StepRow]:
        """Return and forget the rows up to a step, or all. Waits as ``received`` does."""
        count = len(self) if last is None else self._steps.index(last) + 1
        rows = [self._row(place).clone() for place in range(count)]
        steps, self._steps = self._steps[:count], self._steps[count:]
        return [
            StepRow(
                step,
                seconds(interval),
                self._scalars(row),
                row[len(self._names) : self._end].view(self._experts),
            )
            for step, interval, row in zip(steps, self.clock.hand_over(count), rows, strict=True)
        ]

    def _scalars(self, row: Tensor) -> dict[str, float]:
        return dict(zip(self._names, row[: len(self._names)].tolist(), strict=True))

    def _row(self, place: int) -> Tensor:
        number = (self._next - len(self) + place) % len(self._host)
        if self._arrived:
            wait_for(self._arrived[number].synchronize)
        return self._host[number]


class StepClock:
    """Time between marks, pauses apart: device events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Start the next interval here, so that what came before counts for no step."""
        self._ended: list[Interval] = []
        self._parts: Interval = ()
        """Parts of the interval under way before its last pause."""
        self._since = self._now()

    def mark(self) -> None:
        """End an interval here and start the next. No device sync."""
        now = self._now()
        self._ended.append((*self._parts, (self._since, now)))
        self._parts, self._since = (), now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of every step. No device sync.

        On a GPU it is the time from the end of what was queued before it to the start of what is queued next.
        """
        self._parts = (*self._parts, (self._since, self._now()))
        try:
            yield
        finally:
            self._since = self._now()

    def drop(self, count: int) -> None:
        """Let the last intervals be part of the next one."""
        kept = len(self._ended) - count
        self._parts = (*chain.from_iterable(self._ended[kept:]), *self._parts)
        self._ended = self._ended[:kept]

    def hand_over(self, count: int) -> list[Interval]:
        """Return the first intervals not handed over yet, for ``seconds``. No device sync."""
        given, self._ended = self._ended[:count], self._ended[count:]
        return given

    def _now(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def seconds(interval: Interval) -> float:
    """Length of an interval that the device has finished, without its pauses."""
    return sum(
        end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3  # type: ignore
        for start, end in interval
    )
