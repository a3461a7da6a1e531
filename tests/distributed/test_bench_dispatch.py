"""suite=dispatch of the benchmark tool: rows of all ways, and errors that name their rank."""

import dataclasses
import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import cast
from unittest import mock

import pytest
import torch

from graphmoe.bench import __main__ as bench
from graphmoe.bench import dispatch_suite
from graphmoe.bench.cases import Row, layers, run_cases
from graphmoe.bench.dispatch_suite import ALL_FOUR, BESIDE, DispatchSuite, ways
from graphmoe.bench.rank_group import RankGroup
from graphmoe.runtime.dispatch import close_dispatcher
from graphmoe.runtime.dispatch.symm import Symm
from graphmoe.runtime.ranks import Ranks
from tests.distributed.fake_vendors import fake_package
from tests.distributed.ranks import run_ranks
from tests.distributed.trips import PACKAGES
from tests.runs import refusal

CPU = torch.device("cpu")
SHAPE = layers(False)["v2_lite"]
WAYS = ("alltoall", "pull", "copy_engine_0.8", "deepep")


def suite(broken: bool, ranks: Ranks, folder: Path) -> list[Row]:
    """All cases, or with ``broken`` one whose ways by symm give rank 1 other rows than were sent."""
    whole = dispatch_suite.way_of

    def way_of(dispatcher, *tokens) -> dispatch_suite.Way:
        way = whole(dispatcher, *tokens)
        way.results["dh"].add_(broken * ranks.rank * isinstance(dispatcher, Symm))
        return way

    package = cast(ModuleType, fake_package(*PACKAGES["deepep"]))
    with mock.patch.object(dispatch_suite, "way_of", way_of), mock.patch.dict(sys.modules, deep_ep=package):
        cases = DispatchSuite(RankGroup(CPU), repeats=2).cases(SHAPE, ways([0.8], ["deepep"]))
        rows = run_cases(cases, str, None, ["v2_lite/natural"] if broken else [])
        close_dispatcher()
    return rows


def too_few_experts(ranks: Ranks, folder: Path) -> list[Row]:
    suite = DispatchSuite(RankGroup(CPU), repeats=1)
    return run_cases(suite.cases(dataclasses.replace(SHAPE, E=2), {"pull": None}), str, None)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cases = {name: functools.partial(suite, name == "broken") for name in ("suite", "broken")}
    return run_ranks(tmp_path_factory.mktemp("ranks"), cases | {"too few experts": too_few_experts})


def test_every_way_has_a_row_of_numbers_for_each_exchange_and_for_all(found):
    rows, of_other_rank = found["suite"]
    assert rows == of_other_rank
    places = [(f"v2_lite/{routing}", way) for routing in ("natural", "balanced") for way in WAYS]
    wanted = [(*place, exchange) for place in places for exchange in (*BESIDE, ALL_FOUR)]
    assert [(row["case"], row["way"], row["exchange"]) for row in rows] == wanted
    assert all(row["error"] is None and row["median_ms"] > 0 and row["floor_ms"] > 0 for row in rows)


def test_ways_with_other_results_than_alltoall_and_shapes_that_do_not_go_are_rows_with_the_reason(found):
    failed = {row["way"]: row["error"] for row in found["broken"][0] if row["error"]}
    assert failed == dict.fromkeys(WAYS[1:3], "rank 1: RuntimeError: results differ from alltoall's: dh")
    for rows in found["too few experts"]:
        reason = "2 experts must split evenly over 2 ranks, 2 (top_k) or more each"
        assert [row["error"] for row in rows] == [reason] * 2


@pytest.mark.parametrize(
    ("words", "ranks", "parts"),
    [
        (["suite=dispatch"], None, ["here is one", "torchrun --nproc-per-node=4 -m graphmoe.bench"]),
        (["suite=ops"], (2, 2), ["suite=ops runs in one process"]),
        (["suite=dispatch"], (4, 2), ["runs on one node", "--nnodes=1"]),
        (["suite=calibrate"], (2, 1), ["suite=calibrate runs on one node"]),
        (["suite=dispatch", "blocks=0.5,x"], (2, 2), ["blocks=0.5,x: expected a number"]),
        (["suite=dispatch", "blocks=0"], (2, 2), ["blocks=0: use numbers above 0 and at most 4"]),
        (["suite=dispatch", "scopes=layer"], (2, 2), ["scopes=layer has no effect", "suite=step"]),
        (["suite=ops", "blocks=1"], None, ["blocks=1 has no effect with suite=ops", "suite=dispatch"]),
    ],
)
def test_a_bad_argument_or_number_of_processes_says_what_to_type(words, ranks, parts, monkeypatch, capsys):
    for name, value in zip(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ranks or (), strict=False):
        monkeypatch.setenv(name, str(value))
    said = refusal(bench.main, capsys, *words, "device=cpu")
    assert [part for part in parts if part not in said] == []
