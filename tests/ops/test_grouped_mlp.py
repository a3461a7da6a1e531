"""The grouped MLP: values, gradients, dead rows, fakes, tensors kept for the backward, compilation."""

import itertools

import pytest
import torch
from torch.library import opcheck

from graphmoe.config.schema import ModelConfig
from graphmoe.model.moe import Experts
from graphmoe.ops import grouped_mlp as module
from graphmoe.ops.grouped_mlp.choice import MlpShape, choose_backends
from graphmoe.ops.grouped_mlp.reference import Products, Stepwise
from tests.ops.interpreted import BACKENDS, KERNELS, device_of
from tests.ops.mlp_cases import (
    CASES,
    COUNTS,
    NAN,
    assert_dead_rows_are_left_alone,
    assert_directions_match,
    assert_results_match,
    exact_result,
    interpreter_slack,
    make_problem,
    ops_of,
    poison,
)
from tests.ops.row_cases import fresh_memory_is_nan
from tests.ops.seen_ops import SeenOps
from tests.tolerances import assert_forward_close

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ops = torch.ops.graphmoe


def leaves_of(p, wanted=(True,) * 4):
    return [t.detach().requires_grad_(wants) for t, wants in zip(p.inputs, wanted, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *COUNTS], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_direction_matches_fp64_with_nan_in_dead_rows(backend, case, dtype):
    if backend == "interpreted" and "512" in case:  # 1,000 tiles of weights would take 10 s
        case = (*CASES[case][:4], 100, *CASES[case][5:])
    p = make_problem(case, dtype, device_of(backend))
    if dtype == torch.float64:
        if backend != "plain":
            return  # the kernels have no fp64
        p = p._replace(weight_TK=p.weight_TK.double())
    assert_directions_match(ops_of(backend), p, interpreter_slack(dtype))
    if backend == "cuda":
        assert_directions_match(ops_of("torch"), p)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "case", ["skewed, dead rows", "some slots are not routed here", "no slot is routed here"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_computing_only_h_gives_bitwise_the_h_of_the_forward(backend, case, dtype):
    p = make_problem(case, dtype, device_of(backend))
    _, expected = ops_of(backend).forward(*p.inputs, *p.plan)
    with fresh_memory_is_nan():
        h_RH = ops_of(backend).hidden(*p.inputs[:2], *p.plan)
    assert torch.equal(h_RH[: p.live], expected[: p.live]) and h_RH.shape == expected.shape
    assert backend == "plain" or bool(h_RH[p.live :].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", ["skewed, dead rows", "empty experts", "odd sizes"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_gradients_are_stored_in_fp32_or_added_to_it(backend, case, dtype):
    p, run = make_problem(case, dtype, device_of(backend)), ops_of(backend)
    _, h_RH = run.forward(*p.inputs, *p.plan)
    _, _, dh_RH, a_RF = run.dgrad(p.dy_TD, h_RH, *p.inputs[1:], *p.plan)
    poison(p, dh_RH, a_RF)
    given = (p.dy_TD, p.x_TD, dh_RH, a_RF, *p.plan)
    totals = tuple(torch.full(w.shape, torch.nan, device=w.device) for w in (p.w_gate_up, p.w_down))
    rounding = 0.0 if dtype == torch.float32 or backend == "plain" else 2**-7  # kernels add in fp32
    for factor in (1, 2):  # NaN must be overwritten; then the same sums on top
        run.wgrad_into(*given, *totals, factor == 2)
        for total, rounded in zip(totals, run.wgrad(*given), strict=True):
            torch.testing.assert_close(total / factor, rounded.float(), rtol=rounding, atol=0.0)


@pytest.mark.parametrize("case", ["skewed, dead rows", "some slots are not routed here"])
@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_neither_read_nor_write_dead_rows(backend, case):
    assert_dead_rows_are_left_alone(ops_of(backend), make_problem(case, torch.float32, device_of(backend)))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", [*CASES, *COUNTS], ids=str)
def test_autograd_gives_the_gradients_of_all_four_inputs(case, dtype):
    p = make_problem(case, dtype)
    leaves = leaves_of(p)
    with fresh_memory_is_nan():
        y_TD, _ = ops.grouped_mlp(*leaves, *p.plan, "torch")
        gradients = torch.autograd.grad(y_TD, leaves, p.dy_TD)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)
    assert_results_match(p, y_TD, gradients)


def test_a_backend_from_outside_the_package_is_one_line_in_the_table(monkeypatch):
    products = Products(ops.grouped_mm, ops.grouped_mm_dgrad, ops.grouped_mm_wgrad)
    toy = Stepwise(lambda dtype: products, lambda *_: None)
    monkeypatch.setitem(module.BACKENDS, "toy", toy)
    p = make_problem("skewed, dead rows", torch.float32)
    assert_directions_match(ops_of("torch,toy,toy"), p)
    shape = MlpShape(T=8, D=4, F=4, E=2, K=1)
    assert choose_backends("toy", shape, torch.device("cpu"), None) == "toy,toy,toy"


@pytest.mark.parametrize("wanted", list(itertools.product((True, False), repeat=4)), ids=str)
def test_weight_gradients_are_computed_only_where_wanted(wanted):
    p = make_problem("random", torch.float32)
    leaves = leaves_of(p, wanted)
    with SeenOps() as seen:
        y_TD, _ = ops.grouped_mlp(*leaves, *p.plan, "torch")
        assert y_TD.requires_grad == any(wanted)
        if any(wanted):
            y_TD.backward(p.dy_TD)
    names = [name.removeprefix("graphmoe::") for name in seen.names if "grouped_mlp" in name]
    weights = wanted[1] or wanted[2]
    assert names == ["grouped_mlp"] + ["grouped_mlp_dgrad"] * any(wanted) + ["grouped_mlp_wgrad"] * weights
    assert [leaf.grad is not None for leaf in leaves] == list(wanted)


def test_nothing_of_row_size_is_kept_but_h():
    p = make_problem("skewed, dead rows", torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y_TD, _ = ops.grouped_mlp(*leaves_of(p), *p.plan, "torch")
    given = {t.data_ptr() for t in (*p.inputs, *p.plan)}
    extra = [t for t in kept if t.data_ptr() not in given]
    assert [t.shape for t in extra] == [(len(p.plan[0]), p.w_gate_up.shape[1])]
    y_TD.sum().backward()  # an expanded gradient


def test_a_gradient_of_h_is_ignored_and_no_gradient_gives_none():
    p = make_problem("random", torch.float32)
    leaves = leaves_of(p)
    y_TD, h_RH = ops.grouped_mlp(*leaves, *p.plan, "torch")
    both = torch.autograd.grad((y_TD, h_RH), leaves, (p.dy_TD, torch.full_like(h_RH, NAN)), retain_graph=True)
    alone = torch.autograd.grad(y_TD, leaves, p.dy_TD, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(both, alone, strict=True))
    assert torch.autograd.grad(h_RH.sum(), leaves, allow_unused=True) == (None,) * 4


def directions_on(p, x, w_gate_up, w_down, weight, dy, *plan):
    """All outputs of the three ops."""
    run = ops_of("torch")
    y, h = run.forward(x, w_gate_up, w_down, weight, *plan)
    dx, dweight, dh, a = run.dgrad(dy, h, w_gate_up, w_down, weight, *plan)
    alone = ops.grouped_mlp_hidden(x, w_gate_up, *plan, "torch")
    return y, h, dx, dweight, dh, a, *run.wgrad(dy, x, dh, a, *plan), alone


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_torch_accepts_the_ops(dtype):
    p = make_problem("some slots are not routed here", dtype)
    _, h, _, _, dh, a, *_ = directions_on(p, *p.inputs, p.dy_TD, *p.plan)
    for buffer in (h, dh, a):
        buffer[p.live :] = 0  # opcheck compares all elements
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(ops.grouped_mlp.default, (*leaves_of(p), *p.plan, "torch"), test_utils=utils)
    opcheck(ops.grouped_mlp_dgrad.default, (p.dy_TD, h, *p.inputs[1:], *p.plan, "torch"), test_utils=utils)
    given = (p.dy_TD, p.x_TD, dh, a, *p.plan)
    opcheck(ops.grouped_mlp_wgrad.default, (*given, "torch"), test_utils=utils)
    totals = [torch.zeros(w.shape) for w in p.inputs[1:3]]
    opcheck(ops.grouped_mlp_wgrad_into.default, (*given, *totals, "torch", True), test_utils=utils)
    p = make_problem("random", dtype)
    opcheck(ops.grouped_mlp_hidden.default, (*p.inputs[:2], *p.plan, "torch"), test_utils=utils[::2])


def test_the_reference_here_is_that_of_the_model():
    p = make_problem("random", torch.float64)
    (E, D, F), (slot_R, row_TK, ends_E) = p.w_down.shape, p.plan
    model = Experts(ModelConfig(hidden_size=D, num_experts=E, expert_ffn_size=F)).double()
    model.load_state_dict({"w_gate_up": p.w_gate_up, "w_down": p.w_down})
    expected = model(p.x_TD, p.weight_TK.double(), ends_E, row_TK, slot_R)
    assert_forward_close(exact_result(p)[0], expected)
