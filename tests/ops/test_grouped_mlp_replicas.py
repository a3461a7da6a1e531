"""The grouped MLP over two lists of weights, and its operations with replicas of experts."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from graphmoe.ops.grouped_mlp import triton_backend, wgrad_in_two
from graphmoe.ops.grouped_mlp.reference import TORCH, Plan
from graphmoe.ops.symm.peers import exchange_of
from tests.ops.interpreted import BACKENDS, KERNELS, device_of
from tests.ops.mlp_cases import (
    CASES,
    IMPORTANT,
    NAN,
    Problem,
    assert_directions_match,
    assert_results_match,
    in_two_lists,
    interpreter_slack,
    leaves_of,
    make_problem,
    ops_of,
    poison,
)
from tests.ops.row_cases import EXPERT_RS, fresh_memory_is_nan, plan_with_replicas

WORKERS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SPLIT = {  # case: number of own experts
    "random": 3, "odd sizes": 1, "skewed, dead rows": 2, "empty experts": 11, "no token": 2,
    "some slots are not routed here": 6, "no slot is routed here": 2, "one token, one slot": 1,
}  # fmt: skip
ONE_EXPERT = {"of the second list": 3, "of the first list": 4, "the last of the first list": 6}
"""Own experts, where all rows are those of expert 3 of 7."""
ALL_CASES = [*SPLIT.items(), *(("all tokens on one expert", own) for own in ONE_EXPERT.values())]
EACH_DTYPE = [(case, own, DTYPES[number % 2]) for number, (case, own) in enumerate(ALL_CASES)]
OTHER_DTYPE = [(case, own, DTYPES[1 - number % 2]) for number, (case, own) in enumerate(ALL_CASES)]
"""Every case in fp32 or bf16, and in the other of them."""
IN_MORE = [*(row for row in OTHER_DTYPE if row[0] in IMPORTANT), ("skewed, dead rows", 2, torch.float64)]
ops = torch.ops.graphmoe


@pytest.mark.parametrize(("case", "own", "dtype"), [*EACH_DTYPE, *IN_MORE], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_lists_match_fp64_with_nan_in_dead_rows_and_weights_of_no_rows(backend, case, own, dtype):
    if dtype == torch.float64 and backend != "plain":
        return  # the kernels have no fp64
    p = make_problem(case, dtype, device_of(backend))
    if dtype == torch.float64:
        p = p._replace(weight_TK=p.weight_TK.double())
    has_none_E = torch.diff(p.plan[2], prepend=p.plan[2].new_zeros(1)) == 0
    for weight in p.inputs[1:3]:
        weight[has_none_E] = NAN
    assert_directions_match(in_two_lists(backend, own), p, interpreter_slack(dtype))


@pytest.mark.parametrize(("case", "own", "dtype"), OTHER_DTYPE, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_lists_give_the_bits_of_one(monkeypatch, backend, case, own, dtype):
    # The number of a rank's own experts sets the tiles; here it is that of one list.
    config_of = triton_backend._config
    monkeypatch.setattr(triton_backend, "_config", lambda *given: config_of(*given[:3], 1))
    p = make_problem(case, dtype, device_of(backend))
    assert own < len(p.w_down)
    results = []
    for run in (ops_of(backend), in_two_lists(backend, own)):
        with fresh_memory_is_nan():
            y_TD, h_RH = run.forward(*p.inputs, *p.plan)
            dx_TD, dweight_TK, dh_RH, a_RF = run.dgrad(p.dy_TD, h_RH, *p.inputs[1:], *p.plan)
        rows = [each[: p.live].clone() for each in (h_RH, dh_RH, a_RF)]
        poison(p, h_RH, dh_RH, a_RF)
        totals = [torch.ones(w.shape, device=w.device) for w in p.inputs[1:3]]
        for add in (False, True, True):
            run.wgrad_into(p.dy_TD, p.x_TD, dh_RH, a_RF, *p.plan, *totals, add)
        results.append([y_TD, dx_TD, dweight_TK, *rows, *totals])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize(("case", "own"), ALL_CASES[:4], ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_by_torch_and_of_further_experts_by_kernels_match_fp64(backend, case, own):
    p = make_problem(case, torch.bfloat16, device_of(backend))
    assert_directions_match(in_two_lists(backend, own, by_torch=True), p, interpreter_slack(p.x_TD.dtype))


@pytest.mark.parametrize("kernels", [TORCH, triton_backend], ids=["torch", "triton"])
@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_of_further_experts_end_with_the_last_that_has_rows(monkeypatch, backend, kernels):
    monkeypatch.setattr(triton_backend, "reason_against", lambda *_: None)
    p = make_problem("all tokens on one expert", torch.float32, device_of(backend))
    h, a = (torch.ones(len(p.plan[0]), w.shape[1 + i], device=w.device) for i, w in enumerate(p.inputs[1:3]))
    own = 2  # the expert with rows is 3 of 7: the second of the further ones
    totals = tuple(torch.full_like(w[:own], NAN) for w in p.inputs[1:3])
    of_more = tuple(torch.full_like(w[own:], NAN) for w in p.inputs[1:3])
    wgrad_in_two(kernels, (p.dy_TD, p.x_TD, h, a), Plan(*p.plan), totals, False, of_more)
    for total, more in zip(totals, of_more, strict=True):
        assert not total.any() and not more[0].any() and more[1].all()
        assert not more[1].isnan().any() and bool(more[2:].isnan().all())


# The operations, on one rank that has replicas of its own experts.


def with_replicas(case: str, dtype: torch.dtype) -> tuple[Problem, tuple[Tensor, Tensor, Tensor]]:
    """A problem, and its plan where every second slot of an expert of `EXPERT_RS` goes to the replica."""
    p = make_problem(case, dtype)
    if dtype == torch.float64:
        p = p._replace(weight_TK=p.weight_TK.double())
    return p, plan_with_replicas(p.expert_TK, len(p.w_down), len(p.plan[0]) - p.live)


WITH_REPLICAS = [case for case in CASES if CASES[case][4] > 3]


@pytest.mark.parametrize(
    ("case", "dtype"), [(case, DTYPES[number % 3]) for number, case in enumerate(WITH_REPLICAS)], ids=str
)
def test_the_operation_with_replicas_has_the_results_and_gradients_of_the_experts(one_peer, case, dtype):
    p, plan = with_replicas(case, dtype)
    leaves = leaves_of(p)
    with fresh_memory_is_nan():
        y_TD, h_RH = ops.grouped_mlp(*leaves, *plan, "torch", EXPERT_RS)
        alone_RH = ops.grouped_mlp_hidden(*p.inputs[:2], *plan, "torch", EXPERT_RS)
        gradients = torch.autograd.grad(y_TD, leaves, p.dy_TD)
    assert [(g.shape, g.dtype) for g in gradients] == [(leaf.shape, leaf.dtype) for leaf in leaves]
    assert_results_match(p, y_TD, gradients)
    assert alone_RH[: p.live].equal(h_RH[: p.live])


@pytest.mark.parametrize("begun", [False, True])
def test_sums_of_gradients_hold_what_came_home(one_peer, begun):
    p, plan = with_replicas("skewed, dead rows", torch.float32)
    leaves = leaves_of(p)
    y, h = ops.grouped_mlp(*leaves, *plan, "torch", EXPERT_RS)
    expected = torch.autograd.grad(y, leaves[1:3], p.dy_TD)
    _, _, *made = ops.grouped_mlp_dgrad(p.dy_TD, h.detach(), *p.inputs[1:], *plan, "torch", EXPERT_RS)
    totals = [torch.full(w.shape, 7.0 if begun else NAN) for w in leaves[1:3]]
    given = (p.dy_TD, p.x_TD, *made, *plan)
    ops.grouped_mlp_wgrad_into(*given, *totals, "torch", begun, EXPERT_RS)
    for total, gradient in zip(totals, expected, strict=True):
        torch.testing.assert_close(total, gradient + 7.0 * begun)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_travel_in_the_dtype_in_which_their_backend_makes_them(one_peer, monkeypatch, dtype):
    spied = Mock(wraps=exchange_of(1).slot_gradients)
    monkeypatch.setattr(exchange_of(1), "slot_gradients", spied)
    p, plan = with_replicas("skewed, dead rows", dtype)
    leaves = leaves_of(p)
    torch.autograd.grad(ops.grouped_mlp(*leaves, *plan, "torch", EXPERT_RS)[0], leaves[1:3], p.dy_TD)
    assert spied.call_args.args[2] == dtype


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_torch_accepts_the_operations(one_peer, dtype, replicated):
    p, plan = with_replicas("some slots are not routed here", dtype)
    plan, experts = (plan, (EXPERT_RS,)) if replicated else (p.plan, ())
    _, h = ops.grouped_mlp(*p.inputs, *plan, "torch", *experts)
    _, _, dh, a = ops.grouped_mlp_dgrad(p.dy_TD, h, *p.inputs[1:], *plan, "torch", *experts)
    for buffer in (h, dh, a):
        buffer[p.live :] = 0  # opcheck compares all elements
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    given: tuple[Any, ...] = (p.dy_TD, p.x_TD, dh, a, *plan)
    totals = [torch.zeros(w.shape) for w in p.inputs[1:3]]
    for op, *arguments in (
        (ops.grouped_mlp, *leaves_of(p), *plan, "torch", *experts),
        (ops.grouped_mlp_dgrad, p.dy_TD, h, *p.inputs[1:], *plan, "torch", *experts),
        (ops.grouped_mlp_wgrad, *given, "torch", *experts),
        (ops.grouped_mlp_wgrad_into, *given, *totals, "torch", True, *experts),
        (ops.grouped_mlp_hidden, *p.inputs[:2], *plan, "torch", *experts),
    ):
        opcheck(op.default, tuple(arguments), test_utils=utils)
