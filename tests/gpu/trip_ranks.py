"""Trips of tokens between GPUs, as cases of `tests.distributed.ranks`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphmoe.ops.symm.peers import beside_products_on
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.trips import EXPERTS, GRADIENTS, Results, Trip, on_host
from tests.gpu.sleeping import (
    Replayed,
    assert_host_is_back_while_the_device_sleeps,
    captured,
    syncs_are_errors,
)


def change(trip: Trip, rank: int, inputs: Sequence[Tensor], number: int) -> None:
    """Fill the inputs with those of a number: other tokens, weights, routing and gradients."""
    with torch.no_grad():
        for tensor, value in zip(inputs, trip.inputs(100 * number + rank), strict=True):
            tensor.copy_(value)


@dataclass(frozen=True)
class CapturedTrip(Trip):
    """A trip forward and backward in a graph, replayed with new routing; the same by `AllToAll` behind it."""

    def on_ranks(self, ranks: Ranks, mesh: Mesh, dispatcher: Any) -> tuple[Replayed, Results]:
        inputs = self.inputs(ranks.rank)
        compared = (*GRADIENTS, "number", "room")

        def step() -> list[Tensor]:
            results = self.results(dispatcher, inputs)
            return [results[name] for name in compared]

        replayed = captured(step, lambda number: change(self, ranks.rank, inputs, number))
        wanted = self.exchange(AllToAll(mesh, EXPERTS), *inputs)
        return replayed, on_host(wanted)

    def results(self, dispatcher: Any, inputs: tuple[Tensor, ...]) -> Results:
        return self.exchange(dispatcher, *inputs)


@dataclass(frozen=True)
class TripBesideProducts(CapturedTrip):
    """The same on a stream of its own, with products beside it that take memory and fill it with NaN.

    The gradient that it is given was made on the stream of the products, and is free when these have waited.
    """

    def results(self, dispatcher: Any, inputs: tuple[Tensor, ...]) -> Results:
        products, transfers = torch.cuda.current_stream(), torch.cuda.Stream()
        *others, dy = inputs
        given = dy.clone()
        transfers.wait_stream(products)
        with torch.cuda.stream(transfers), beside_products_on(products):
            results = self.exchange(dispatcher, *others, given)
        for _ in range(4):
            square = torch.full((2048, 2048), float("nan"), device="cuda")
            square @ square
        products.wait_stream(transfers)
        del given
        torch.full_like(dy, float("nan"))  # in the same memory
        return results


@dataclass(frozen=True)
class ManyReplays(Trip):
    """Two graphs of a trip and eager trips in turns, each time with other routing."""

    def on_ranks(self, ranks: Ranks, mesh: Mesh, dispatcher: Any) -> list[dict[str, tuple[Tensor, Tensor]]]:
        inputs, reference = self.inputs(ranks.rank), AllToAll(mesh, EXPERTS)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.exchange(dispatcher, *inputs)
            stream.synchronize()
            graphs, found = [torch.cuda.CUDAGraph() for _ in range(2)], []
            for graph in graphs:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    found.append(self.exchange(dispatcher, *inputs))
            outcomes = []
            for number in range(6):
                change(self, ranks.rank, inputs, number)
                graphs[number % 2].replay()
                results = {name: found[number % 2][name].clone() for name in GRADIENTS}
                eager = self.exchange(dispatcher, *inputs)  # between two replays
                wanted = self.exchange(reference, *inputs)
                assert all(eager[name].equal(wanted[name]) for name in results)
                outcomes.append({name: (x.cpu(), wanted[name].cpu()) for name, x in results.items()})
        torch.cuda.synchronize()
        return outcomes


@dataclass(frozen=True)
class NoWaiting(Trip):
    """Proofs that a trip does not wait for the device."""

    def on_ranks(self, ranks: Ranks, mesh: Mesh, dispatcher: Any) -> bool:
        inputs = self.inputs(ranks.rank)
        for _ in range(3):
            self.exchange(dispatcher, *inputs)
        with syncs_are_errors():
            self.exchange(dispatcher, *inputs)
        ranks.barrier()
        assert_host_is_back_while_the_device_sleeps(lambda: self.exchange(dispatcher, *inputs))
        return True


@dataclass(frozen=True)
class Growing(Trip):
    """Trips of several sizes; one that needs more memory inside a capture must be refused."""

    def on_ranks(self, ranks: Ranks, mesh: Mesh, dispatcher: Any) -> str:
        for tokens, block in ((50, 0), (self.tokens, self.block), (200, 0), (64, 64)):
            trip, inputs = self._sized(dispatcher, ranks, tokens, block)
            wanted = self.exchange(AllToAll(mesh, EXPERTS), *inputs)
            actual = self.exchange(trip, *inputs)
            assert all(actual[name].equal(wanted[name]) for name in GRADIENTS)
            live_A = replace(self, block=block).live(actual, wanted, mesh)
            assert actual["received"][live_A].equal(wanted["received"])
        larger, inputs = self._sized(dispatcher, ranks, 5000, self.block)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.exchange(larger, *inputs)
        except RuntimeError as error:
            return str(error)
        return "captured"

    def _sized(self, dispatcher: Any, ranks: Ranks, tokens: int, block: int) -> tuple[Any, Any]:
        trip = replace(self, tokens=tokens, block=block)
        room = dispatcher.capacity._replace(rows=trip.num_rows)
        return replace(dispatcher, capacity=room, block=block), trip.inputs(ranks.rank)
