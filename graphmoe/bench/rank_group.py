"""The ranks of a benchmark, which torchrun starts, and what becomes of an error on one of them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from graphmoe.bench.cases import reason
from graphmoe.plan.layout import Layout
from graphmoe.runtime.host.environment import MULTICAST
from graphmoe.runtime.ranks import Mesh, backend_of

T = TypeVar("T")
log = logging.getLogger(__name__)
PATIENCE = timedelta(minutes=3)
"""For ranks to come together after what each did; the first call of a kernel compiles it."""


class RanksFailed(Exception):
    """Errors by rank; raised on all ranks."""


class RankGroup:
    """All ranks of the job, each with the experts of one index of ``ep``. Making one is collective."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = Mesh(Layout(dp=self.size, ep=self.size))
        self._objects = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._signal = torch.zeros(1, device=device)

    def together(self, action: Callable[[], T]) -> T:
        """Return the action's result here, once all ranks have done it. Collective. *Raises* RanksFailed.

        That is raised on every rank. An error is printed with its rank at once. Where the others wait for
        that rank in a collective of the action, and so do not come here within `PATIENCE`, the process
        ends, and torchrun ends theirs.
        """
        result: T | None = None
        failed: str | None = None
        try:
            result = action()
        except Exception as error:  # whatever a kernel, a collective or the allocator may raise
            log.exception("rank %d of %d failed", self.rank, self.size)
            failed = reason(error)
        try:
            errors = self.gather(failed)
        except RuntimeError as error:
            log.error("rank %d of %d ends: the ranks did not come together: %s", self.rank, self.size, error)
            _end()
        if any(errors):
            found = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
            raise RanksFailed("; ".join(found))
        return result  # type: ignore[return-value]

    def gather(self, item: T) -> list[T]:
        """Every rank's item, in the order of ranks, on every rank."""
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self._objects)
        return items

    def meet(self) -> None:
        """Let what follows on the current stream begin on all ranks at once. No device sync on a GPU."""
        dist.all_reduce(self._signal)


@contextmanager
def joined_ranks(device: torch.device) -> Iterator[RankGroup]:
    """The ranks that torchrun started, with NVLink multicast off; the GPU must be this rank's own."""
    os.environ.update(MULTICAST)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend_of(device))
    yield RankGroup(device)  # no finally: after an error a rank may be stuck in a collective
    dist.destroy_process_group()


def _end() -> NoReturn:
    """End at once: other ends of a process wait for what its GPU does, which may wait for other ranks."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
