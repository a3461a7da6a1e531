"""Schedules that are slower than 1f1b are named with what keeps no more and is faster."""

import time

import pytest

from graphmoe.plan.pipeline.plan import slower_than_1f1b
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table, placement_of
from graphmoe.plan.pipeline.simulate import Costs, simulate
from graphmoe.plan.plan import plan_of
from tests.runs import TINY, config


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
        "activations; use zb1p, the fastest that keeps no more: bubble 6.2% with 8 activations"
    )


def test_a_run_of_many_micro_batches_is_compared_by_some_of_them():
    words = (*TINY, "launch.nproc=4", "parallel.pp=4", "model.num_layers=6", "pipeline.schedule=v_half")
    began = time.monotonic()
    plan_of(config(*words, "train.global_batch_size=40000"), 4).slower_than_1f1b()
    assert time.monotonic() - began < 10
    slow = (*words[:-1], "pipeline.schedule=v_min", "compile.enabled=false")
    plans = (plan_of(config(*slow, f"train.global_batch_size={n}"), 4) for n in (128, 40000))
    few, many = (plan.slower_than_1f1b() for plan in plans)
    assert few is not None and many == f"{few} (64 of 20000 micro-batches)"
