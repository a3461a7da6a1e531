"""The table of a run follows times of its stages; a schedule that is slower than 1f1b is named."""

import time
from dataclasses import replace
from unittest.mock import Mock

import pytest

from graphmoe.plan.costs import segment_times
from graphmoe.plan.costs.rates import default_rates
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.plan import pipeline_of, run_slower_than_1f1b, slower_than_1f1b
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table, placement_of
from graphmoe.plan.pipeline.simulate import Costs, makespan_of, simulate
from graphmoe.plan.plan import plan_of
from graphmoe.project import step_time
from graphmoe.project.arguments import ProjectArgs, completed
from graphmoe.project.document import project
from tests.runs import TINY, config

WORDS = ("parallel.pp=4", "launch.nproc=4", "model.num_layers=14", "train.global_batch_size=64")


def zbv_plan(*words, num_ranks=4):
    """The pipeline of a run, and the sums of its F, I and W."""
    run = config(*WORDS, "pipeline.schedule=zbv", "compile.enabled=true", *words)
    plan = pipeline_of(run, Layout.of(run.parallel, num_ranks))
    assert plan is not None
    assert plan.table == make_table("zbv", 4, plan.table.num_micro_batches, costs=plan.costs)
    costs = plan.costs
    return plan, *map(sum, (costs.forward, costs.backward_input, costs.backward_weight))


def test_without_compilation_weight_gradients_come_with_those_of_inputs():
    (_, f, i, w), (_, plain_f, joint, none) = zbv_plan(), zbv_plan("compile.enabled=false")
    assert w > 0 == none
    assert (plain_f, joint) == pytest.approx((f, i + w))


def test_what_is_computed_again_is_part_of_a_backward():
    (_, f, i, w), (_, same, more, weights) = zbv_plan(), zbv_plan("recompute.all=true")
    assert (same, weights) == (f, w) and i + 0.5 * f < more < i + f
    attention = "recompute.segments=[attn]"
    (*_, of_all, _), (*_, of_one, _) = zbv_plan(attention), zbv_plan(attention, "recompute.layer_ids=[3]")
    assert of_one - i == pytest.approx((of_all - i) / 14) and of_one > i


@pytest.fixture
def even_rates(monkeypatch):
    """Rates without imbalance and latencies, at which every dispatcher sends rows at one speed."""
    real = default_rates(is_nvidia=True)
    rates = replace(real, load_spread=0.0, barrier_us=0.0, collective_us=0.0, pull=real.node)
    monkeypatch.setattr(segment_times, "default_rates", lambda *, is_nvidia: rates)
    for each in (found for found in vars(segment_times).values() if hasattr(found, "cache_clear")):
        monkeypatch.setattr(segment_times, each.__name__, each.__wrapped__)  # no time of other rates


def test_exchanged_tokens_have_times_and_alltoall_wgrad_with_dgrad(even_rates):
    words = ("parallel.ep=4", "launch.nproc=16", "model.num_experts=8")
    of = {name: zbv_plan(*words, f"moe.dispatcher={name}", num_ranks=16) for name in ("symm", "alltoall")}
    (_, f, i, w), (_, more_f, more_i, same), (*_, i_alltoall, less) = zbv_plan(), *of.values()
    assert more_f > f and more_i > i and same == pytest.approx(w, rel=0.2)
    assert less < same and i_alltoall + less == pytest.approx(more_i + same)


def test_times_that_are_given_are_shared_out_as_modelled_ones():
    dense = "model.num_dense_layers=1"
    given, *times = zbv_plan("pipeline.costs=[dense:2,moe:5,loss:3]", dense)
    assert sum(times) == pytest.approx(2 + 13 * 5 + 3)
    modelled = zbv_plan(dense, f"pipeline.layout={given.layout}")[0].costs
    of_stage = [costs.backward_input[3] / costs.forward[3] for costs in (given.costs, modelled)]
    assert of_stage[0] == pytest.approx(of_stage[1])  # of MoE layers alone
    assert given.costs.comm / modelled.comm == pytest.approx(sum(times) / sum(zbv_plan(dense)[1:]))


def test_a_projection_simulates_the_table_of_the_run(monkeypatch):
    simulated = Mock(side_effect=makespan_of)
    monkeypatch.setattr(step_time, "makespan_of", simulated)
    args = ProjectArgs("mi355x", nodes=1)
    words = ("parallel.pp=8", "model.num_layers=14", "pipeline.schedule=v_half", "precision.compute=bf16")
    run = completed(config("launch.nproc=8", "compile.enabled=true", *words), args)
    project(run, args)
    plan = pipeline_of(run, Layout.of(run.parallel, 8))
    assert [call.args[0] for call in simulated.call_args_list] == [plan.table]


def simulated(ratio, *, unaware=()):
    """Eight ranks and 64 micro-batches; ``unaware`` schedules have tables for other costs."""

    def timeline_of(name):
        costs = Costs.of_rank(placement_of(name, 8), *ratio)
        return simulate(make_table(name, 8, 64, costs=None if name in unaware else costs), costs)

    return timeline_of


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_loses_where_all_costs_are_equal(name):
    assert slower_than_1f1b(name, simulated((1, 1, 1))) is None


def test_the_words_name_both_bubbles_and_the_fastest_that_keeps_no_more():
    timeline_of = simulated((1, 1, 0.5), unaware=("zbv",))
    assert slower_than_1f1b("zbv", timeline_of) == (
        "zbv is slower than 1f1b by simulation: bubble 17.4% with 8 activations, 1f1b bubble 9.9% with 8 "
        "activations; use zb1p, the fastest with no more activations: bubble 6.2% with 8 activations"
    )


def test_a_run_of_many_micro_batches_is_compared_by_some_of_them():
    words = (*TINY, "launch.nproc=4", "parallel.pp=4", "model.num_layers=6", "pipeline.schedule=v_half")
    slow = (*words[:-1], "pipeline.schedule=v_min", "compile.enabled=false")

    def said(words, num_samples):
        plan = plan_of(config(*words, f"train.global_batch_size={num_samples}"), 4)
        return run_slower_than_1f1b(plan.config, plan.layout)

    began = time.monotonic()
    said(words, 40000)
    assert time.monotonic() - began < 10
    few, many = said(slow, 128), said(slow, 40000)
    assert few is not None and many == f"{few} (64 of 20000 micro-batches)"
