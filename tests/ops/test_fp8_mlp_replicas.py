"""The grouped MLP in 8 bits over two lists of weights, and its operations with replicas of experts."""

import functools

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from graphmoe.config.formats import FORMATS
from graphmoe.ops import formats
from graphmoe.ops.fp8 import INPUT
from graphmoe.ops.fp8_mlp import launches
from graphmoe.ops.grouped_mlp.reference import Plan
from tests.ops.interpreted import BACKENDS, INTERPRETING, KERNELS
from tests.ops.row_cases import EXPERT_RS, plan_with_replicas
from tests.ops.test_fp8_mlp import EMPTY, SHAPES, WITH_EXPERTS, case_of, decibels, every, layer, same

OWN = {"one": 1, "some": 3, "all that have rows": 5}
"""Experts in the first list."""
LISTS = [(recipe, name) for recipe in WITH_EXPERTS for name in OWN]
if INTERPRETING:  # which is slow: kernels of rowwise are those of tensorwise too
    LISTS = [each for each in LISTS if (each[0] == "tensorwise") == (each[1] == "some")]
    LISTS.remove(("mxfp8", "one"))
ops = torch.ops.graphmoe


@pytest.mark.parametrize(("recipe", "own"), LISTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_lists_give_the_bits_of_one(monkeypatch, backend, recipe, own):
    own = OWN[own]
    # The number of a rank's own experts sets the tiles; here all lists have the same.
    monkeypatch.setattr(launches, "_with_height", lambda tile, kind, rows_per_expert: tile)
    case, steps = case_of(recipe, backend), formats.KERNELS[recipe].experts(backend != "plain")
    ends_E = case.plan.ends_E
    one, two = (every(steps, case, number) for number in (len(ends_E), own))
    for found, wanted in zip(two.of_rows, one.of_rows, strict=True):
        same(found, wanted)
    has_rows = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) > 0
    for found, wanted in zip(two.sums, one.sums, strict=True):
        assert found[:own].equal(wanted[:own])
        assert (2 * found[own:])[has_rows[own:]].equal(wanted[own:][has_rows[own:]])  # stored, not added


@pytest.mark.parametrize("recipe", WITH_EXPERTS)
@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_of_further_experts_end_with_the_last_that_has_rows(backend, recipe):
    for total in every(formats.KERNELS[recipe].experts(True), case_of(recipe, backend), 1).sums:
        assert total[2:-EMPTY].any() and not total[1].any()
        assert not total[:-EMPTY].isnan().any() and total[-EMPTY:].isnan().all()


# The operations, on one rank that has replicas of its own experts.


def with_replicas(dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], Plan, Plan, Tensor]:
    """A layer; its plan, and that where every second row of an expert of `EXPERT_RS` is the replica's; dy."""
    inputs, plan, dy = layer(SHAPES["small"], dtype)
    expert_TK = torch.searchsorted(plan.ends_E, plan.row_TK, right=True).int()
    return [*inputs], plan, Plan(*plan_with_replicas(expert_TK, len(plan.ends_E))), dy


@pytest.mark.parametrize("recipe", WITH_EXPERTS)
def test_replicas_compute_what_their_experts_do(one_peer, recipe):
    inputs, plan, places, dy = with_replicas()
    results = []
    for given in ((*plan, recipe), (*places, recipe, EXPERT_RS)):
        leaves = [each.clone().requires_grad_() for each in inputs]
        y = ops.fp8_mlp(*leaves, *given)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    (y, dx, *weights, dweight), found = results
    assert found[0].equal(y) and found[1].equal(dx) and found[4].equal(dweight)
    for one, other in zip(found[2:4], weights, strict=True):
        assert one.dtype == other.dtype
        assert decibels(one, other) > 25  # rows of a copy have a scale, or blocks, of their own in a sum


@pytest.mark.parametrize("recipe", WITH_EXPERTS)
def test_sums_hold_what_came_home_and_torch_accepts_the_operations(one_peer, recipe):
    inputs, _, places, dy = with_replicas(torch.float32)
    x, *weights, weight_TK = inputs
    by, is_delayed = formats.KERNELS[recipe], FORMATS[recipe].is_delayed
    rows, columns = ([part for w in weights for part in store(w)] for store in (by.weight, by.transposed))
    store = formats.KERNELS["rowwise" if is_delayed else recipe].quantize
    of_x, of_dy = (store(each, weights[0], INPUT) for each in (x, dy))
    dtype, one = torch.float32, functools.partial(torch.ones, 1)
    known_a, known_dh = (one(), one()) if is_delayed else (None, None)
    largest = None if known_a is None else one()
    forward = (*of_x, *rows, weight_TK, *places, dtype, recipe, known_a, largest, EXPERT_RS)
    _, *h, _ = ops.fp8_mlp_forward(*forward)
    hidden = (*of_x, *rows[:2], *places, dtype, recipe, EXPERT_RS)
    for found, wanted in zip(ops.fp8_mlp_hidden(*hidden), h, strict=True):
        assert found.float().equal(wanted.float())
    dgrad = (*of_dy, *h, *columns, weight_TK, *places, dtype, recipe, known_a, known_dh, largest, EXPERT_RS)
    _, _, *made, _ = ops.fp8_mlp_dgrad(*dgrad)
    sides = (*of_dy, *of_x, *made, *places)
    gradients = ops.fp8_mlp_wgrad(*sides, recipe, EXPERT_RS)
    totals = [torch.full(w.shape, 7.0) for w in weights]
    ops.fp8_mlp_wgrad_into(*sides, *totals, recipe, True, EXPERT_RS)
    for total, gradient in zip(totals, gradients, strict=True):
        torch.testing.assert_close(total, gradient + 7)
    for op, given in (
        (ops.fp8_mlp_forward, forward), (ops.fp8_mlp_hidden, hidden), (ops.fp8_mlp_dgrad, dgrad),
        (ops.fp8_mlp_wgrad, (*sides, recipe, EXPERT_RS)),
        (ops.fp8_mlp_wgrad_into, (*sides, *totals, recipe, True, EXPERT_RS)),
    ):  # fmt: skip
        opcheck(op.default, given, test_utils="test_faketensor")  # torch mutates no 8 bits
    for form in (by.weight, by.transposed):
        opcheck(getattr(ops, form.name).default, (weights[0],), test_utils="test_faketensor")
