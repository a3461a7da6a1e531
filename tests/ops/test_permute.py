"""The routing plan and the movement of rows: brute force in Python, gradients, fakes, and the kernels."""

import functools
import itertools
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch.library import opcheck

from graphmoe.ops import permute as plain
from tests.ops import row_cases
from tests.ops.ahead_of_time import ROOT, launches_of
from tests.ops.interpreted import BACKENDS, device_of
from tests.ops.row_cases import (
    ROUTINGS,
    assert_plan_matches_brute_force,
    assert_rows_are_multiplied,
    assert_rows_are_spread,
    assert_rows_are_summed,
    brute_force_plan,
    choose,
    experts_of,
    pattern_of_experts,
    rows_with_nan,
    sizes,
    spread,
    summed,
    values,
)
from tests.ops.seen_ops import SeenOps
from tests.tolerances import assert_gradient_close

ops = torch.ops.graphmoe
DTYPES = (torch.float32, torch.bfloat16)
PATTERNS = ("random", "skewed", "same experts", "half of the experts", "unrouted")


class Rows(NamedTuple):
    """Operations of a backend."""

    plan: object
    spread: object
    summed: object
    dotted: object


def rows_of(backend):
    if backend != "interpreted":
        return Rows(ops.routing_plan, spread, summed, row_cases.dotted)
    from graphmoe.ops import permute_kernels as kernels

    return Rows(
        kernels.routing_plan,
        lambda x_TD, plan, weight_TK: kernels.spread_rows(x_TD, plan.row_TK, weight_TK, len(plan.slot_R)),
        lambda y_RD, plan, weight_TK: kernels.sum_rows(y_RD, plan.row_TK, weight_TK),
        lambda dx_TD, y_RD, plan: kernels.dot_rows(dx_TD, y_RD, plan.row_TK),
    )


@pytest.fixture
def unrouted():
    return brute_force_plan(*experts_of("some slots are not routed here"), dead_rows=3)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plan_matches_brute_force(backend, name):
    assert_plan_matches_brute_force(rows_of(backend).plan, *experts_of(name), device_of(backend))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plan_matches_brute_force_at_every_number_of_slots(backend, pattern):
    for T, K, E in sizes():
        experts = pattern_of_experts(pattern, T, K, E)
        assert_plan_matches_brute_force(rows_of(backend).plan, experts, E, device_of(backend))


