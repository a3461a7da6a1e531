"""The grouped MLP on the CPU: values, gradients, dead rows, fakes, what is kept, what compilation sees."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from graphmoe.config.schema import ModelConfig
from graphmoe.model.moe import Experts
from graphmoe.ops.grouped_mlp import BACKENDS, backend_of
from tests.ops.ahead_of_time import ROOT
from tests.ops.mlp_cases import (
    CASES,
    COUNTS,
    NAN,
    assert_directions_match,
    assert_results_match,
    exact_result,
    make_problem,
    ops_of,
)
from tests.ops.row_cases import fresh_memory_is_nan
from tests.ops.seen_ops import SeenOps
from tests.tolerances import assert_forward_close, assert_gradient_close

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ops = torch.ops.graphmoe


def leaves_of(p, wanted=(True,) * 4):
    return [t.detach().requires_grad_(wants) for t, wants in zip(p.inputs, wanted, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *COUNTS], ids=str)
def test_each_direction_matches_fp64_with_nan_in_dead_rows(case, dtype):
    p = make_problem(case, dtype)
    if dtype == torch.float64:
        p = p._replace(weight_TK=p.weight_TK.double())
    assert_directions_match(ops_of("torch"), p)


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


def test_triton_means_torch_on_a_cpu_bitwise():
    p = make_problem("skewed, dead rows", torch.bfloat16)
    for backend in ("triton", "triton,torch,triton"):
        leaves = leaves_of(p)
        y_TD, _ = ops.grouped_mlp(*leaves, *p.plan, backend)
        expected, _ = ops.grouped_mlp(*leaves, *p.plan, "torch")
        assert torch.equal(y_TD, expected)
        for actual, wanted in zip(
            torch.autograd.grad(y_TD, leaves, p.dy_TD),
            torch.autograd.grad(expected, leaves, p.dy_TD),
            strict=True,
        ):
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_h_alone_is_bitwise_that_of_the_forward(case, dtype):
    p = make_problem(case, dtype)
    _, expected = ops.grouped_mlp(*p.inputs, *p.plan, "torch")
    given = (*p.inputs[:2], *p.plan, "torch,triton,triton")
    assert torch.equal(ops.grouped_mlp_hidden(*given)[: p.live], expected[: p.live])
    if p.live == len(expected):  # opcheck compares all elements
        opcheck(ops.grouped_mlp_hidden.default, given, test_utils=("test_schema", "test_faketensor"))


def test_a_backend_is_one_name_or_one_for_each_direction():
    assert [backend_of("te", d) for d in ("forward", "dgrad", "wgrad")] == ["te"] * 3
    assert [backend_of("triton,te,torch", d) for d in ("forward", "dgrad", "wgrad")] == [
        "triton",
        "te",
        "torch",
    ]
    for wrong in ("auto", "triton,torch", "torch,torch,torch,torch", ""):
        with pytest.raises(AssertionError):
            backend_of(wrong, "forward")
    assert set(BACKENDS) == {"torch", "triton", "turbo", "te"}


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_and_meta_tensors_have_the_shape_and_strides_of_real_ones(dtype):
    p = make_problem("odd sizes", dtype)
    given = (*p.inputs, p.dy_TD, *p.plan)
    with FakeTensorMode() as mode:
        fakes = directions_on(p, *[mode.from_tensor(t) for t in given])
    metas = directions_on(p, *[t.to("meta") for t in given])
    for fake, meta, real in zip(fakes, metas, directions_on(p, *given), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
        assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_torch_accepts_the_three_ops(dtype):
    p = make_problem("some slots are not routed here", dtype)
    _, h, _, _, dh, a, *_ = directions_on(p, *p.inputs, p.dy_TD, *p.plan)
    for buffer in (h, dh, a):
        buffer[p.live :] = 0  # opcheck compares all elements
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(ops.grouped_mlp.default, (*leaves_of(p), *p.plan, "torch"), test_utils=utils)
    opcheck(ops.grouped_mlp_dgrad.default, (p.dy_TD, h, *p.inputs[1:], *p.plan, "torch"), test_utils=utils)
    opcheck(ops.grouped_mlp_wgrad.default, (p.dy_TD, p.x_TD, dh, a, *p.plan, "torch"), test_utils=utils)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_weight_gradients_go_to_fp32_tensors_in_place(dtype):
    p = make_problem("skewed, dead rows", dtype)
    *_, dh, a, dw_gate_up, dw_down, _ = directions_on(p, *p.inputs, p.dy_TD, *p.plan)
    totals = [torch.full(dw.shape, torch.nan) for dw in (dw_gate_up, dw_down)]
    given = (p.dy_TD, p.x_TD, dh, a, *p.plan, *totals, "torch")
    ops.grouped_mlp_wgrad_into(*given, False)
    assert torch.equal(totals[0], dw_gate_up.float()) and torch.equal(totals[1], dw_down.float())
    ops.grouped_mlp_wgrad_into(*given, True)
    assert torch.equal(totals[0], 2 * dw_gate_up.float()) and torch.equal(totals[1], 2 * dw_down.float())
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(ops.grouped_mlp_wgrad_into.default, (*given, True), test_utils=utils)


@pytest.mark.slow
def test_a_compiled_graph_without_breaks_gives_the_eager_values_and_gradients():
    def layer(x, w_gate_up, w_down, weight, *plan):
        return torch.sin(ops.grouped_mlp(x * 2, w_gate_up, w_down, weight, *plan, "torch")[0])

    p = make_problem("empty experts", torch.float32)
    eager_leaves, leaves = leaves_of(p), leaves_of(p)
    eager, compiled = layer(*eager_leaves, *p.plan), torch.compile(layer, fullgraph=True)(*leaves, *p.plan)
    assert_forward_close(compiled, eager)
    for actual, wanted in zip(
        torch.autograd.grad(compiled, leaves, p.dy_TD),
        torch.autograd.grad(eager, eager_leaves, p.dy_TD),
        strict=True,
    ):
        assert_gradient_close(actual, wanted)


def test_the_reference_here_is_that_of_the_model():
    p = make_problem("random", torch.float64)
    (E, D, F), (slot_R, row_TK, ends_E) = p.w_down.shape, p.plan
    model = Experts(ModelConfig(hidden_size=D, num_experts=E, expert_ffn_size=F)).double()
    model.load_state_dict({"w_gate_up": p.w_gate_up, "w_down": p.w_down})
    expected = model(p.x_TD, p.weight_TK.double(), ends_E, row_TK, slot_R)
    assert_forward_close(exact_result(p)[0], expected)


def test_importing_and_running_on_a_cpu_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tests.ops.mlp_cases import *\n"
        "p = make_problem('random', torch.float32)\n"
        "import graphmoe.ops.grouped_mlp\n"
        "y, _ = torch.ops.graphmoe.grouped_mlp(*p.inputs, *p.plan, 'triton')\n"
        "assert_results_match(p, y, exact_result(p)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
