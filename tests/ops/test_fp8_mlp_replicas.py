"""The grouped MLP in 8 bits over two lists of weights, and its operations with replicas of experts."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from graphmoe.config.formats import FORMATS
from graphmoe.ops import formats
from graphmoe.ops.fp8 import INPUT
from graphmoe.ops.fp8_mlp import launches
from graphmoe.ops.fp8_mlp.reference import Known
from graphmoe.ops.grouped_mlp.reference import Plan
from tests.ops.interpreted import BACKENDS, KERNELS, device_of
from tests.ops.row_cases import EXPERT_RS, NAN, plan_with_replicas
from tests.ops.test_fp8_mlp import decibels, layer

SHAPE = (48, 2, 5, 64, 160)
"""T, K, E, D, F; expert 1 has no rows, and neither have `EMPTY` experts behind the last."""
EMPTY = 2
WITH_EXPERTS = ("rowwise", "tensorwise", "mxfp8")
OWN = {"one": 1, "some": 3, "all that have rows": 5}
"""Experts in the first list."""
ops = torch.ops.graphmoe


class Case(NamedTuple):
    """A layer as the operations get it."""

    x: tuple[Tensor, ...]
    dy: tuple[Tensor, ...]
    rows: list[tuple[Tensor, Tensor]]
    """Both weights, stored for the forward."""
    columns: list[tuple[Tensor, Tensor]]
    """For the backward."""
    weight_TK: Tensor
    plan: Plan
    known: list[Tensor]
    """Scales of the activation and of dh, if they are known."""


def case_of(recipe: str, device: str = "cpu") -> Case:
    (x, *weights, weight_TK), plan, dy = layer(SHAPE, torch.float32, device)
    plan = plan._replace(ends_E=torch.cat([plan.ends_E, plan.ends_E[-1:].expand(EMPTY)]))
    weights = [torch.cat([w, w[:EMPTY]]) for w in weights]
    by, is_delayed = formats.KERNELS[recipe], FORMATS[recipe].is_delayed

    def tokens(of: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        q, scale = by.quantize(of.to("cpu"), w.to("cpu"), INPUT)
        return q.to(device), (scale.expand(len(of), 1).contiguous() if is_delayed else scale).to(device)

    rows, columns = ([store(w) for w in weights] for store in (by.weight, by.transposed))
    known = [torch.tensor([2.0**n], device=device) for n in (-5, -9)] if is_delayed else []
    sides = tokens(x, weights[0]), tokens(dy, weights[1])
    return Case(*sides, rows, columns, weight_TK, plan, known)


def every(kernels: Any, case: Case, own: int) -> list[Tensor]:
    """All results, with weights from ``own`` on as a second list; live rows, and sums of two gradients."""
    (D, F), live = case.rows[1][0].shape[1:], int(case.plan.ends_E[-1])
    scales = [torch.zeros(1, device=case.weight_TK.device) for _ in case.known]

    def lists(weights: list[tuple[Tensor, Tensor]]) -> tuple[list[Any], dict[str, Any]]:
        parts = [[tuple(part[at] for part in w) for w in weights] for at in (slice(own), slice(own, None))]
        return parts[0], {"more": parts[1]} if own < len(case.plan.ends_E) else {}

    weights, more = lists(case.rows)
    known = [Known(case.known[0], scales[0])] if case.known else []
    y, *h = kernels.forward(case.x, *weights, case.weight_TK, case.plan, torch.float32, *known, **more)
    first = {name: each[:1] for name, each in more.items()}
    hidden = kernels.hidden(case.x, weights[0], case.plan, torch.float32, **first)
    weights, more = lists(case.columns)
    known = [case.known[0], Known(case.known[1], scales[1])] if case.known else []
    dx, dweight, *made = kernels.dgrad(
        case.dy, tuple(h), *weights, case.weight_TK, case.plan, torch.float32, *known, **more
    )
    sizes, sides = ((2 * F, D), (D, F)), (case.dy, case.x, tuple(made[:2]), tuple(made[2:]), case.plan)
    totals = [torch.full((len(case.plan.ends_E), *size), NAN, device=y.device) for size in sizes]
    parts = [total[:own] for total in totals]
    behind = {"of_more": [total[own:] for total in totals]} if more else {}
    kernels.wgrad(*sides, tuple(parts), **behind)
    kernels.wgrad(*sides, tuple(parts), add=True, **behind)
    return [y, dx, dweight, *scales, *(each[:live] for each in (*h, *hidden, *made)), *totals]


@pytest.mark.parametrize("own", OWN.values(), ids=[*OWN])
@pytest.mark.parametrize("recipe", WITH_EXPERTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_lists_give_the_bits_of_one(monkeypatch, backend, recipe, own):
    # The number of a rank's own experts sets the tiles; here all lists have the same.
    monkeypatch.setattr(launches, "_with_height", lambda tile, rows_per_expert: tile)
    case, kernels = case_of(recipe, device_of(backend)), formats.KERNELS[recipe].experts(backend != "plain")
    *one, up, down = every(kernels, case, len(case.plan.ends_E))
    *two, of_up, of_down = every(kernels, case, own)
    for found, wanted in zip(two, one, strict=True):
        assert found.dtype == wanted.dtype and found.float().equal(wanted.float())
    has_rows = torch.diff(case.plan.ends_E, prepend=case.plan.ends_E.new_zeros(1)) > 0
    for found, wanted in ((of_up, up), (of_down, down)):
        assert found[:own].equal(wanted[:own])
        assert (2 * found[own:])[has_rows[own:]].equal(wanted[own:][has_rows[own:]])  # stored, not added


@pytest.mark.parametrize("recipe", WITH_EXPERTS)
@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_of_further_experts_end_with_the_last_that_has_rows(backend, recipe):
    case = case_of(recipe, device_of(backend))
    for total in every(formats.KERNELS[recipe].experts(True), case, 1)[-2:]:
        assert total[2:-EMPTY].any() and not total[1].any()
        assert not total[:-EMPTY].isnan().any() and total[-EMPTY:].isnan().all()


# The operations, on one rank that has replicas of its own experts.


def with_replicas(dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], Plan, Plan, Tensor]:
    """A layer; its plan, and that where every second row of an expert of `EXPERT_RS` is the replica's; dy."""
    inputs, plan, dy = layer(SHAPE, dtype)
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
