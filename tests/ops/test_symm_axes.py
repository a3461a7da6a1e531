"""Collectives of an axis over peer memory are those of the definition, by interpreted or real kernels."""

import itertools
import math
from unittest.mock import MagicMock, Mock

import pytest
import torch

from graphmoe.ops import IN_USE, collectives
from graphmoe.ops.symm import launches
from graphmoe.runtime.capture.graphs import GraphMaker
from tests.emulated_peers import GUARD, Emulation
from tests.ops.interpreted import KERNELS, device_of

RUN = {
    "all_gather": lambda x, size, dim: collectives.all_gather(x, "tp", size, dim),
    "reduce_scatter": lambda x, size, dim: collectives.reduce_scatter(x, "tp", size, dim),
    "all_to_all": lambda x, size, dim: collectives.all_to_all(x, "tp", size, dim, 1 - dim),
}
SHAPES = [(12, 24, 16), (12, 24, 5, 8), (12, 24, 3), (12, 12)]


def values(shape, dtype, seed, device):
    # small integers, whose sums are exact
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).to(device, dtype)


def expected(kind, xs, rank, dim):
    if kind == "all_gather":
        return torch.cat(xs, dim)
    if kind == "reduce_scatter":
        return torch.stack(xs).sum(0).chunk(len(xs), dim)[rank]
    return torch.cat([x.chunk(len(xs), dim)[rank] for x in xs], 1 - dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", KERNELS)
def test_collectives_in_a_row_are_those_of_the_definition(backend, size, dtype):
    emulation, device = Emulation(size, device_of(backend)), device_of(backend)
    calls = [*itertools.product(RUN, SHAPES, (0, 1))]

    def body(peers):
        results = []
        for seed, (kind, shape, dim) in enumerate(calls):
            x = values(shape, dtype, 10 * seed + peers.rank, device)
            x = x.transpose(0, 1).contiguous().transpose(0, 1) if seed % 2 else x
            results.append(RUN[kind](x, size, dim))
            x.fill_(float("nan"))
        return results

    for rank, results in enumerate(emulation.run(body)):
        for seed, ((kind, shape, dim), result) in enumerate(zip(calls, results, strict=True)):
            xs = [values(shape, dtype, 10 * seed + other, device) for other in range(size)]
            assert result.equal(expected(kind, xs, rank, dim)), (kind, shape, dim)
    for memory in emulation.of_axis.of_ranks:
        assert bool((memory[:GUARD] == 255).all()) and bool((memory[-GUARD:] == 255).all())


@pytest.mark.parametrize("backend", KERNELS)
def test_a_value_that_is_not_finite_stays_so(backend):
    def body(peers):
        x = torch.zeros(4, 16, device=device_of(backend))
        x[:, peers.rank] = (torch.inf, torch.nan)[peers.rank]
        return collectives.reduce_scatter(x, "tp", 2, 0)

    for result in Emulation(2, device_of(backend)).run(body):
        assert bool(result[:, 0].isposinf().all() and result[:, 1].isnan().all())
        assert not result[:, 2:].any()


@pytest.mark.parametrize("backend", KERNELS)
def test_a_graph_and_what_follows_it_begin_with_a_barrier(backend):
    def body(peers):
        memory, counts = IN_USE.shared["tp"].memory, []
        x = values((4, 16), torch.float32, peers.rank, device_of(backend))

        def gather():
            return (collectives.all_gather(x, "tp", 2, 0),)

        # the stand-in for a graph, with one exchange: its half is not that after the one before
        graph = GraphMaker(torch.device("cpu")).make(gather)
        for run in (gather, gather, graph.replay, graph.replay, gather, gather):
            before = memory.barriers
            run()
            counts.append(memory.barriers - before)
        return counts

    assert Emulation(2, device_of(backend)).run(body) == [[2, 1, 2, 2, 2, 1]] * 2


def test_any_number_of_sums_is_one_launch(monkeypatch):
    kernel = MagicMock()
    monkeypatch.setattr(launches.kernels, "sum_parts_kernel", kernel)
    for shape, dim in (((4, 2**16, 2), 2), ((1, 2**12, 2**18), 1)):  # a launch has 65,535 rows of programs
        part = torch.empty(shape, device="meta").chunk(2, dim)[0]
        launches.sum_parts(Mock(size=2), 0, part, math.prod(shape[:dim]))
    assert [call.args[0] for call in kernel.__getitem__.call_args_list] == [(2**18,), (2**17,)]
