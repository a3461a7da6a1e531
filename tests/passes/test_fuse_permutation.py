"""fuse_permutation: every spelling of plan, gather and return becomes three operations."""

from __future__ import annotations

import functools

import pytest
import torch

from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.ops.permute import permute, routing_plan, unpermute
from passes.fuse_permutation import fuse_permutation
from tests.passes.blocks import (
    DTYPES,
    ROUTINGS,
    D,
    E,
    K,
    T,
    Traced,
    assert_left,
    assert_same_numbers,
    experts_of,
    operations,
    random,
    rewritten,
    traced,
)
from tests.passes.permutation_spellings import MOVES, SPELLINGS, inputs, layer


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: "-".join(s.values()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_spelling_becomes_three_operations_with_the_same_numbers(spelling, dtype):
    plain = traced(layer(**spelling), *inputs(dtype))
    fused, (result,) = rewritten(plain, fuse_permutation)
    calls = operations(fused)
    assert (calls["routing_plan"], calls["permute"], calls["unpermute"]) == (1, 1, 1)
    assert not MOVES & set(calls) and not result.kept, (calls, result)
    assert operations(plain).total() > calls.total()
    for routing in ROUTINGS:
        given = list(inputs(dtype, routing))
        assert_same_numbers(Traced(fused.graph, given), Traced(plain.graph, given))


def test_an_unstable_sort_becomes_the_stable_order():
    plain = traced(layer(stable=False), *inputs())
    fused, (result,) = rewritten(plain, fuse_permutation)
    assert result.matches == 4  # plan, rows, weights of the rows, return
    assert_same_numbers(fused, plain)


def test_the_models_own_plan_and_moves_match():
    def run(x, weight, expert):
        plan = routing_plan(expert, E)
        rows = permute(x, plan.slot_R, plan.row_TK) * permute(
            weight.reshape(-1, 1), plan.slot_R, plan.row_TK.reshape(-1, 1)
        )
        return unpermute(rows, plan.slot_R, plan.row_TK), plan.counts_E, plan.ends_E, plan.row_TK, plan.slot_R

    x, weight, _, expert = inputs()
    plain = traced(run, x, weight, expert.int())
    fused, (result,) = rewritten(plain, fuse_permutation)
    assert result.matches == 4 and not MOVES & set(operations(fused))
    for routing in ROUTINGS:
        given = [x, weight, experts_of(routing).int()]
        assert_same_numbers(Traced(fused.graph, given), Traced(plain.graph, given))


def test_a_second_run_finds_nothing_left():
    fused, _ = rewritten(traced(layer(), *inputs()), fuse_permutation)
    again, (result,) = rewritten(fused, fuse_permutation)
    assert result.matches == 0 and operations(again) == operations(fused)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_of_another_graph_is_taken_from_the_inputs_where_that_is_asked_for(dtype):
    def run(x, weight, w, ends, row, slot):
        rows = permute(x, slot, row) * permute(weight.reshape(-1, 1), slot, row.reshape(-1, 1))
        return unpermute(grouped_mm(rows.to(x.dtype), w, ends), slot, row)

    def given(routing):
        *tensors, expert = inputs(dtype, routing)
        plan = routing_plan(expert.int(), E)
        return [*tensors, plan.ends_E, plan.row_TK, plan.slot_R]

    plain = traced(run, *given("natural"))
    assert_left(plain, "without plan_inputs", fuse_permutation)
    fused, (result,) = rewritten(plain, functools.partial(fuse_permutation, plan_inputs=True))
    assert result == (3, ()) and not MOVES & set(operations(fused))
    for routing in ROUTINGS:
        tensors = given(routing)
        assert_same_numbers(Traced(fused.graph, tensors), Traced(plain.graph, tensors))


def test_integer_inputs_that_are_no_whole_plan_are_not_taken_for_one():
    def run(x, w, ends, slot):
        return grouped_mm(x[slot // K], w, ends)

    ids = experts_of("natural").int()
    plan = routing_plan(ids, E)
    plain = traced(run, random(T, D), random(E, D, D, seed=1), plan.ends_E, plan.slot_R)
    reason = "0 sorts, none of a flat list of expert ids"
    assert_left(plain, reason, functools.partial(fuse_permutation, plan_inputs=True))

    def longer(x, w, ends, row, slot):
        return unpermute(grouped_mm(x[slot // K], w, ends), slot, row)

    slots = torch.cat([plan.slot_R, plan.slot_R[:4]])
    plain = traced(longer, random(T, D), random(E, D, D, seed=1), plan.ends_E, plan.row_TK, slots)
    assert_left(plain, reason, functools.partial(fuse_permutation, plan_inputs=True))
