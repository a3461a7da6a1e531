"""The routing plan and the movement of rows: brute force in Python, gradients, fakes, and the kernels."""

import functools
import itertools
import os
import random
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

from graphmoe.ops import permute as plain
from tests.ops.ahead_of_time import ROOT, launches_of
from tests.ops.interpreted import BACKENDS, INTERPRETING, device_of
from tests.ops.row_cases import NAN, brute_force_plan, choose, fresh_memory_is_nan, pattern_of_experts, values
from tests.ops.seen_ops import SeenOps
from tests.tolerances import assert_forward_close, assert_gradient_close

ops = torch.ops.graphmoe
DTYPES = (torch.float32, torch.bfloat16)
ROUTINGS = {  # name: (pattern, T, K, E)
    "random": ("random", 37, 6, 64),
    "skewed": ("skewed", 61, 3, 9),
    "empty experts": ("half of the experts", 29, 4, 24),
    "all tokens on one expert": ("one expert", 23, 5, 12),
    "one expert is all there are": ("one expert", 7, 2, 1),
    "some slots are not routed here": ("unrouted", 41, 6, 16),
    "no slot is routed here": ("nothing", 5, 3, 4),
    "one token": ("random", 1, 2, 2),
    "one slot": ("random", 53, 1, 2),
    "16 slots of 512 experts": ("random", 35, 16, 512),
    "every expert": ("random", 31, 8, 8),
    "slots of two rounds": ("unrouted", 11, 20, 33),
}


def sizes():
    """(T, K, E): each K up to 16 and some more, experts up to 512, token counts that divide nothing."""
    draw = random.Random(0)
    for K in range(1, 17):
        yield draw.choice([1, 7, 37, 61]), K, draw.randint(max(K, 2), 512)
    yield from [(67, 16, 512), (31, 8, 8), (1, 2, 2), (53, 1, 2), (5, 3, 512), (5, 64, 100)]


def spread(x_TD, plan, weight_TK):
    return ops.permute(x_TD, plan.slot_R, plan.row_TK, plan.ends_E, weight_TK)


def summed(y_RD, plan, weight_TK):
    return ops.unpermute(y_RD, plan.slot_R, plan.row_TK, plan.ends_E, weight_TK)


def dotted(dx_TD, y_RD, plan):
    return ops.unpermute_weight_grad(dx_TD, y_RD, plan.row_TK)


def operations_of(backend):
    """Functions that make a plan, spread rows, sum them, and multiply them with gradients."""
    if backend != "interpreted":
        return ops.routing_plan, spread, summed, dotted
    from graphmoe.ops import permute_kernels as kernels

    return (
        kernels.routing_plan,
        lambda x_TD, plan, weight_TK: kernels.spread_rows(x_TD, plan.row_TK, weight_TK, len(plan.slot_R)),
        lambda y_RD, plan, weight_TK: kernels.sum_rows(y_RD, plan.row_TK, weight_TK),
        lambda dx_TD, y_RD, plan: kernels.dot_rows(dx_TD, y_RD, plan.row_TK),
    )


def plan_of(pattern, T, K, E, dead_rows, backend="plain"):
    return brute_force_plan(pattern_of_experts(pattern, T, K, E), E, dead_rows, device_of(backend))


def assert_plan_matches_brute_force(backend, pattern, T, K, E):
    expert_TK = pattern_of_experts(pattern, T, K, E)
    expected = brute_force_plan(expert_TK, E)
    made = operations_of(backend)[0](expert_TK.to(device_of(backend)), E)
    for actual, wanted in zip(made, expected[:4], strict=True):
        assert actual.is_contiguous()
        torch.testing.assert_close(actual.cpu(), wanted, rtol=0, atol=0)


def rows_with_nan(plan, columns, dtype, device="cpu"):
    """[R, columns]: numbers in live rows, NaN in dead ones."""
    y_RD = values(len(plan.slot_R), columns, dtype=dtype, device=device, seed=1)
    y_RD[plan.live :] = NAN
    return y_RD


