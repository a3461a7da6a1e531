"""The grouped MLP over two lists of weights, and its operations with replicas of experts."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from graphmoe.ops.grouped_mlp import triton_backend, wgrad_in_two
from graphmoe.ops.grouped_mlp.reference import TORCH, Experts, Plan
from graphmoe.ops.symm.peers import exchange_of
from tests.ops.interpreted import BACKENDS, KERNELS, device_of, in_turn
from tests.ops.mlp_cases import (
    CASES,
    NAN,
    Directions,
    Problem,
    assert_results_match,
    interpreter_slack,
    leaves_of,
    make_problem,
    ops_of,
    until_wgrad,
)
from tests.ops.row_cases import EXPERT_RS, fresh_memory_is_nan, plan_with_replicas

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SPLIT = {  # case: number of own experts
    "random": 3, "odd sizes": 1, "skewed, dead rows": 2, "empty experts": 11, "no token": 2,
    "some slots are not routed here": 6, "no slot is routed here": 2, "one token, one slot": 1,
}  # fmt: skip
ALL_CASES = [*SPLIT.items(), *(("all tokens on one expert", own) for own in (3, 4, 6))]
"""The last have all rows on expert 3 of 7: the first of the second list, or one of the first list."""
EACH_DTYPE = [
    (case, own, dtype) for at, (case, own) in enumerate(ALL_CASES) for dtype in in_turn(DTYPES[:2], at)
]
ops = torch.ops.graphmoe


def in_two_lists(backend: str, own: int, by_torch: bool = False) -> Directions:
    """A backend's calls with the weights from ``own`` on as a second list, whose gradients are fp32.

    What these leave as it is must be of experts without rows, and is 0 in the results.
    """
    kernels = TORCH if backend == "plain" else triton_backend
    of_weights, reason = TORCH if by_torch else kernels, "plain" if backend == "plain" else None

    def experts(w_gate_up: Tensor, w_down: Tensor, *rest: Tensor) -> Experts:
        return Experts(w_gate_up[:own], w_down[:own], *rest, w_gate_up[own:], w_down[own:])

    def wgrad_into(*given: Any) -> None:
        totals, add, plan = given[7:9], given[9], Plan(*given[4:7])
        dtype = given[0].dtype if of_weights is TORCH else totals[0].dtype  # as they are sent
        of_more = [torch.full_like(total[own:], NAN, dtype=dtype) for total in totals]
        with mock.patch.object(triton_backend, "reason_against", lambda *_: reason):
            wgrad_in_two(of_weights, given[:4], plan, tuple(total[:own] for total in totals), add, of_more)
        is_empty = torch.diff(plan.ends_E, prepend=plan.ends_E.new_zeros(1))[own:] == 0
        for total, more in zip(totals, of_more, strict=True):
            more[is_empty] = more[is_empty].nan_to_num(0.0)
            total[own:] = total[own:] + more if add else more

    return Directions(
        lambda x, *layer: kernels.forward(x, experts(*layer)),
        lambda dy, h, *layer: kernels.dgrad(dy, h, experts(*layer)),
        lambda x, w_gate_up, *plan: kernels.hidden(x, w_gate_up[:own], Plan(*plan), w_gate_up[own:]),
        wgrad_into,
    )


def results_of(run: Directions, p: Problem, rounding: float) -> list[Tensor]:
    """y, dx and dweight, live rows of h, dh, a and of h alone, and sums of three gradients of weights.

    These are stored in fp32, over NaN, then added; without totals they differ by ``rounding`` to the dtype.
    """
    y_TD, h_RH, dx_TD, dweight_TK, *made = until_wgrad(run, p)
    rows, given = (h_RH, *made, run.hidden(*p.inputs[:2], *p.plan)), (p.dy_TD, p.x_TD, *made, *p.plan)
    totals = [torch.full(w.shape, NAN, device=w.device) for w in p.inputs[1:3]]
    run.wgrad_into(*given, *totals, False)
    for total, rounded in zip(totals, run.wgrad(*given) if run.wgrad else (), strict=False):
        torch.testing.assert_close(total, rounded.float(), rtol=rounding, atol=0.0)
    for _ in range(2):
        run.wgrad_into(*given, *totals, True)
    assert not any(bool(total[p.has_none_E].any()) for total in totals)
    return [y_TD, dx_TD, dweight_TK, *(each[: p.live] for each in rows), *totals]


def problem_with_nan(case: str, dtype: torch.dtype, backend: str) -> Problem:
    """A problem whose weights of experts without rows are NaN."""
    p = make_problem(case, dtype, device_of(backend))
    for weight in p.inputs[1:3]:
        weight[p.has_none_E] = NAN
    return p


def assert_sums_match(p: Problem, results: list[Tensor]) -> None:
    y_TD, dx_TD, dweight_TK, *_, of_gate_up, of_down = results
    gradients = (dx_TD, of_gate_up / 3, of_down / 3, dweight_TK)
    assert_results_match(p, y_TD, gradients, interpreter_slack(p.x_TD.dtype))


@pytest.mark.parametrize(("case", "own", "dtype"), EACH_DTYPE, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_lists_give_the_bits_of_one_and_match_fp64(monkeypatch, backend, case, own, dtype):
    p = problem_with_nan(case, dtype, backend)
    if backend == "cuda":  # by the tiles that two lists have there
        assert_sums_match(p, results_of(in_two_lists(backend, own), p, 0.0))
    # The number of a rank's own experts sets the tiles; here it is that of one list.
    config_of = triton_backend._config
    monkeypatch.setattr(triton_backend, "_config", lambda *given: config_of(*given[:3], 1))
    rounding = 0.0 if dtype == torch.float32 or backend == "plain" else 2**-7  # kernels add in fp32
    one, two = (results_of(run, p, rounding) for run in (ops_of(backend), in_two_lists(backend, own)))
    assert all(map(torch.equal, one, two))
    assert_sums_match(p, two)


@pytest.mark.parametrize(("case", "own"), ALL_CASES[:4], ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_by_torch_and_of_further_experts_by_kernels_match_fp64(backend, case, own):
    p = problem_with_nan(case, torch.bfloat16, backend)
    assert_sums_match(p, results_of(in_two_lists(backend, own, by_torch=True), p, 0.0))


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
    return p, plan_with_replicas(p.expert_TK, len(p.w_down), len(p.plan[0]) - p.live)


WITH_REPLICAS = [case for case in CASES if CASES[case][4] > 3]


@pytest.mark.parametrize(
    ("case", "dtype"), [(case, DTYPES[number % 3]) for number, case in enumerate(WITH_REPLICAS)], ids=str
)
def test_the_operation_with_replicas_computes_what_experts_do(one_peer, monkeypatch, case, dtype):
    spied = mock.Mock(wraps=exchange_of(1).slot_gradients)
    monkeypatch.setattr(exchange_of(1), "slot_gradients", spied)
    p, plan = with_replicas(case, dtype)
    leaves = leaves_of(p)
    with fresh_memory_is_nan():
        y_TD, h_RH = ops.grouped_mlp(*leaves, *plan, "torch", EXPERT_RS)
        alone_RH = ops.grouped_mlp_hidden(*p.inputs[:2], *plan, "torch", EXPERT_RS)
        gradients = torch.autograd.grad(y_TD, leaves, p.dy_TD)
    assert [(g.shape, g.dtype) for g in gradients] == [(leaf.shape, leaf.dtype) for leaf in leaves]
    assert_results_match(p, y_TD, gradients)
    assert alone_RH[: p.live].equal(h_RH[: p.live])
    assert spied.call_args.args[2] == dtype, "gradients are sent in the dtype in which torch makes them"


def test_sums_of_gradients_hold_what_came_home(one_peer):
    p, plan = with_replicas("skewed, dead rows", torch.float32)
    leaves = leaves_of(p)
    y, h = ops.grouped_mlp(*leaves, *plan, "torch", EXPERT_RS)
    expected = torch.autograd.grad(y, leaves[1:3], p.dy_TD)
    _, _, *made = ops.grouped_mlp_dgrad(p.dy_TD, h.detach(), *p.inputs[1:], *plan, "torch", EXPERT_RS)
    for begun, before in ((False, NAN), (True, 7.0)):
        totals = [torch.full(w.shape, before) for w in leaves[1:3]]
        ops.grouped_mlp_wgrad_into(p.dy_TD, p.x_TD, *made, *plan, *totals, "torch", begun, EXPERT_RS)
        for total, gradient in zip(totals, expected, strict=True):
            torch.testing.assert_close(total, gradient + 7.0 * begun)


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
