"""Times of exchanges between ranks: alone, and beside the products of experts.

A sample is a number of rounds, which all ranks begin at once. In each turn of a round an exchange runs on a
stream of its own and products on another, which then wait for each other. On a GPU all rounds are one graph
where the exchange can be captured. A CPU runs one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from graphmoe.bench.rank_group import RankGroup
from graphmoe.ops.symm.peers import beside_products_on

ROUNDS = {"cuda": 8, "cpu": 1}
"""Rounds of a sample, by device: ranks that come late at the first do not at the others."""
WARM_UP_SAMPLES = 2
PRIORITY = -1
"""Priority of the stream of exchanges, before products; NCCL has streams of its own, of the usual one."""
Call = Callable[[], object]
Turn = tuple[Call | None, Call | None]
"""An exchange, and products beside it."""
T = TypeVar("T")


class Streams:
    """Streams of exchanges and of products; both are the host on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        # First in line for SMs that become free, or an exchange begins when the products end
        self.exchanges = torch.cuda.Stream(priority=PRIORITY) if self.on_gpu else None
        self.products = torch.cuda.Stream() if self.on_gpu else None

    def in_exchanges(self, call: Callable[[], T]) -> T:
        """Run a call on the stream of exchanges, after what was queued and before what will be."""
        if self.exchanges is None:
            return call()
        now = torch.cuda.current_stream()
        self.exchanges.wait_stream(now)
        with torch.cuda.stream(self.exchanges):
            result = call()
        now.wait_stream(self.exchanges)
        return result


def samples_ms(
    ranks: RankGroup, streams: Streams, turns: Sequence[Turn], *, repeats: int, captures: bool
) -> list[float]:
    """Milliseconds of a round in each sample: the slowest rank's, equal on all ranks. Collective.

    A round is these turns, one after the other. Waits for the device.
    """

    rounds = ROUNDS[ranks.device.type]

    def all_rounds() -> None:
        for _ in range(rounds):
            for turn in turns:
                _take(streams, *turn, exchange_first=captures)

    run = _captured(ranks, streams, all_rounds) if captures else all_rounds
    times = [_sample_ms(ranks, streams, run) for _ in range(WARM_UP_SAMPLES + repeats)]
    of_ranks = ranks.gather(times[WARM_UP_SAMPLES:])
    return [max(of_sample) / rounds for of_sample in zip(*of_ranks, strict=True)]


def _take(streams: Streams, exchange: Call | None, products: Call | None, *, exchange_first: bool) -> None:
    """Queue both. An exchange that lets the host wait must come second, one that is captured packs first."""
    if streams.exchanges is None:
        for call in (exchange, products):
            if call is not None:
                call()
        return
    now = torch.cuda.current_stream()
    streams.exchanges.wait_stream(now)
    if products is not None and not exchange_first:
        products()
    if exchange is not None:
        with torch.cuda.stream(streams.exchanges), beside_products_on(now):
            exchange()
    if products is not None and exchange_first:
        products()
    now.wait_stream(streams.exchanges)


def _captured(ranks: RankGroup, streams: Streams, run: Call) -> Call:
    """The same as a graph's replay. It ran once before, so nothing is compiled or reserved in the capture."""
    assert streams.products is not None
    with torch.cuda.stream(streams.products):
        run()
    torch.cuda.synchronize()
    ranks.gather(None)  # no rank replays while another captures
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams.products, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _sample_ms(ranks: RankGroup, streams: Streams, run: Call) -> float:
    if streams.products is None:
        ranks.meet()
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(streams.products):
        ranks.meet()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
