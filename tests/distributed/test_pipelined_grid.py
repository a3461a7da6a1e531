"""Every schedule on 2, 4 and 8 ranks of a pipeline, beside dp and ep, trains as one process does.

17 minutes on two cores: python -m pytest -m exhaustive tests/distributed/test_pipelined_grid.py
"""

from __future__ import annotations

import functools

import pytest

from graphmoe.plan.pipeline.schedules import SCHEDULES
from graphmoe.runtime.ranks import Ranks
from tests.distributed.pipelined import MTP, TIED, Case, assert_same
from tests.distributed.ranks import Job
from tests.distributed.training import Outcome

BESIDE = {
    "alone": (1, ()),
    "dp2": (2, ("parallel.dp=2",)),
    "dp2 ep2": (2, ("parallel.dp=2", "parallel.ep=2")),
    "tp2 ep2": (2, ("parallel.tp=2", "parallel.ep=2")),
    "dp4 ep2": (4, ("parallel.dp=4", "parallel.ep=2")),
}
"""Ranks of a stage, and what lays them out."""
MODELS = {"untied": (MTP,), "tied": (MTP, TIED)}
DEEP = ("model.num_layers=12", "train.global_batch_size=16")
"""A part of the model for each of 16 stages, and as many micro-batches."""
PLACES = [(pp, beside) for pp in (2, 4, 8) for beside in BESIDE if pp * BESIDE[beside][0] <= 16]


def case_of(pp: int, beside: str, schedule: str, model: str) -> Case:
    ranks, words = BESIDE[beside]
    return Case(pp * ranks, pp, schedule, words, (*MODELS[model], *(DEEP if pp == 8 else ())))


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory):
    """Outcomes of a place by model and rank; those of the last one are kept."""

    @functools.lru_cache(maxsize=1)
    def run(pp: int, beside: str, schedule: str) -> dict[str, list[Outcome]]:
        cases = {model: case_of(pp, beside, schedule, model) for model in MODELS}
        trainings = {model: case.training for model, case in cases.items()}
        folder = tmp_path_factory.mktemp("ranks")
        return Job(folder, trainings, num_ranks=cases["tied"].ranks).results(seconds=900)

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    return functools.cache(lambda training: training(Ranks(), tmp_path_factory.mktemp("alone")))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp, beside", PLACES)
def test_every_schedule_trains_as_one_process_does(on_ranks, alone, pp, beside, schedule, model):
    case = case_of(pp, beside, schedule, model)
    assert_same(case, on_ranks(pp, beside, schedule)[model], alone(case.alone))
