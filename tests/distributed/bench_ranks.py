"""The benchmark of exchanges between ranks, as cases of `tests.distributed.ranks`."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from graphmoe.benchmarks import dispatch_ways, rank_group
from graphmoe.benchmarks.dispatch_suite import TINY, DispatchCase, DispatchSuite, dispatch_cases
from graphmoe.benchmarks.dispatch_table import DispatchRow
from graphmoe.benchmarks.rank_group import Ranks, RanksFailed
from graphmoe.world import World

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Suite:
    """The cases whose names begin with one of these."""

    prefixes: tuple[str, ...] = ("",)
    broken: bool = False
    """Whether rank 1 gets other rows than were sent, by all ways but `alltoall`."""

    def __call__(self, world: World, folder: Path) -> list[DispatchRow]:
        whole = dispatch_ways.by_symm

        def by_symm(*given) -> dispatch_ways.Way:
            way = whole(*given)
            way.results["dh"].add_(world.rank)
            return way

        dispatch_ways.by_symm = by_symm if self.broken else whole
        try:
            suite, cases = DispatchSuite(Ranks(CPU), repeats=2), dispatch_cases(TINY, "0.8")
            return [r for case in cases if case.name.startswith(self.prefixes) for r in suite.run(case)]
        finally:
            dispatch_ways.by_symm = whole


def too_few_experts(world: World, folder: Path) -> list[DispatchRow]:
    """What a shape gives whose experts are fewer than ranks and slots need."""
    shape = dataclasses.replace(TINY["v2_lite"], E=2)
    return DispatchSuite(Ranks(CPU), repeats=1).run(DispatchCase("small", shape, "natural", "pull"))


def one_rank_fails(world: World, folder: Path) -> tuple[str, int]:
    """What ranks hear of an error on one of them, and that they go on."""
    ranks = Ranks(CPU)

    def action() -> int:
        if world.rank == 1:
            raise ValueError("no such expert")
        return 7

    try:
        ranks.together(action)
    except RanksFailed as failed:
        return str(failed), ranks.together(lambda: 5 + world.rank)
    raise AssertionError("nobody heard of it")


def others_wait_for_the_one_that_fails(world: World, folder: Path) -> None:
    """Rank 0 waits in a collective that rank 1 does not come to."""
    rank_group.PATIENCE = timedelta(seconds=2)
    ranks = Ranks(CPU)

    def action() -> None:
        if world.rank == 1:
            raise ValueError("no such expert")
        dist.barrier()
        time.sleep(600)

    ranks.together(action)
