"""A pipeline of ranks finds what one process finds, and keeps what its table promises."""

from __future__ import annotations

import pytest
import torch

from runtime.pipeline.schedules import make_table
from tests.distributed.ranks import run_ranks
from tests.distributed.toy_pipeline import Case, in_one_process

VARIANTS = [("gpipe", 1), ("1f1b", 1), ("zb1p", 1), ("zbv", 2), ("v_half", 2), ("v_min", 2)]
VARIANTS += [("interleaved", 2), ("interleaved", 3)]
SPLIT = ("zb1p", "zbv", "v_half", "v_min")
MICRO_BATCHES = {2: (1, 2, 5), 4: (2, 4, 7)}


def cases_of(num_ranks):
    found = {}
    for number in MICRO_BATCHES[num_ranks]:
        for name, virtual in VARIANTS:
            table = make_table(name, num_ranks, number, virtual)
            found[f"{name} {virtual} of {number}"] = Case(table, defers=name in SPLIT)
        for name, virtual in (("1f1b", 1), ("interleaved", 2)):
            table = make_table(name, num_ranks, number, virtual, overlap=True)
            found[f"{name} together of {number}"] = Case(table)
    for name in ("1f1b", "interleaved", "zbv"):
        table = make_table(name, num_ranks, 5)
        found[f"{name}, messages of two tensors"] = Case(table, defers=name in SPLIT, sums=True)
        found[f"{name}, W not put off"] = Case(table)
        found |= {f"{name}, evaluates {many}": Case(table, sums=True, evaluates=many) for many in (1, 6)}
    return found


@pytest.fixture(scope="module", params=[2, 4])
def runs(request, tmp_path_factory):
    """Each case, and by rank what it found."""
    cases = cases_of(request.param)
    results = run_ranks(tmp_path_factory.mktemp("ranks"), cases, request.param)
    return {name: (case, results[name]) for name, case in cases.items()}


def test_losses_and_gradients_are_those_of_one_process(runs):
    for name, (case, results) in runs.items():
        if case.evaluates:
            continue
        found = {stage: of_stage for stages, _ in results for stage, of_stage in stages.items()}
        for stage, (losses, *gradients) in enumerate(expected(case)):
            assert found[stage][0] == losses, name
            for ours, theirs in zip(found[stage][1:], gradients, strict=True):
                assert torch.equal(ours, theirs), (name, stage)


def expected(case):
    stages, number = case.table.placement.num_stages, case.table.num_micro_batches
    return in_one_process(stages, case.evaluates or number, case.sums, steps=2)
