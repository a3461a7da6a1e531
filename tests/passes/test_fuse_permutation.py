"""fuse_permutation: every spelling of plan, gather and return becomes three operations."""

import pytest
import torch

from graphmoe.ops.permute import permute, routing_plan, unpermute
from graphmoe.passes.base import MadeBy, Rewrites
from graphmoe.passes.fuse_permutation import fuse_permutation
from tests.passes.blocks import (
    DTYPES,
    ROUTINGS,
    E,
    Traced,
    assert_same_numbers,
    experts_of,
    operations,
    rewritten,
    traced,
)
from tests.passes.permutation_spellings import MOVES, SPELLINGS, inputs, layer

ops = torch.ops.graphmoe


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: "-".join(s.values()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_spelling_becomes_three_operations_with_the_same_numbers(spelling, dtype):
    plain = traced(layer(**spelling), *inputs(dtype))
    fused, (result,) = rewritten(plain, fuse_permutation)
    calls = operations(fused)
    assert (calls["routing_plan"], calls["permute"], calls["unpermute"]) == (1, 1, 1)
    assert not MOVES & set(calls) and not result.left, (calls, result)
    assert operations(plain).total() > calls.total()
    for routing in ROUTINGS:
        given = list(inputs(dtype, routing))
        assert_same_numbers(Traced(fused.graph, given), Traced(plain.graph, given))


def test_an_unstable_sort_becomes_the_stable_order():
    plain = traced(layer(stable=False), *inputs())
    fused, (result,) = rewritten(plain, fuse_permutation)
    assert result.matches == 4  # plan, rows, weights of the rows, return
    assert_same_numbers(fused, plain)


def test_nothing_is_expected_where_the_model_calls_the_operations_itself():
    def run(x, row, slot, ends):
        return ops.unpermute(ops.permute(x, slot, row, ends), slot, row, ends, None)

    x, _, _, expert = inputs()
    _, ends_E, row_TK, slot_R = ops.routing_plan(expert.int(), E)
    _, (result,) = rewritten(traced(run, x, row_TK, slot_R, ends_E), fuse_permutation)
    assert result == Rewrites(0, (), "the model calls permute or unpermute itself, 2 times", expected=False)


PLAN = [MadeBy("graphmoe::routing_plan", "unit:call", part) for part in (1, 2, 3)]


def moved(makers):
    """Rows that are moved by a plan from outside, of which ``makers`` says where its parts come from."""

    def run(x, weight, ends, row, slot):
        rows = permute(x, slot, row) * permute(weight.reshape(-1, 1), slot, row.reshape(-1, 1))
        return unpermute(rows, slot, row), ends

    x, weight, _, expert = inputs()
    plan = routing_plan(expert.int(), E)
    plain = traced(run, x, weight, plan.ends_E, plan.row_TK, plan.slot_R)
    placeholders = plain.graph.graph.find_nodes(op="placeholder")
    for node, maker in zip(placeholders[2:], makers, strict=True):
        node.meta["made_by"] = maker
    return plain


def test_a_plan_from_another_unit_is_known_by_what_made_it():
    plain = moved(PLAN)
    fused, (result,) = rewritten(plain, fuse_permutation)
    calls = operations(fused)
    assert (calls["permute"], calls["unpermute"], result.matches) == (1, 1, 3) and not MOVES & set(calls)
    assert_same_numbers(fused, plain)


@pytest.mark.parametrize(
    "makers",
    [
        [None, None, None],
        [*PLAN[:2], None],
        [*PLAN[:2], PLAN[2]._replace(call="unit:another")],
        [maker._replace(target="graphmoe::router") for maker in PLAN],
    ],
    ids=["unknown", "not whole", "of two plans", "another operation"],
)
def test_integers_from_elsewhere_are_no_plan(makers):
    fused, (result,) = rewritten(moved(makers), fuse_permutation)
    assert result.matches == 0 and not operations(fused)["permute"]


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


def test_flat_ids_take_k_from_what_their_order_is_divided_by():
    x, weight, w, expert = inputs()
    plain = traced(layer(), x, weight, w, expert.flatten())
    fused, (result,) = rewritten(plain, fuse_permutation)
    (plan,) = [node for node in fused.graph.graph.nodes if "routing_plan" in str(node.target)]
    assert result.matches == 4 and plan.args[0].meta["val"].shape == expert.shape
    assert_same_numbers(fused, plain)
