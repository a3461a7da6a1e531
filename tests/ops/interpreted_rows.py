"""The kernels of the routing plan and of row movement, run by Triton's interpreter on CPU tensors.

Collected by tests/ops/test_permute_op.py; see tests/ops/interpreted.py.
"""

from __future__ import annotations

import pytest
import torch

from graphmoe.ops import permute_kernels, routing_plan_kernels
from tests.ops.row_cases import (
    ROUTINGS,
    assert_plan_matches_brute_force,
    assert_rows_are_multiplied,
    assert_rows_are_spread,
    assert_rows_are_summed,
    brute_force_plan,
    experts_of,
    pattern_of_experts,
    sizes,
)

DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = {"wide": 2100, "odd": 37, "even": 64, "single": 1}


def spread(x_TD, plan, weight_TK):
    return permute_kernels.spread_rows(x_TD, plan.row_TK, weight_TK, len(plan.slot_R))


def summed(y_RD, plan, weight_TK):
    return permute_kernels.sum_rows(y_RD, plan.row_TK, weight_TK)


def dotted(dx_TD, y_RD, plan):
    return permute_kernels.dot_rows(dx_TD, y_RD, plan.row_TK)


@pytest.mark.parametrize("name", ROUTINGS)
def test_plan_kernels_match_brute_force(name):
    assert_plan_matches_brute_force(routing_plan_kernels.routing_plan, *experts_of(name))


def test_plan_kernels_match_brute_force_at_every_number_of_slots():
    for T, K, E in sizes():
        expert_TK = pattern_of_experts("skewed", T, K, E)
        assert_plan_matches_brute_force(routing_plan_kernels.routing_plan, expert_TK, E)


@pytest.mark.parametrize("pattern", ["random", "one expert", "unrouted"])
def test_plan_kernels_match_brute_force_over_many_chunks(pattern, monkeypatch):
    """Small blocks, so that the scan goes round several times and its last tile is cut."""
    monkeypatch.setattr(routing_plan_kernels, "BLOCK", 32)
    monkeypatch.setattr(routing_plan_kernels, "STEP", 8)
    monkeypatch.setattr(routing_plan_kernels, "SCAN_CHUNKS", 4)
    expert_TK = pattern_of_experts(pattern, 101, 5, 19)
    assert_plan_matches_brute_force(routing_plan_kernels.routing_plan, expert_TK, 19)


def test_plan_kernels_take_no_tokens_and_ids_beyond_the_last_expert():
    run = routing_plan_kernels.routing_plan
    counts_E, ends_E, row_TK, slot_R = run(torch.empty(0, 3, dtype=torch.int32), 4)
    assert counts_E.tolist() == ends_E.tolist() == [0, 0, 0, 0]
    assert row_TK.shape == (0, 3) and slot_R.shape == (0,)
    counts_E, _, row_TK, slot_R = run(torch.tensor([[9, 0], [4, 3]], dtype=torch.int32), 4)
    assert (counts_E.tolist(), row_TK.tolist()) == ([1, 0, 0, 1], [[-1, 0], [-1, 1]])
    assert slot_R.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_are_spread(name, dtype, weighted):
    plan = brute_force_plan(*experts_of(name), dead_rows=3)
    assert_rows_are_spread(spread, plan, 24, dtype, weighted=weighted)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_are_summed_in_order(name, dtype, weighted):
    plan = brute_force_plan(*experts_of(name), dead_rows=3)
    assert_rows_are_summed(summed, plan, 24, dtype, weighted=weighted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_are_multiplied(name, dtype):
    plan = brute_force_plan(*experts_of(name), dead_rows=3)
    assert_rows_are_multiplied(dotted, plan, 24, dtype)


@pytest.mark.parametrize("columns", WIDTHS.values(), ids=WIDTHS)
def test_rows_of_any_width_are_moved(columns):
    T, K, E = (5, 3, 7) if columns > 1000 else (301, 3, 7)
    plan = brute_force_plan(pattern_of_experts("unrouted", T, K, E), E, dead_rows=2)
    assert_rows_are_spread(spread, plan, columns, torch.bfloat16, weighted=True)
    assert_rows_are_summed(summed, plan, columns, torch.bfloat16)
    assert_rows_are_multiplied(dotted, plan, columns, torch.bfloat16)


def test_rows_are_moved_at_every_number_of_slots():
    for T, K, E in sizes():
        plan = brute_force_plan(pattern_of_experts("unrouted", T, K, E), E, dead_rows=1)
        assert_rows_are_spread(spread, plan, 3, torch.float32)
        assert_rows_are_summed(summed, plan, 3, torch.float32)
        assert_rows_are_multiplied(dotted, plan, 3, torch.float32)


def test_a_sum_does_not_depend_on_which_experts_were_chosen():
    expert_TK = pattern_of_experts("random", 19, 6, 16)
    y_TKD, sums = torch.randn(19, 6, 40), []
    for experts in (expert_TK, (expert_TK * 7 + 3) % 16):
        plan = brute_force_plan(experts, 16)
        sums.append(summed(y_TKD.flatten(0, 1)[plan.slot_R], plan, None))
    assert torch.equal(*sums)
