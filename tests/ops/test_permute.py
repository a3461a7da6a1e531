"""Routing plan and row movement against brute force in Python."""

from __future__ import annotations

import pytest
import torch

from graphmoe.ops.permute import permute, routing_plan, unpermute
from tests.ops.row_cases import assert_plan_matches_brute_force, choose, sizes
from tests.tolerances import assert_forward_close

PATTERNS = ("random", "skewed", "same experts", "half of the experts")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_plan_matches_brute_force(pattern):
    for T, K, E in sizes():
        expert_TK = choose(pattern, T, K, E)
        assert_plan_matches_brute_force(lambda *given: routing_plan(*given)[1:5], expert_TK, E)
        plan = routing_plan(expert_TK, E)
        assert torch.equal(plan.expert_TK, expert_TK) and plan.live_rows.tolist() == [T * K]


def test_every_tensor_of_the_plan_is_int32():
    plan = routing_plan(choose("random", 9, 3, 12), 12)
    assert {name: value.dtype for name, value in plan._asdict().items() if value.dtype != torch.int32} == {}
    assert plan.row_TK.shape == (9, 3) and plan.live_rows.shape == (1,)


def test_rows_and_slots_are_inverse_to_each_other():
    for T, K, E in sizes():
        plan = routing_plan(choose("random", T, K, E), E)
        everything = torch.arange(T * K, dtype=torch.int32)
        assert torch.equal(plan.row_TK.flatten()[plan.slot_R], everything)
        assert torch.equal(plan.slot_R[plan.row_TK.flatten()], everything)


def test_a_token_may_choose_an_expert_twice():
    plan = routing_plan(torch.tensor([[1, 1], [0, 1]], dtype=torch.int32), 3)
    assert plan.counts_E.tolist() == [1, 3, 0]
    assert plan.row_TK.tolist() == [[1, 2], [0, 3]]


def test_a_plan_of_meta_tensors_has_shapes():
    plan = routing_plan(torch.empty(5, 2, dtype=torch.int32, device="meta"), 4)
    shapes = {name: tuple(value.shape) for name, value in plan._asdict().items()}
    assert shapes == {
        "expert_TK": (5, 2),
        "counts_E": (4,),
        "ends_E": (4,),
        "row_TK": (5, 2),
        "slot_R": (10,),
        "live_rows": (1,),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_gathered_and_summed_as_in_python(dtype):
    for T, K, E in sizes():
        plan = routing_plan(choose("random", T, K, E), E)
        x = torch.randn(T, 3, generator=torch.Generator().manual_seed(T)).to(dtype)
        rows = permute(x, plan.slot_R, plan.row_TK)
        assert torch.equal(rows, torch.stack([x[slot // K] for slot in plan.slot_R.tolist()]))
        scaled = rows * torch.arange(1, T * K + 1).unsqueeze(1).to(dtype)
        summed = unpermute(scaled, plan.slot_R, plan.row_TK)
        exact = [sum(scaled[r].double() for r in row) for row in plan.row_TK.tolist()]
        assert summed.dtype == dtype
        assert_forward_close(summed, torch.stack(exact))


def test_a_token_is_summed_in_the_order_of_its_slots_not_of_its_experts():
    plan = routing_plan(torch.tensor([[2, 0, 1]], dtype=torch.int32), 3)
    y = torch.tensor([[-1e8], [1.0], [1e8]])  # by row: experts 0, 1, 2; slots 1, 2, 0
    assert unpermute(y, plan.slot_R, plan.row_TK).item() == (1e8 - 1e8) + 1.0


def test_the_gradients_match_finite_differences():
    plan = routing_plan(choose("skewed", 7, 3, 5), 5)
    x, y = torch.randn(7, 2).double().requires_grad_(), torch.randn(21, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: permute(x, plan.slot_R, plan.row_TK), x)
    assert torch.autograd.gradcheck(lambda y: unpermute(y, plan.slot_R, plan.row_TK), y)
    assert torch.autograd.gradgradcheck(lambda x: permute(x, plan.slot_R, plan.row_TK) ** 2, x)


def test_unpermute_undoes_permute_up_to_the_number_of_slots():
    plan = routing_plan(choose("random", 11, 4, 9), 9)
    x = torch.randint(-50, 50, (11, 6)).float()  # integers: sums are exact
    back = unpermute(permute(x, plan.slot_R, plan.row_TK), plan.slot_R, plan.row_TK)
    assert torch.equal(back, 4 * x)


def test_the_order_of_the_tokens_does_not_change_a_bit_of_their_sums():
    T, K, E, D = 29, 6, 16, 5
    expert_TK, order = choose("random", T, K, E), torch.randperm(T)
    value_TKD = torch.randn(T, K, D)
    sums = []
    for experts, values in ((expert_TK, value_TKD), (expert_TK[order], value_TKD[order])):
        plan = routing_plan(experts, E)
        sums.append(unpermute(values.flatten(0, 1)[plan.slot_R], plan.slot_R, plan.row_TK))
    assert torch.equal(sums[0][order], sums[1])


@pytest.mark.parametrize("function", ["permute", "unpermute"])
def test_gradients_are_bitwise_repeatable_on_several_threads(function):
    """Plain indexing fails here: its CPU gradient adds the K rows of a token with atomics."""
    T, K, E, D = 512, 8, 16, 128
    plan = routing_plan(choose("random", T, K, E), E)
    generator = torch.Generator().manual_seed(0)
    run = {"permute": permute, "unpermute": unpermute}[function]
    x = torch.randn(T if run is permute else T * K, D, generator=generator, requires_grad=True)
    y = run(x, plan.slot_R, plan.row_TK)
    dy = torch.randn(y.shape, generator=generator)
    torch.set_num_threads(4)
    first, *others = (torch.autograd.grad(y, x, dy, retain_graph=True)[0] for _ in range(12))
    assert all(torch.equal(first, other) for other in others)
