"""Forwards and backwards that run together: pairs are independent, and hidden time is won."""

from __future__ import annotations

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.plan.pipeline.actions import Together
from graphmoe.plan.pipeline.check import check, peak_activations
from graphmoe.plan.pipeline.schedules import SCHEDULES, forward_only, make_table
from graphmoe.plan.pipeline.simulate import Costs, simulate

VARIANTS = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4)]


def pairs_of(table):
    return [[step for step in steps if isinstance(step, Together)] for steps in table.ranks]


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
def test_tables_with_pairs_can_be_run_with_any_number_of_micro_batches(name, virtual, num_ranks):
    for number in range(1, 21):
        table = make_table(name, num_ranks, number, virtual, overlap=True)
        check(table)
        assert table.schedule == name
        pairs = [pair for of_rank in pairs_of(table) for pair in of_rank]
        assert all(pair.forward.micro_batch != pair.backward.micro_batch for pair in pairs)
        assert bool(pairs) == (number > 1)
        limit = (virtual + 1) * num_ranks / virtual
        assert max(peak_activations(table)) <= min(number, limit)


def test_one_rank_runs_each_backward_with_the_next_forward():
    (steps,) = make_table("1f1b", 1, 4, overlap=True).ranks
    assert " ".join(map(str, steps)) == "0F0 0F1+0B0 0F2+0B1 0F3+0B2 0B3"


def test_the_last_stage_pairs_a_backward_with_the_forward_after_it():
    table = make_table("1f1b", 4, 8, overlap=True)
    assert [str(pair) for pair in pairs_of(table)[3]] == [f"3F{n + 1}+3B{n}" for n in range(7)]
    table = make_table("interleaved", 4, 8, 2, overlap=True)
    last = {pair.backward: pair.forward for pair in pairs_of(table)[3] if pair.backward.stage == 7}
    assert all(forward.micro_batch != backward.micro_batch for backward, forward in last.items())
    assert len(last) == 7  # all but that of micro-batch 7, after whose forward none comes


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
def test_pairs_that_hide_nothing_take_as_long_as_before(name, virtual, num_ranks):
    plain = make_table(name, num_ranks, 4 * num_ranks, virtual)
    costs = Costs.of_rank(plain.placement, virtual, virtual, virtual)
    together = make_table(name, num_ranks, 4 * num_ranks, virtual, overlap=True)
    assert simulate(together, costs).makespan == simulate(plain, costs).makespan


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
def test_hidden_time_is_won_for_every_pair_of_the_last_rank(name, virtual, num_ranks):
    number = 4 * num_ranks
    table = make_table(name, num_ranks, number, virtual, overlap=True)
    makespans = [
        simulate(table, Costs.of_rank(table.placement, 4 * virtual, 4 * virtual, 4 * virtual, hidden=hidden))
        for hidden in (0, 2 * virtual)
    ]
    won = makespans[0].makespan - makespans[1].makespan
    assert won == 2 * len(pairs_of(table)[-1])
    assert len(pairs_of(table)[-1]) == number * virtual - 1 - (virtual - 1) * num_ranks


def test_pairs_keep_more_activations():
    assert peak_activations(make_table("1f1b", 4, 16)) == (4, 3, 2, 1)
    assert peak_activations(make_table("1f1b", 4, 16, overlap=True)) == (8, 6, 4, 2)
    assert peak_activations(make_table("interleaved", 4, 16, 2)) == (5.5, 4.5, 3.5, 2.5)
    assert peak_activations(make_table("interleaved", 4, 16, 2, overlap=True)) == (6, 5, 4, 3)


@pytest.mark.parametrize("name", [name for name, line in SCHEDULES.items() if line.build_overlapped is None])
def test_schedules_without_pairs_name_those_that_have_them(name):
    with pytest.raises(
        ConfigError, match=rf"pipeline.schedule={name} pairs none; use one of 1f1b, interleaved"
    ):
        make_table(name, 4, 8, overlap=True)


@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
def test_evaluation_has_no_pairs(name, virtual):
    evaluating = forward_only(make_table(name, 4, 8, virtual, overlap=True), 8)
    assert sum(map(len, evaluating.ranks)) == 4 * virtual * 8 and not any(pairs_of(evaluating))
