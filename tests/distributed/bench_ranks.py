"""The benchmark of exchanges between ranks, as cases of `tests.distributed.ranks`."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

import torch

from graphmoe.bench import dispatch_ways
from graphmoe.bench.cases import Row
from graphmoe.bench.dispatch_suite import TINY, DispatchCase, DispatchSuite, dispatch_cases
from graphmoe.bench.rank_group import RankGroup, RanksFailed
from graphmoe.config.schema import DispatcherChoice
from graphmoe.runtime.dispatch.vendors import close_vendor
from graphmoe.runtime.ranks import Ranks
from tests.distributed.fake_vendors import fake_package
from tests.distributed.trips import PACKAGES

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Suite:
    """The cases whose names begin with one of these."""

    prefixes: tuple[str, ...] = ("",)
    broken: str = ""
    """The function of `dispatch_ways` by whose ways rank 1 gets other rows than were sent."""

    def __call__(self, ranks: Ranks, folder: Path) -> list[Row]:
        if self.broken:
            whole = getattr(dispatch_ways, self.broken)

            def broken(*given) -> dispatch_ways.Way:
                way = whole(*given)
                way.results["dh"].add_(ranks.rank)
                return way

            setattr(dispatch_ways, self.broken, broken)
        sys.modules["deep_ep"] = cast(ModuleType, fake_package(*PACKAGES["deepep"]))
        try:
            suite = DispatchSuite(RankGroup(CPU), repeats=2)
            cases = dispatch_cases(TINY, "0.8", [DispatcherChoice.deepep])
            rows = [r for case in cases if case.name.startswith(self.prefixes) for r in suite.run(case)]
            close_vendor()
            return rows
        finally:
            del sys.modules["deep_ep"]
            if self.broken:
                setattr(dispatch_ways, self.broken, whole)


def too_few_experts(ranks: Ranks, folder: Path) -> list[Row]:
    """Run a shape with fewer experts than ranks and slots need."""
    shape = dataclasses.replace(TINY["v2_lite"], E=2)
    return DispatchSuite(RankGroup(CPU), repeats=1).run(DispatchCase("small", shape, "natural", "pull"))


def one_rank_fails(ranks: Ranks, folder: Path) -> tuple[str, int]:
    """Return what ranks hear of an error on one of them, and the result after it."""
    group = RankGroup(CPU)

    def action() -> int:
        if ranks.rank == 1:
            raise ValueError("no such expert")
        return 7

    try:
        group.together(action)
    except RanksFailed as failed:
        return str(failed), group.together(lambda: 5 + ranks.rank)
    raise AssertionError("nobody heard of it")
