"""Trips of tokens between GPUs that read each other's memory, as cases of `tests.distributed.ranks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from graphmoe.ops import symm
from graphmoe.ops.symm.collective import positions
from graphmoe.ops.symm.peers import beside_products_on
from graphmoe.runtime.dispatch.symm import make_peers
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.symm_trips import SymmTrip, gradients
from tests.gpu.parallel_ranks import Replayed, captured
from tests.gpu.sleeping import assert_host_is_back_while_the_device_sleeps, syncs_are_errors

Run = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
COMPARED = ("out", "dh", "dweight", "number", "arrivals")


@dataclass
class Moving:
    """Inputs at fixed addresses, which ``change`` fills."""

    trip: SymmTrip
    rank: int
    inputs: tuple[Tensor, ...]

    @classmethod
    def of(cls, trip: SymmTrip, rank: int) -> Moving:
        return cls(trip, rank, trip.inputs(rank))

    def change(self, number: int) -> None:
        """The inputs of a number: other tokens, weights, routing and gradients."""
        with torch.no_grad():
            for tensor, value in zip(self.inputs, self.trip.inputs(100 * number + self.rank), strict=True):
                tensor.copy_(value)


@dataclass(frozen=True)
class CapturedTrip(SymmTrip):
    """A trip forward and backward in a graph, replayed with new routing; the same by `AllToAll` behind it."""

    def __call__(self, ranks: Ranks, folder: Path) -> tuple[Replayed, dict[str, Tensor]]:  # type: ignore[override]
        mesh = Mesh(self.layout)
        symm.use_peers(make_peers(mesh, torch.device("cuda")))
        moving, run = Moving.of(self, ranks.rank), self.trip()

        def step() -> list[Tensor]:
            results = self.results(run, moving.inputs)
            return [results[name] for name in COMPARED]

        replayed = captured(step, moving.change)
        wanted = gradients(self.by_alltoall(mesh), *moving.inputs)
        return replayed, {name: wanted[name].cpu() for name in COMPARED if name in wanted}

    def results(self, run: Run, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Results of a trip, and its gradients."""
        return gradients(run, *inputs)


@dataclass(frozen=True)
class TripBesideProducts(CapturedTrip):
    """The same on a stream of its own, with products beside it that take memory and fill it with NaN.

    The gradient that it is given was made on the stream of the products, and is free when these have waited.
    """

    def results(self, run: Run, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        products, transfers = torch.cuda.current_stream(), torch.cuda.Stream()
        *others, dy = inputs
        given = dy.clone()
        transfers.wait_stream(products)
        with torch.cuda.stream(transfers), beside_products_on(products):
            results = gradients(run, *others, given)
        for _ in range(4):
            square = torch.full((2048, 2048), float("nan"), device="cuda")
            square @ square
        products.wait_stream(transfers)
        del given
        torch.full_like(dy, float("nan"))  # in the same memory
        return results


@dataclass(frozen=True)
class ManyReplays(SymmTrip):
    """Two graphs of a trip and eager trips in turns, each time with other routing."""

    def __call__(self, ranks: Ranks, folder: Path) -> list[dict[str, tuple[Tensor, Tensor]]]:  # type: ignore[override]
        mesh = Mesh(self.layout)
        symm.use_peers(make_peers(mesh, torch.device("cuda")))
        moving, run, dispatcher = Moving.of(self, ranks.rank), self.trip(), self.by_alltoall(mesh)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                gradients(run, *moving.inputs)
            stream.synchronize()
            graphs, found = [torch.cuda.CUDAGraph() for _ in range(2)], []
            for graph in graphs:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    found.append(gradients(run, *moving.inputs))
            outcomes = []
            for number in range(6):
                moving.change(number)
                graphs[number % 2].replay()
                results = {name: found[number % 2][name].clone() for name in ("out", "dh", "dweight")}
                eager = gradients(run, *moving.inputs)  # between two replays
                wanted = gradients(dispatcher, *moving.inputs)
                assert all(eager[name].equal(wanted[name]) for name in results)
                outcomes.append({name: (x.cpu(), wanted[name].cpu()) for name, x in results.items()})
        torch.cuda.synchronize()
        return outcomes


@dataclass(frozen=True)
class NoWaiting(SymmTrip):
    """Proofs that a trip does not wait for the device."""

    def __call__(self, ranks: Ranks, folder: Path) -> bool:  # type: ignore[override]
        symm.use_peers(make_peers(Mesh(self.layout), torch.device("cuda")))
        inputs, run = self.inputs(ranks.rank), self.trip()
        for _ in range(3):
            gradients(run, *inputs)
        with syncs_are_errors():
            gradients(run, *inputs)
        ranks.barrier()
        assert_host_is_back_while_the_device_sleeps(lambda: gradients(run, *inputs))
        return True


@dataclass(frozen=True)
class Growing(SymmTrip):
    """Trips of several sizes; one that needs more memory inside a capture must be refused."""

    def __call__(self, ranks: Ranks, folder: Path) -> str:  # type: ignore[override]
        mesh = Mesh(self.layout)
        symm.use_peers(make_peers(mesh, torch.device("cuda")))
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for tokens, block in ((50, 0), (self.tokens, self.block), (200, 0), (64, 64)):
            trip = SymmTrip(**given | {"tokens": tokens, "block": block})
            inputs = trip.inputs(ranks.rank)
            wanted = gradients(trip.by_alltoall(mesh), *inputs)
            actual = gradients(trip.trip(), *inputs)
            assert all(actual[name].equal(wanted[name]) for name in ("out", "dh", "dweight"))
            live_A = positions(actual["arrivals"], mesh.index("ep_etp"), block)
            assert actual["received"][live_A].equal(wanted["received"])
        larger = SymmTrip(**given | {"tokens": 5000})
        inputs, graph = larger.inputs(ranks.rank), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                larger.trip()(*inputs[:3])
        except RuntimeError as error:
            return str(error)
        return "captured"
