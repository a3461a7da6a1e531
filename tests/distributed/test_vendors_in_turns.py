"""Dispatchers of vendors with two micro-batches in turns: the bits of one after the other, and of alltoall.

Fakes of the packages take the recorded calls only, and none of their asynchronous form.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from graphmoe.runtime.dispatch import close_dispatcher
from graphmoe.runtime.ranks import Ranks
from tests.distributed.fake_vendors import fake_package
from tests.distributed.layouts import Case
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Outcome
from tests.distributed.trips import PACKAGES
from tests.runs import assert_same_state

pytestmark = pytest.mark.slow
MODEL = ("model.hidden_size=256", "model.num_dense_layers=0", "model.num_layers=2", "precision.compute=bf16")
MODEL += ("train.steps=2", "train.val_batches=0")
TURNS, REPLAYED = "pipeline.ep_overlap=true", "graph.warmup_steps=1"
HOW = {
    "": (), "in turns": (TURNS,), "partial": (TURNS, REPLAYED, "graph.scope=partial"),
    "full_iteration": (TURNS, REPLAYED, "graph.scope=full_iteration"),
}  # fmt: skip
RUNS = [
    *(("ep=2", "deepep", how) for how in HOW), ("ep=2", "turbo", "in turns"), ("ep=2", "alltoall", ""),
    *(("pp=2 ep=2", "deepep", how) for how in ("", "partial")), ("pp=2 ep=2", "alltoall", ""),
]  # fmt: skip


@dataclass(frozen=True)
class WithPackages:
    case: Case

    def __call__(self, ranks: Ranks, folder: Path) -> Outcome:
        modules = dict[str, object]()
        for library, path, *extra in PACKAGES.values():
            modules[path] = fake_package(library, path, *extra)
        turbo = SimpleNamespace(deep_ep=modules.pop("primus_turbo.pytorch.deep_ep"))
        modules |= {"primus_turbo": SimpleNamespace(pytorch=turbo), "primus_turbo.pytorch": turbo}
        with mock.patch.dict(sys.modules, modules):
            outcome = self.case.training(ranks, folder)
            close_dispatcher()
        return outcome


def training_of(layout: str, kind: str, how: str) -> WithPackages:
    ranks, schedule = (4, "1f1b") if "pp" in layout else (2, "")
    receives = ("moe.receive_budget=worst_case",) if kind != "alltoall" else ()
    words = (f"moe.dispatcher={kind}", *receives, *HOW[how])
    return WithPackages(Case(ranks, layout, schedule, words, MODEL, "traced"))


CASES = {run: training_of(*run) for run in RUNS}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = {}
    for num_ranks in (2, 4):
        cases = {str(key): each for key, each in CASES.items() if each.case.ranks == num_ranks}
        found |= run_ranks(tmp_path_factory.mktemp("ranks"), cases, num_ranks)
    return found


@pytest.mark.parametrize("run", [run for run in RUNS if run[1] != "alltoall"], ids=" ".join)
def test_turns_and_graphs_change_no_bit_of_a_vendors_dispatcher(results, run):
    runs = (results[str(each)] for each in (run, (run[0], "deepep", ""), (run[0], "alltoall", "")))
    for found, plain, reference in zip(*runs, strict=True):
        assert torch.equal(found.rows, plain.rows) and found.rows[:, 0].isfinite().all()
        for other in (plain, reference):
            assert_same_state(found.weights, other.weights)
            assert_same_state(found.gradients, other.gradients)
