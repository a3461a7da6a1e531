"""The ops of the routing plan and of row movement: reference, gradients, fakes, and their kernels."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from graphmoe.ops import permute as plain
from tests.ops.ahead_of_time import ROOT, TARGETS, assert_sound, compiled
from tests.ops.interpreted import assert_passed, names_of
from tests.ops.row_cases import (
    NAN,
    ROUTINGS,
    assert_plan_matches_brute_force,
    assert_rows_are_multiplied,
    assert_rows_are_spread,
    assert_rows_are_summed,
    brute_force_plan,
    dotted,
    experts_of,
    pattern_of_experts,
    sizes,
    spread,
    summed,
    values,
)
from tests.ops.seen_ops import SeenOps
from tests.tolerances import assert_forward_close, assert_gradient_close

ops = torch.ops.graphmoe
DTYPES = (torch.float32, torch.bfloat16)
INTERPRETED = "tests/ops/interpreted_rows.py"


def with_dead_rows(y_LD, plan):
    """Live rows followed by NaN."""
    return torch.cat([y_LD, y_LD.new_full((len(plan.slot_R) - plan.live, y_LD.shape[1]), NAN)])


@pytest.fixture
def unrouted():
    """A plan with slots that are not routed here and dead rows."""
    return brute_force_plan(*experts_of("some slots are not routed here"), dead_rows=3)


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_plan_matches_brute_force(name):
    assert_plan_matches_brute_force(ops.routing_plan, *experts_of(name))


def test_the_plan_matches_brute_force_at_every_number_of_slots():
    for T, K, E in sizes():
        assert_plan_matches_brute_force(ops.routing_plan, pattern_of_experts("unrouted", T, K, E), E)


def test_the_plan_is_that_of_the_plain_function():
    for T, K, E in sizes():
        expert_TK = pattern_of_experts("skewed", T, K, E)
        expected = plain.routing_plan(expert_TK, E)
        wanted = (expected.counts_E, expected.ends_E, expected.row_TK, expected.slot_R)
        for actual, tensor in zip(ops.routing_plan(expert_TK, E), wanted, strict=True):
            assert torch.equal(actual, tensor)


def test_a_plan_of_no_tokens_is_empty():
    counts_E, ends_E, row_TK, slot_R = ops.routing_plan(torch.empty(0, 3, dtype=torch.int32), 4)
    assert counts_E.tolist() == ends_E.tolist() == [0, 0, 0, 0]
    assert row_TK.shape == (0, 3) and slot_R.shape == (0,)


def test_an_id_beyond_the_last_expert_is_not_routed_here():
    counts_E, _, row_TK, slot_R = ops.routing_plan(torch.tensor([[9, 0], [4, 3]], dtype=torch.int32), 4)
    assert (counts_E.tolist(), row_TK.tolist()) == ([1, 0, 0, 1], [[-1, 0], [-1, 1]])
    assert slot_R.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_are_spread_summed_and_multiplied(name, dtype, weighted):
    plan = brute_force_plan(*experts_of(name), dead_rows=3)
    assert_rows_are_spread(spread, plan, 24, dtype, weighted=weighted)
    assert_rows_are_summed(summed, plan, 24, dtype, weighted=weighted)
    assert_rows_are_multiplied(dotted, plan, 24, dtype)


def test_values_and_gradients_are_those_of_the_plain_functions():
    T, K, E, D = 37, 6, 16, 24
    expert_TK = pattern_of_experts("skewed", T, K, E)
    _, ends_E, row_TK, slot_R = ops.routing_plan(expert_TK, E)
    x, y, dx = values(T, D).requires_grad_(), values(T * K, D, seed=1).requires_grad_(), values(T, D, seed=2)
    rows, expected_rows = ops.permute(x, slot_R, row_TK, ends_E), plain.permute(x, slot_R, row_TK)
    sums = ops.unpermute(y, slot_R, row_TK, ends_E, None)
    expected_sums = plain.unpermute(y, slot_R, row_TK)
    assert torch.equal(rows, expected_rows)
    assert_forward_close(sums, expected_sums)
    dy = values(T * K, D, seed=3)
    (actual,), (wanted,) = torch.autograd.grad(rows, x, dy), torch.autograd.grad(expected_rows, x, dy)
    assert_gradient_close(actual, wanted)
    (actual,), (wanted,) = torch.autograd.grad(sums, y, dx), torch.autograd.grad(expected_sums, y, dx)
    assert torch.equal(actual, wanted)


def test_the_gradients_match_finite_differences():
    few = brute_force_plan(pattern_of_experts("unrouted", 5, 3, 4), 4, dead_rows=2)
    x, y = values(5, 2).double().requires_grad_(), values(few.live, 2).double().requires_grad_()
    weight = values(5, 3, seed=4).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: spread(x, few, None)[: few.live], x)
    assert torch.autograd.gradcheck(lambda y: summed(with_dead_rows(y, few), few, None), y)
    assert torch.autograd.gradcheck(lambda y, w: summed(with_dead_rows(y, few), few, w), (y, weight))
    assert torch.autograd.gradgradcheck(lambda x: spread(x, few, None)[: few.live] ** 2, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradients_match_fp64_formulas(dtype, unrouted):
    plan, (T, K), D = unrouted, unrouted.row_TK.shape, 40
    y_RD = with_dead_rows(values(plan.live, D, dtype=dtype), plan).requires_grad_()
    weight_TK = values(T, K, seed=1).requires_grad_()
    x_TD, dx_TD = values(T, D, dtype=dtype), values(T, D, dtype=dtype, seed=2)
    dy_RD = values(plan.live, D, dtype=dtype, seed=3)
    dy, dweight = torch.autograd.grad(summed(y_RD, plan, weight_TK), (y_RD, weight_TK), dx_TD)
    exact = [t.detach().double().requires_grad_() for t in (y_RD[: plan.live], weight_TK)]
    token_L, slot_L = plan.slot_R[: plan.live].long() // K, plan.slot_R[: plan.live].long()
    expected = torch.zeros(T, D, dtype=torch.float64)
    expected = expected.index_add(0, token_L, exact[0] * exact[1].flatten()[slot_L, None])
    wanted_dy, wanted_dweight = torch.autograd.grad(expected, exact, dx_TD.double())
    assert (dy.dtype, dweight.dtype) == (dtype, torch.float32)
    assert_gradient_close(dy[: plan.live], wanted_dy)
    assert_gradient_close(dweight, wanted_dweight)
    x_TD.requires_grad_()
    (dx,) = torch.autograd.grad(spread(x_TD, plan, None), x_TD, with_dead_rows(dy_RD, plan))
    wanted_dx = torch.zeros(T, D, dtype=torch.float64).index_add(0, token_L, dy_RD.double())
    assert dx.dtype == dtype
    assert_gradient_close(dx, wanted_dx)


def test_the_gradient_of_bf16_weights_is_bf16(unrouted):
    weight = values(*unrouted.row_TK.shape, dtype=torch.bfloat16).requires_grad_()
    y_RD = with_dead_rows(values(unrouted.live, 3), unrouted)
    summed(y_RD, unrouted, weight).sum().backward()
    assert weight.grad.dtype == torch.bfloat16 and bool(weight.grad.isfinite().all())


@pytest.mark.parametrize(("rows_want", "weights_want"), list(itertools.product((True, False), repeat=2)))
def test_only_the_gradients_that_are_wanted_are_computed(rows_want, weights_want, unrouted):
    y_RD = with_dead_rows(values(unrouted.live, 3), unrouted).requires_grad_(rows_want)
    weight_TK = values(*unrouted.row_TK.shape).requires_grad_(weights_want)
    with SeenOps() as seen:
        x_TD = summed(y_RD, unrouted, weight_TK)
        if x_TD.requires_grad:
            x_TD.sum().backward()
    wanted = ["unpermute_dgrad"] * rows_want + ["unpermute_weight_grad"] * weights_want
    assert seen.names == [f"graphmoe::{name}" for name in ("unpermute", *wanted)]


def test_without_weights_no_rows_are_kept_for_the_backward(unrouted):
    saved = []
    y_RD = with_dead_rows(values(unrouted.live, 7), unrouted).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        summed(y_RD, unrouted, None)
    assert tuple(y_RD.shape) not in saved and tuple(unrouted.row_TK.shape) in saved


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_fake_tensors_have_the_shape_and_strides_of_real_ones(dtype, unrouted):
    plan = unrouted
    T, K = plan.row_TK.shape

    def results(expert_TK, slot_R, row_TK, ends_E, x_TD, y_RD, weight_TK):
        where = (slot_R, row_TK, ends_E)
        rows, sums = ops.permute(x_TD, *where), ops.unpermute(y_RD, *where, weight_TK)
        dy, dweight = torch.autograd.grad(sums, (y_RD, weight_TK), x_TD.detach())
        (dx,) = torch.autograd.grad(rows, x_TD, y_RD)
        return [rows, sums, dy, dweight, dx, *ops.routing_plan(expert_TK, 16)]

    expert_TK = experts_of("some slots are not routed here")[0]
    x_TD, y_RD = values(T, 7, dtype=dtype), with_dead_rows(values(plan.live, 7, dtype=dtype), plan)
    inputs = (expert_TK, plan.slot_R, plan.row_TK, plan.ends_E, x_TD, y_RD, values(T, K))
    inputs = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
    with FakeTensorMode() as mode:
        fakes = results(*[mode.from_tensor(t) for t in inputs])
    for fake, real in zip(fakes, results(*inputs), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_torch_accepts_the_ops(dtype):
    expert_TK = pattern_of_experts("random", 5, 3, 4)
    _, ends_E, row_TK, slot_R = ops.routing_plan(expert_TK, 4)
    x_TD, y_RD, weight_TK = values(5, 2, dtype=dtype), values(15, 2, dtype=dtype), values(5, 3)
    where = (slot_R, row_TK, ends_E)
    opcheck(ops.routing_plan.default, (expert_TK, 4))
    opcheck(ops.unpermute_weight_grad.default, (x_TD, y_RD, row_TK))
    for weight in (None, weight_TK):
        opcheck(ops.unpermute_dgrad.default, (x_TD, *where, weight))
    opcheck(ops.unpermute.default, (y_RD.requires_grad_(), *where, weight_TK.requires_grad_()))
    opcheck(ops.unpermute.default, (y_RD, *where, None))
    opcheck(ops.permute.default, (x_TD.requires_grad_(), *where))


def test_the_ops_run_on_a_cpu_that_has_no_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch
from graphmoe.ops import permute, swiglu
ops = torch.ops.graphmoe
_, ends, row, slot = ops.routing_plan(torch.tensor([[1, 0]], dtype=torch.int32), 2)
where, x = (slot, row, ends), torch.ones(1, 4, requires_grad=True)
rows = ops.swiglu(ops.permute(x, *where), torch.ones(2), ends)
ops.unpermute(rows, *where, torch.ones(1, 2, requires_grad=True)).sum().backward()
assert not any(name.endswith("_kernels") for name in sys.modules if name.startswith("graphmoe"))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", names_of(INTERPRETED))
def test_in_the_interpreter(name):
    assert_passed(INTERPRETED, name)


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_ahead_of_time(target):
    facts = compiled("tests.ops.compiled_rows", target)
    assert_sound(facts)
    assert not {name: fact.atomics for name, fact in facts.items() if fact.atomics}
    # 16 bytes at a time, and each row once; 64 slots in rounds of 16.
    for slots, case in ((6, "6"), (16, "16 weighted"), (16, "64 weighted")):
        spreading, summing = facts[f"spread {case}"], facts[f"sum {case}"]
        assert (spreading.wide_loads, spreading.wide_stores) == (1, slots)
        assert (summing.wide_loads, summing.wide_stores) == (slots, 1)
    assert facts["dot 6"].wide_loads >= 2