def assert_rows_are_moved(backend, plan, columns, dtype, weighted, sum_weighted):
    """Compare y[row[t, k]] = weight[t, k] * x[t], its sums over k, and <dx[t], y[row[t, k]]> in fp32."""
    _, run_spread, run_summed, run_dotted = operations_of(backend)
    device, (T, K), R, live = device_of(backend), plan.row_TK.shape, len(plan.slot_R), plan.live
    x_TD, weight_TK = values(T, columns, dtype=dtype, device=device), values(T, K, device=device, seed=2)
    y_RD = rows_with_nan(plan, columns, dtype, device)
    with fresh_memory_is_nan():
        spread_RD = run_spread(x_TD, plan, weight_TK if weighted else None)
    sum_TD = run_summed(y_RD, plan, weight_TK if sum_weighted else None)
    dot_TK = run_dotted(x_TD, y_RD, plan)
    for actual, shape, kind in (
        (spread_RD, (R, columns), dtype), (sum_TD, (T, columns), dtype), (dot_TK, (T, K), torch.float32),
    ):  # fmt: skip
        assert (actual.dtype, actual.shape, actual.is_contiguous()) == (kind, shape, True)
    slot_L = plan.slot_R[:live].long()
    expected = x_TD[slot_L // K]
    if weighted:  # one product in fp32, rounded once
        assert_rounded_alike(spread_RD[:live], expected.float() * weight_TK.view(-1, 1)[slot_L])
    else:
        assert torch.equal(spread_RD[:live], expected)
    assert bool(spread_RD[live:].isnan().all()), "dead rows are written"
    y_TKD = torch.where(plan.row_TK[..., None] < 0, 0, y_RD[plan.row_TK.clamp(min=0)]).double()
    if sum_weighted:
        assert_forward_close(sum_TD, (y_TKD * weight_TK[..., None]).sum(1))
    else:  # bitwise that of fp32 additions in order
        assert_rounded_alike(sum_TD, functools.reduce(torch.add, y_TKD.float().unbind(1)))
    assert_forward_close(dot_TK, (y_TKD * x_TD.double()[:, None]).sum(-1))


def assert_rounded_alike(actual, expected):
    """Bitwise equality; only closeness where Triton's interpreter cuts fp32 to bf16, which devices round."""
    if actual.dtype == torch.bfloat16 and INTERPRETING:
        assert_forward_close(actual, expected)
    else:
        torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=0)


@pytest.fixture
def unrouted():
    return plan_of(*ROUTINGS["some slots are not routed here"], dead_rows=3)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plan_matches_brute_force(backend, name):
    assert_plan_matches_brute_force(backend, *ROUTINGS[name])


