"""A pipeline of ranks finds what one process finds, and keeps what its table promises."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import profile

from graphmoe.plan.pipeline import Placement
from graphmoe.plan.pipeline.check import peak_activations
from graphmoe.plan.pipeline.schedules import make_table
from graphmoe.plan.pipeline.schedules.one_f_one_b import forward_only
from graphmoe.plan.pipeline.simulate import Costs
from graphmoe.runtime.pipeline.engine import Pipeline, Stage
from tests.distributed.ranks import run_ranks
from tests.distributed.toy_pipeline import Case, Cases, in_one_process

VARIANTS = [("gpipe", 1), ("1f1b", 1), ("zb1p", 1), ("zbv", 2), ("v_half", 2), ("v_min", 2)]
VARIANTS += [("interleaved", 2), ("interleaved", 3)]
SPLIT = ("zb1p", "zbv", "v_half", "v_min")
MICRO_BATCHES = {2: (1, 2, 5), 4: (2, 5)}


def cases_of(num_ranks):
    found = {}
    of_all = functools.partial(Case, pipelines=(tuple(range(num_ranks)),))
    for number in MICRO_BATCHES[num_ranks]:
        for name, virtual in VARIANTS:
            table = make_table(name, num_ranks, number, virtual)
            found[f"{name} {virtual} of {number}"] = of_all(table, defers=name in SPLIT, sums=number == 5)
        for name, virtual in (("1f1b", 1), ("interleaved", 2)):
            table = make_table(name, num_ranks, number, virtual, overlap=True)
            found[f"{name} together of {number}"] = of_all(table, sums=number == 5)
    for name in ("1f1b", "interleaved", "zbv"):
        table = make_table(name, num_ranks, 5)
        found[f"{name}, W not put off"] = of_all(table)
        found |= {f"{name}, evaluates {many}": of_all(table, sums=True, evaluates=many) for many in (1, 6)}
    short = Costs.of_rank(Placement.folded(num_ranks), 1, 2.3, 0.3, comm=0.02)
    for name in ("zbv", "v_half", "v_min"):
        table = make_table(name, num_ranks, 5, costs=short)
        found[f"{name}, short weight gradients"] = of_all(table, defers=True)
    if num_ranks == 4:
        for name in ("1f1b", "zbv"):
            table = make_table(name, 2, 3)
            found[f"two of {name}"] = Case(table, defers=name in SPLIT, pipelines=((0, 2), (3, 1)))
    return found


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 4])
def runs(request, tmp_path_factory):
    cases = cases_of(request.param)
    of_ranks = run_ranks(tmp_path_factory.mktemp("ranks"), {"all": Cases(cases)}, request.param)["all"]
    return {name: (case, [of_rank[name] for of_rank in of_ranks]) for name, case in cases.items()}


def test_losses_and_gradients_are_those_of_one_process(runs):
    for name, (case, results) in runs.items():
        number, steps = (case.evaluates, 1) if case.evaluates else (case.table.num_micro_batches, 2)
        expected = in_one_process(case.table.placement.num_stages, number, case.sums, steps)
        for stage, (losses, *gradients) in [each for stages, _ in results for each in stages.items()]:
            wanted_losses, *wanted = expected[stage]
            assert losses == wanted_losses, name
            if case.evaluates:
                assert not gradients[0].any() and gradients[1] is None, name
            else:
                same = (torch.equal(*pair) for pair in zip(gradients, wanted, strict=True))
                assert all(same), (name, stage)


def test_each_rank_does_what_its_table_says_and_keeps_no_more(runs):
    for name, (case, results) in runs.items():
        table = forward_only(case.table.placement, case.evaluates) if case.evaluates else case.table
        for rank, (_, log) in enumerate(results):
            place = case.place(rank)
            assert [entry[:3] for entry in log] == table.actions(place), name
            ends = "F" if case.evaluates else "BI" if name.endswith("not put off") else "BW"
            expected = kept = peak = 0
            for kind, _, _, kept, _ in log:
                expected += (kind == "F") - (kind in ends)
                assert kept == expected, name
                peak = max(peak, kept)
            if not case.evaluates and not name.endswith("not put off"):
                share = len(table.placement.stages_of(place))
                assert peak == peak_activations(table)[place] * share, name


def test_weight_gradients_are_made_in_w_and_not_before(runs):
    for name, (case, results) in runs.items():
        for _, log in results:
            ran = {kind: {added for k, *_, added in log if k == kind} for kind, *_ in log}
            assert ran == {kind: {kind in ("BW" if case.defers else "BI")} for kind in ran}, name


def test_an_error_of_a_stage_ends_the_run_there(tmp_path):
    cases = Cases({"fails": Case(make_table("1f1b", 2, 3), pipelines=((0, 1),), fails=("B", 1, 1))})
    with pytest.raises(
        AssertionError, match=r"rank 1: (.|\n)*: 1B1 has failed\nin 1B1 of the pipeline's rank 1"
    ):
        run_ranks(tmp_path, {"all": cases}, 2)


def test_each_step_is_a_range_of_a_profile():
    table = make_table("gpipe", 1, 2)
    alone = SimpleNamespace(release=lambda messages: None, finish=lambda: None)
    with profile() as profiled:
        Pipeline(table, 0, {0: Stage(lambda number, received: ((), torch.ones(())))}, alone).train()
    names = [event.name for event in profiled.events() if event.name.startswith("PP:")]
    assert names == [f"PP:{step}" for step in table.ranks[0]] and "PP:0F1" in names