@pytest.mark.parametrize("pattern", ["random", "one expert", "unrouted"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plan_matches_brute_force_over_many_chunks(backend, pattern, monkeypatch):
    """Small blocks, so that the scan goes round several times and its last tile is cut."""
    if backend == "interpreted":
        from graphmoe.ops import permute_kernels

        for name, size in {"BLOCK": 32, "STEP": 8, "SCAN_CHUNKS": 4}.items():
            monkeypatch.setattr(permute_kernels, name, size)
    expert_TK = pattern_of_experts(pattern, 101, 5, 19)
    assert_plan_matches_brute_force(rows_of(backend).plan, expert_TK, 19, device_of(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plan_takes_no_tokens_and_ids_beyond_the_last_expert(backend):
    def plan(experts):
        return rows_of(backend).plan(experts.int().to(device_of(backend)), 4)

    counts_E, ends_E, row_TK, slot_R = plan(torch.empty(0, 3))
    assert counts_E.tolist() == ends_E.tolist() == [0, 0, 0, 0]
    assert row_TK.shape == (0, 3) and slot_R.shape == (0,)
    counts_E, _, row_TK, slot_R = plan(torch.tensor([[9, 0], [4, 3]]))
    assert (counts_E.tolist(), row_TK.tolist()) == ([1, 0, 0, 1], [[-1, 0], [-1, 1]])
    assert slot_R.tolist() == [1, 3, 0, 2]


def test_the_plan_of_the_plain_function_is_that_of_the_operation():
    for T, K, E in sizes():
        expert_TK = choose("skewed", T, K, E)
        expected = plain.routing_plan(expert_TK, E)
        for actual, wanted in zip(ops.routing_plan(expert_TK, E), expected, strict=True):
            assert torch.equal(actual, wanted)
    twice = plain.routing_plan(torch.tensor([[1, 1], [0, 1]], dtype=torch.int32), 3)
    assert (twice.counts_E.tolist(), twice.row_TK.tolist()) == ([1, 3, 0], [[1, 2], [0, 3]])
    meta = plain.routing_plan(torch.empty(5, 2, dtype=torch.int32, device="meta"), 4)
    assert [tuple(t.shape) for t in meta] == [(4,), (4,), (5, 2), (10,)]
    assert {t.dtype for t in meta} == {torch.int32}


def assert_rows_are_moved(backend, plan, columns, dtype, weighted):
    run, device = rows_of(backend), device_of(backend)
    assert_rows_are_spread(run.spread, plan, columns, dtype, device, weighted)
    assert_rows_are_summed(run.summed, plan, columns, dtype, device, weighted)
    assert_rows_are_multiplied(run.dotted, plan, columns, dtype, device)


MOVED = [
    (name, DTYPES[of_dtype], (number + of_dtype) % 2 == 0)
    for number, name in enumerate(ROUTINGS)
    for of_dtype in range(2)
]
"""Every routing in both dtypes, with weights in one of them."""


@pytest.mark.parametrize(("name", "dtype", "weighted"), MOVED, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_any_routing_are_spread_summed_and_multiplied(backend, name, dtype, weighted):
    plan = brute_force_plan(*experts_of(name), dead_rows=3, device=device_of(backend))
    assert_rows_are_moved(backend, plan, 24, dtype, weighted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_any_number_of_slots_are_spread_summed_and_multiplied(backend):
    for T, K, E in sizes():
        experts = pattern_of_experts("unrouted", T, K, E)
        plan = brute_force_plan(experts, E, dead_rows=1, device=device_of(backend))
        assert_rows_are_moved(backend, plan, 3, torch.float32, weighted=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 37, 64, 2100])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_any_width_are_moved(backend, columns, dtype):
    run, device = rows_of(backend), device_of(backend)
    for pattern, T, K, E in (("unrouted", 5 if columns > 1000 else 301, 3, 7), ("random", 7, 1, 8)):
        plan = brute_force_plan(pattern_of_experts(pattern, T, K, E), E, dead_rows=2, device=device)
        assert_rows_are_spread(run.spread, plan, columns, dtype, device, weighted=True)
        if dtype == torch.bfloat16:
            assert_rows_are_summed(run.summed, plan, columns, dtype, device)
            assert_rows_are_multiplied(run.dotted, plan, columns, dtype, device)


def test_a_token_is_summed_in_the_order_of_its_slots_not_of_its_experts():
    plan = plain.routing_plan(torch.tensor([[2, 0, 1]], dtype=torch.int32), 3)
    y = torch.tensor([[-1e8], [1.0], [1e8]])  # by row: experts 0, 1, 2; slots 1, 2, 0
    assert plain.unpermute(y, plan.slot_R, plan.row_TK).item() == (1e8 - 1e8) + 1.0


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradients_match_fp64_formulas(dtype, weighted, unrouted):
    plan, (T, K), D, live = unrouted, unrouted.row_TK.shape, 40, unrouted.live
    token_L, slot_L = plan.slot_R[:live].long() // K, plan.slot_R[:live].long()
    x, y = values(T, D, dtype=dtype), rows_with_nan(plan, D, dtype, "cpu")
    weight = values(T, K, seed=2) if weighted else torch.ones(T, K)

    def assert_matches(run, rows, gradient, formula):
        leaves = [rows.clone().requires_grad_(), *[weight.clone().requires_grad_()] * weighted]
        actual = torch.autograd.grad(run(leaves[0], plan, *leaves[1:] or [None]), leaves, gradient)
        exact = [leaf.detach()[:live].double().requires_grad_() for leaf in (rows, weight)]
        expected = formula(exact[0], exact[1].flatten()[slot_L, None])
        wanted = torch.autograd.grad(expected, exact, gradient[: len(expected)].double())
        for ours, theirs, leaf in zip(actual, wanted, leaves, strict=False):
            assert ours.dtype == leaf.dtype
            assert_gradient_close(ours[: len(theirs)], theirs)

    zeros = torch.zeros(T, D, dtype=torch.float64)
    back = lambda y, w: zeros.index_add(0, token_L, y * w)  # noqa: E731
    assert_matches(summed, y, x, back)
    assert_matches(spread, x, y, lambda x, w: x[token_L] * w)


@pytest.mark.parametrize(("rows_want", "weights_want"), list(itertools.product((True, False), repeat=2)))
@pytest.mark.parametrize("run", [spread, summed])
def test_only_the_gradients_that_are_wanted_are_computed(run, rows_want, weights_want, unrouted):
    rows = rows_with_nan(unrouted, 3, torch.float32, "cpu")
    rows = (rows if run is summed else values(len(unrouted.row_TK), 3)).requires_grad_(rows_want)
    weight_TK = values(*unrouted.row_TK.shape, dtype=torch.bfloat16).requires_grad_(weights_want)
    with SeenOps() as seen:
        moved = run(rows, unrouted, weight_TK)
        if moved.requires_grad:
            moved.sum().backward()
    names = ("unpermute", "permute") if run is summed else ("permute", "unpermute")
    wanted = [names[0], *names[1:] * rows_want, *["unpermute_weight_grad"] * weights_want]
    assert seen.names == [f"graphmoe::{name}" for name in wanted]
    if weights_want:
        assert weight_TK.grad.dtype == torch.bfloat16 and bool(weight_TK.grad.isfinite().all())


def test_without_weights_no_rows_are_kept_for_the_backward(unrouted):
    saved = []
    y_RD = rows_with_nan(unrouted, 7, torch.float32, "cpu").requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        summed(y_RD, unrouted, None)
    assert tuple(y_RD.shape) not in saved and tuple(unrouted.row_TK.shape) in saved


def test_torch_accepts_the_ops():
    dtype = torch.bfloat16
    expert_TK = pattern_of_experts("random", 5, 3, 4)
    _, ends_E, row_TK, slot_R = ops.routing_plan(expert_TK, 4)
    x_TD, y_RD, weight_TK = values(5, 2, dtype=dtype), values(15, 2, dtype=dtype), values(5, 3)
    where = (slot_R, row_TK, ends_E)
    opcheck(ops.routing_plan.default, (expert_TK, 4))
    opcheck(ops.unpermute_weight_grad.default, (x_TD, y_RD, row_TK))
    for weight in (None, weight_TK):
        leaf = None if weight is None else weight.clone().requires_grad_()
        opcheck(ops.unpermute.default, (y_RD.clone().requires_grad_(), *where, leaf))
        opcheck(ops.permute.default, (x_TD.clone().requires_grad_(), *where, leaf))
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
import graphmoe.ops.grouped_mlp
w = torch.ones(2, 8, 4), torch.ones(2, 4, 4)
ops.grouped_mlp(torch.ones(1, 4), *w, torch.ones(1, 2), *where, "triton")
assert not any(name.endswith("_kernels") for name in sys.modules if name.startswith("graphmoe"))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def ahead_of_time_cases():
    """Rows of bf16 for 6, 16 and 64 slots, narrow ones, weights (rows of one column), and plans."""
    from graphmoe.ops import permute_kernels as kernels

    for name, K, columns, dtype, weighted in (
        ("6", 6, 2048, torch.bfloat16, False),
        ("16 weighted", 16, 2048, torch.bfloat16, True),
        ("64 weighted", 64, 2048, torch.bfloat16, True),
        ("64 of narrow rows", 64, 8, torch.bfloat16, True),
        ("weights", 1, 1, torch.float32, False),
    ):
        with torch.device("meta"):
            x, y = torch.empty(999, columns, dtype=dtype), torch.empty(999 * K, columns, dtype=dtype)
            row, weight = torch.empty(999, K, dtype=torch.int32), torch.empty(999, K) if weighted else None
        yield from launches_of(name, functools.partial(kernels.spread_rows, x, row, weight, 999 * K))
        yield from launches_of(name, functools.partial(kernels.sum_rows, y, row, weight))
        if columns > 8:
            yield from launches_of(name, functools.partial(kernels.dot_rows, x, y, row))
    for num_experts in (64, 512):
        expert = torch.empty(999, 6, dtype=torch.int32, device="meta")
        yield from launches_of(f"{num_experts}", functools.partial(kernels.routing_plan, expert, num_experts))
