"""Ranks of a benchmark that torchrun starts: one rank's error fails all, the slowest rank's time counts.

A round is a list of turns: an exchange and GEMMs on two streams, which then wait for each other (on a CPU
one after the other). A sample is the time of several rounds, which all ranks begin at once; on a GPU they
are one graph if the exchange can be captured.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from graphmoe.bench.cases import Call, CaseFailed, reason
from graphmoe.ops.symm.peers import beside_products_on
from graphmoe.plan.layout import Layout
from graphmoe.runtime.host.environment import MULTICAST
from graphmoe.runtime.ranks import Mesh, Ranks, backend_of

T = TypeVar("T")
log = logging.getLogger(__name__)
PATIENCE = timedelta(minutes=3)  # until all ranks have done an action; a kernel's first call compiles it
ROUNDS = {"cuda": 8, "cpu": 1}  # of a sample: ranks that come late at the first do not at the others
WARM_UP_SAMPLES = 2
PRIORITY = -1  # of the stream of exchanges, before products; NCCL has streams of its own, of the usual one
Turn = tuple[Call | None, Call | None]


class RankGroup(Ranks):
    """All ranks of the job, in one ``ep`` group. Construction is collective."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(PATIENCE)
        self.device, self.mesh = device, Mesh(Layout(dp=self.size, ep=self.size))
        on_gpu = device.type == "cuda"
        # First in line for SMs that become free, or an exchange begins when the products end
        self.exchanges = torch.cuda.Stream(priority=PRIORITY) if on_gpu else None
        self.products = torch.cuda.Stream() if on_gpu else None
        self._signal = torch.zeros(1, device=device)

    def together(self, action: Callable[[], T]) -> T:
        """Run the action on all ranks; return its result on this rank. Collective.

        *Raises* CaseFailed on every rank for an error of one. If the others wait for that rank in a
        collective of the action longer than `PATIENCE`, the process ends, and torchrun ends the others.
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
            log.error("rank %d of %d exits: the ranks could not connect: %s", self.rank, self.size, error)
            sys.stdout.flush()
            os._exit(1)  # other ends of a process wait for its GPU, which may wait for other ranks
        if found := [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]:
            raise CaseFailed("; ".join(found))
        return result  # type: ignore[return-value]

    def meet(self) -> None:
        """Make all ranks start the next work on the current stream at once. No device sync on a GPU."""
        dist.all_reduce(self._signal)

    def in_exchanges(self, call: Callable[[], T]) -> T:
        """Run a call on the exchanges' stream, in order with earlier and later work of the current stream."""
        if self.exchanges is None:
            return call()
        now = torch.cuda.current_stream()
        self.exchanges.wait_stream(now)
        with torch.cuda.stream(self.exchanges):
            result = call()
        now.wait_stream(self.exchanges)
        return result


@contextmanager
def joined_ranks(device: torch.device) -> Iterator[RankGroup]:
    """Context with the process group of torchrun's ranks; NVLink multicast is off."""
    os.environ.update(MULTICAST)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend_of(device))
    yield RankGroup(device)  # no finally: after an error a rank may be stuck in a collective
    dist.destroy_process_group()


def samples_ms(ranks: RankGroup, turns: Sequence[Turn], *, repeats: int, captures: bool) -> list[float]:
    """Return ms of a round of ``turns`` on the slowest rank, by sample. Collective; syncs the device."""
    rounds = ROUNDS[ranks.device.type]

    def all_rounds() -> None:
        for exchange, products in [*turns] * rounds:
            _take(ranks, exchange, products, exchange_first=captures)

    run = _captured(ranks, all_rounds) if captures else all_rounds
    times = [_sample_ms(ranks, run) for _ in range(WARM_UP_SAMPLES + repeats)]
    of_ranks = ranks.gather(times[WARM_UP_SAMPLES:])
    return [max(of_sample) / rounds for of_sample in zip(*of_ranks, strict=True)]


def _take(ranks: RankGroup, exchange: Call | None, products: Call | None, *, exchange_first: bool) -> None:
    if ranks.exchanges is None:
        for call in filter(None, (exchange, products)):
            call()
        return
    now = torch.cuda.current_stream()
    ranks.exchanges.wait_stream(now)
    for call in filter(None, (exchange, products) if exchange_first else (products, exchange)):
        if call is products:
            call()
            continue
        with torch.cuda.stream(ranks.exchanges), beside_products_on(now):
            call()
    now.wait_stream(ranks.exchanges)


def _captured(ranks: RankGroup, run: Call) -> Call:
    assert ranks.products is not None
    with torch.cuda.stream(ranks.products):
        run()
    torch.cuda.synchronize()
    ranks.barrier()  # no rank replays while another captures
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=ranks.products, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _sample_ms(ranks: RankGroup, run: Call) -> float:
    if ranks.products is None:
        ranks.meet()
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(ranks.products):
        ranks.meet()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
