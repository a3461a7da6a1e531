"""Metrics of steps, copied from the device to the host."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.model.moe_segments import ROUTER_STATS
from graphmoe.ops.timing import Moment, moment, seconds_between
from graphmoe.ops.waits import Waits
from graphmoe.plan.experts import Load
from graphmoe.runtime.launch.stamps import wait_for

OF_STEP = ("loss", "mtp_loss", "grad_norm", "lr", "skipped", "skipped_total", "longest_skip", "rank_load")
SCALARS = (*OF_STEP, *ROUTER_STATS)
# scalars with a receive capacity: the largest rank load over a balanced one, and 1.0 on overflow
RECEIVED = ("receive_load", "void")
# scalars with replicas: the largest slots of any rank over the mean, replicas per micro-batch over all MoE
# layers and ranks of ep, and GB moved
REPLICATED = ("planned_rank_load", "replicas", "replica_gb")
# scalars with ``data.document_mask``: the mean number of keys that a position attends to
MASKED = ("attended_keys",)
# scalars if labels may be ignored: labels of the global batch that are not
TRAINED = ("trained_tokens",)
# scalars with ``optim.qk_clip``: the bound of all attention logits
CLIPPED = ("max_logit",)
# scalars with ``train.rerun``: this rank's mean loss and gradient norm, before sums over ranks
OWN = ("own_loss", "own_grad")
Interval = tuple[tuple[Moment, Moment], ...]  # start and end of each part between pauses


class StepRow(NamedTuple):
    step: int
    seconds: float
    values: dict[str, float]  # ``SCALARS`` by name; those of ``RECEIVED`` to ``OWN`` if there are any
    load_LE: Tensor  # load of each expert over the mean of its layer, fp32
    waited_s: float = 0.0  # of ``seconds``, in logged steps and in graphs

    @property
    def load(self) -> list[float]:
        """Return the largest expert load over the mean, for each MoE layer."""
        return self.load_LE.amax(dim=1).tolist()


@torch.no_grad()
def device_row(
    scalars: dict[str, Tensor], counts_LE: Tensor, ep: int = 1, received_L2: Tensor | None = None
) -> Tensor:
    """Return a step's metrics, fp32: scalars, expert loads [L, E], received rows and slots if given.

    Loads are divided by the mean load of their MoE layer. ``rank_load`` is the largest of the ``ep`` ranks,
    averaged over layers.
    """
    load_LE = over_mean(counts_LE)
    of_ranks_L = over_mean(counts_LE.unflatten(1, (ep, -1)).sum(dim=2)).amax(dim=1)
    scalars = {**scalars, "rank_load": of_ranks_L.mean() if len(of_ranks_L) else load_LE.new_ones(())}
    names = names_of(
        *(names[0] in scalars for names in (RECEIVED, REPLICATED, MASKED, TRAINED, CLIPPED, OWN))
    )
    row = [torch.stack([scalars[name].float() for name in names]), load_LE.flatten()]
    return torch.cat(row if received_L2 is None else [*row, received_L2.flatten().float()])


def over_mean(counts_LX: Tensor) -> Tensor:
    return counts_LX / counts_LX.float().mean(dim=1, keepdim=True).clamp_min(1e-9)


def names_of(
    planned: bool, replicated: bool, masked: bool = False, ignores: bool = False, clipped: bool = False,
    reruns: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    first = SCALARS + RECEIVED * planned + REPLICATED * replicated
    return first + MASKED * masked + TRAINED * ignores + CLIPPED * clipped + OWN * reruns


class StepRows:
    """Ring buffer of steps' metrics, copied to the host once the device has computed them."""

    def __init__(
        self,
        capacity: int,
        experts: tuple[int, int],
        device: torch.device,
        *,
        planned: bool = False,
        replicated: bool = False,
        masked: bool = False,
        ignores: bool = False,
        clipped: bool = False,
        reruns: bool = False,
        waits: Waits | None = None,
    ) -> None:
        """``capacity``: most rows between reads; ``experts``: MoE layers, experts of each."""
        self._names = names_of(planned, replicated, masked, ignores, clipped, reruns)
        self._experts = experts
        on_gpu = device.type == "cuda"
        self._end = len(self._names) + math.prod(experts)
        self._host = torch.zeros(capacity, self._end + 2 * experts[0] * planned, pin_memory=on_gpu)
        self.waits, self._waited = waits, torch.zeros(capacity, dtype=torch.int64, pin_memory=on_gpu)
        self._arrived = [torch.cuda.Event() for _ in range(capacity)] if on_gpu else []
        self._steps: list[int] = []
        self._next = 0
        self.clock = StepClock(device)

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, step: int, row: Tensor) -> None:
        """Start copying a step's metrics to the host. No device sync."""
        assert len(self) < len(self._host)
        self.clock.mark()  # before the row, so a complete row has its time
        self._host[self._next].copy_(row, non_blocking=True)
        if self.waits:
            self._waited[self._next].copy_(self.waits.total, non_blocking=True)
        if self._arrived:
            self._arrived[self._next].record()
        self._next = (self._next + 1) % len(self._host)
        self._steps.append(step)

    def drop(self, count: int) -> None:
        """Drop the metrics of the last steps, which overflowed; their time counts for the next one."""
        self._steps = self._steps[: len(self) - count]
        self._next = (self._next - count) % len(self._host)
        self.clock.drop(count)

    def received(self, step: int) -> tuple[bool, list[Load]]:
        """Return whether a step overflowed, and each MoE layer's load. Waits for that step."""
        row = self._row(self._steps.index(step))
        loads = row[self._end :].view(-1, 2).tolist()
        return self.scalars(row)["void"] > 0, [Load(int(rows), int(slots)) for rows, slots in loads]

    def values(self, step: int) -> dict[str, float]:
        """Return a step's scalars by name. Waits for that step."""
        return self.scalars(self._row(self._steps.index(step)))

    def scalars(self, row: Tensor) -> dict[str, float]:
        """Return the scalars of a ``device_row`` by name. Syncs the device if the row is there."""
        return dict(zip(self._names, row[: len(self._names)].tolist(), strict=True))

    def read(self, last: int | None = None) -> list[StepRow]:
        """Return and drop the metrics of all steps up to ``last``, by default all. Waits for these steps."""
        count = len(self) if last is None else self._steps.index(last) + 1
        places = range(count)
        rows = [(self._row(place).clone(), 1e-9 * int(self._waited[self._number(place)])) for place in places]
        steps, self._steps = self._steps[:count], self._steps[count:]
        return [
            StepRow(
                step,
                seconds(interval),
                self.scalars(row),
                row[len(self._names) : self._end].view(self._experts),
                waited_s,
            )
            for step, interval, (row, waited_s) in zip(steps, self.clock.hand_over(count), rows, strict=True)
        ]

    def _row(self, place: int) -> Tensor:
        number = self._number(place)
        if self._arrived:
            wait_for(self._arrived[number].synchronize)
        return self._host[number]

    def _number(self, place: int) -> int:
        return (self._next - len(self) + place) % len(self._host)


class StepClock:
    """Times steps: intervals between calls of ``mark``, by device events on a GPU, else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Start the next interval here."""
        self._ended: list[Interval] = []
        self._parts: Interval = ()  # parts of the current interval before its last pause
        self._since = moment(self._device)

    def mark(self) -> None:
        """End an interval and start the next. No device sync."""
        now = moment(self._device)
        self._ended.append((*self._parts, (self._since, now)))
        self._parts, self._since = (), now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time, on a GPU that of the work queued in it, counts in no step. No device sync."""
        self._parts = (*self._parts, (self._since, moment(self._device)))
        try:
            yield
        finally:
            self._since = moment(self._device)

    def drop(self, count: int) -> None:
        """Merge the last ``count`` intervals into the next one."""
        kept = len(self._ended) - count
        self._parts = (*chain.from_iterable(self._ended[kept:]), *self._parts)
        self._ended = self._ended[:kept]

    def hand_over(self, count: int) -> list[Interval]:
        """Return and drop the first ``count`` intervals. No device sync."""
        given, self._ended = self._ended[:count], self._ended[count:]
        return given


def seconds(interval: Interval) -> float:
    return sum(seconds_between(start, end) for start, end in interval)