@pytest.mark.parametrize("pattern", ["random", "skewed", "same experts", "half of the experts", "unrouted"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plan_matches_brute_force_at_every_number_of_slots(backend, pattern):
    for size in sizes():
        assert_plan_matches_brute_force(backend, pattern, *size)


@pytest.mark.parametrize("pattern", ["random", "one expert", "unrouted"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plan_matches_brute_force_over_many_chunks(backend, pattern, monkeypatch):
    """Small blocks, so that the scan goes round several times and its last tile is cut."""
    if backend == "interpreted":
        from graphmoe.ops import permute_kernels

        for name, size in {"BLOCK": 32, "STEP": 8, "SCAN_CHUNKS": 4}.items():
            monkeypatch.setattr(permute_kernels, name, size)
    assert_plan_matches_brute_force(backend, pattern, 101, 5, 19)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plan_takes_no_tokens_and_ids_beyond_the_last_expert(backend):
    def plan(experts):
        return operations_of(backend)[0](experts.int().to(device_of(backend)), 4)

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
        assert all(map(torch.equal, ops.routing_plan(expert_TK, E), expected))
    twice = plain.routing_plan(torch.tensor([[1, 1], [0, 1]], dtype=torch.int32), 3)
    assert (twice.counts_E.tolist(), twice.row_TK.tolist()) == ([1, 3, 0], [[1, 2], [0, 3]])
    meta = plain.routing_plan(torch.empty(5, 2, dtype=torch.int32, device="meta"), 4)
    assert [tuple(t.shape) for t in meta] == [(4,), (4,), (5, 2), (10,)]
    assert {t.dtype for t in meta} == {torch.int32}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_any_routing_are_spread_summed_and_multiplied(backend, name, dtype):
    weighted = ([*ROUTINGS].index(name) + DTYPES.index(dtype)) % 2 == 0  # in one of the dtypes
    plan = plan_of(*ROUTINGS[name], dead_rows=3, backend=backend)
    assert_rows_are_moved(backend, plan, 24, dtype, weighted, weighted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_any_number_of_slots_are_spread_summed_and_multiplied(backend):
    for size in sizes():
        plan = plan_of("unrouted", *size, dead_rows=1, backend=backend)
        assert_rows_are_moved(backend, plan, 3, torch.float32, False, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 37, 64, 2100])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_any_width_are_moved(backend, columns, dtype):
    for routing in (("unrouted", 5 if columns > 1000 else 301, 3, 7), ("random", 7, 1, 8)):
        plan = plan_of(*routing, dead_rows=2, backend=backend)
        assert_rows_are_moved(backend, plan, columns, dtype, True, False)


def test_a_token_is_summed_in_the_order_of_its_slots_not_of_its_experts():
    plan = plain.routing_plan(torch.tensor([[2, 0, 1]], dtype=torch.int32), 3)
    y = torch.tensor([[-1e8], [1.0], [1e8]])  # by row: experts 0, 1, 2; slots 1, 2, 0
    assert plain.unpermute(y, plan.slot_R, plan.row_TK).item() == (1e8 - 1e8) + 1.0


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("run", [spread, summed])
def test_the_gradients_match_fp64_formulas(run, dtype, weighted, unrouted):
    plan, (T, K), D, live = unrouted, unrouted.row_TK.shape, 40, unrouted.live
    slot_L = plan.slot_R[:live].long()
    rows = values(T, D, dtype=dtype) if run is spread else rows_with_nan(plan, D, dtype)
    weight_TK = values(T, K, seed=2) if weighted else torch.ones(T, K)
    exact, w = (leaf.double().requires_grad_() for leaf in (rows[:live], weight_TK))
    if run is spread:
        expected, gradient = exact[slot_L // K] * w.view(-1, 1)[slot_L], rows_with_nan(plan, D, dtype)
    else:
        expected = torch.zeros(T, D).double().index_add(0, slot_L // K, exact * w.view(-1, 1)[slot_L])
        gradient = values(T, D, dtype=dtype)
    wanted = torch.autograd.grad(expected, (exact, w), gradient[: len(expected)].double())
    leaves = [rows.requires_grad_(), *[weight_TK.requires_grad_()] * weighted]
    actual = torch.autograd.grad(run(rows, plan, *leaves[1:] or [None]), leaves, gradient)
    for ours, theirs, leaf in zip(actual, wanted, leaves, strict=False):
        assert ours.dtype == leaf.dtype
        assert_gradient_close(ours[: len(theirs)], theirs)


@pytest.mark.parametrize(("rows_want", "weights_want"), list(itertools.product((True, False), repeat=2)))
@pytest.mark.parametrize("run", [spread, summed])
def test_only_the_gradients_that_are_wanted_are_computed(run, rows_want, weights_want, unrouted):
    rows = rows_with_nan(unrouted, 3, torch.float32)
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
    y_RD = rows_with_nan(unrouted, 7, torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        summed(y_RD, unrouted, None)
    assert y_RD.shape not in saved and unrouted.row_TK.shape in saved


def test_torch_accepts_the_ops():
    expert_TK = pattern_of_experts("random", 5, 3, 4)
    _, ends_E, row_TK, slot_R = ops.routing_plan(expert_TK, 4)
    x_TD, y_RD = (values(rows, 2, dtype=torch.bfloat16) for rows in (5, 15))
    opcheck(ops.routing_plan.default, (expert_TK, 4))
    opcheck(ops.unpermute_weight_grad.default, (x_TD, y_RD, row_TK))
    for weight in (None, values(5, 3).requires_grad_()):
        opcheck(ops.unpermute.default, (y_RD.requires_grad_(), slot_R, row_TK, ends_E, weight))
        opcheck(ops.permute.default, (x_TD.requires_grad_(), slot_R, row_TK, ends_E, weight))
    opcheck(ops.permute.default, (x_TD, slot_R, row_TK, ends_E))


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
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def ahead_of_time_cases():
    """Rows of bf16 for 6, 16 and 64 slots, narrow ones, weights (rows of one column), and plans."""
    from graphmoe.ops import permute_kernels as kernels

    meta = functools.partial(torch.empty, device="meta")
    for name, K, columns, dtype, weighted in (
        ("6", 6, 2048, torch.bfloat16, False),
        ("16 weighted", 16, 2048, torch.bfloat16, True),
        ("64 weighted", 64, 2048, torch.bfloat16, True),
        ("64 of narrow rows", 64, 8, torch.bfloat16, True),
        ("weights", 1, 1, torch.float32, False),
    ):
        x, y, row = meta(999, columns, dtype=dtype), meta(999 * K, columns, dtype=dtype), meta(999, K).int()
        weight = meta(999, K) if weighted else None
        yield from launches_of(name, functools.partial(kernels.spread_rows, x, row, weight, 999 * K))
        yield from launches_of(name, functools.partial(kernels.sum_rows, y, row, weight))
        if columns > 8:
            yield from launches_of(name, functools.partial(kernels.dot_rows, x, y, row))
    for num_experts in (64, 512):
        call = functools.partial(kernels.routing_plan, meta(999, 6).int(), num_experts)
        yield from launches_of(f"{num_experts}", call)
