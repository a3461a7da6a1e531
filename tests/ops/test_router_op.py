"""The router's operation on the CPU: results, gradients, fakes; its kernels interpreted and compiled."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from graphmoe.config.schema import GroupScore, ModelConfig, ScoreFunction
from graphmoe.ops import router as plain
from tests.ops.ahead_of_time import TARGETS, assert_sound, compiled
from tests.ops.interpreted import assert_passed, names_of
from tests.ops.router_cases import (
    CASES,
    Case,
    assert_bad_logits_give_ids_in_range,
    assert_matches_fp64,
    assert_ties_go_to_the_lower_id,
    by_autograd,
    differentiable,
    inputs_of,
)
from tests.ops.seen_ops import SeenOps

ops = torch.ops.graphmoe
INTERPRETED = "tests/ops/interpreted_router.py"


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_match_fp64(name):
    assert_matches_fp64(by_autograd, CASES[name])


def test_ties_go_to_the_lower_id():
    assert_ties_go_to_the_lower_id(by_autograd)


def test_ids_are_in_range_whatever_the_logits():
    assert_bad_logits_give_ids_in_range(by_autograd)


@pytest.mark.parametrize("group_score", GroupScore)
@pytest.mark.parametrize("function", ScoreFunction)
def test_choice_and_weights_are_those_of_the_plain_functions(function, group_score):
    config = ModelConfig(
        num_experts=24,
        top_k=6,
        num_groups=6,
        topk_groups=2,
        group_score=group_score,
        score_function=function,
        renormalise=True,
        routed_scale=2.5,
    )
    per_group = {GroupScore.max: 1, GroupScore.top2_sum: 2, GroupScore.topk_sum: 3}[group_score]
    case = Case(3, 7, 24, 6, function.value, (6, 2, per_group), True, False, 2.5, True)
    logits, bias, _ = inputs_of(case)
    outputs = ops.router(logits, bias, None, *case.settings())
    scores = plain.scores_of(logits, function)
    expert_TK = plain.select_experts(config, scores + bias)
    assert torch.equal(outputs[1], expert_TK)
    assert torch.equal(outputs[0], plain.slot_weights(config, logits, scores, expert_TK))
    assert torch.equal(outputs[2], plain.count_per_sequence(expert_TK, 3, 24))
    torch.testing.assert_close(outputs[4] / 21, plain.z_loss(logits))
    torch.testing.assert_close(outputs[5] / 21, plain.entropy(scores))


def test_a_router_that_has_decided_has_finite_entropy_and_gradients():
    case = Case(1, 4, 6, 2)
    logits = torch.tensor([[200.0, 0, 0, 0, 0, -200]]).repeat(4, 1)
    outputs, gradient = by_autograd(logits, None, None, case, differentiable)
    assert outputs[5].item() == 0.0
    ones = [torch.ones_like(o) for o in differentiable(outputs)]
    assert bool(gradient(ones).isfinite().all())


def test_given_experts_are_copied():
    case = CASES["given"]
    logits, bias, chosen = inputs_of(case)
    expert_TK = ops.router(logits, bias, chosen, *case.settings())[1]
    assert torch.equal(expert_TK, chosen) and expert_TK.data_ptr() != chosen.data_ptr()


def test_experts_and_counts_have_no_gradient_and_the_rest_has():
    logits, bias, _ = inputs_of(CASES["DeepSeek-V3"])
    outputs = ops.router(logits.requires_grad_(), bias, None, *CASES["DeepSeek-V3"].settings())
    assert [o.requires_grad for o in outputs] == [True, False, False, True, True, True]


def test_the_backward_runs_once_and_only_where_the_logits_want_it():
    case = CASES["DeepSeek-V2-Lite"]
    logits, bias, _ = inputs_of(case)
    with SeenOps() as seen:
        ops.router(logits, bias, None, *case.settings())
        outputs = ops.router(logits.requires_grad_(), bias, None, *case.settings())
        (outputs[0].sum() + outputs[3].sum() + outputs[4] + outputs[5]).backward()
    assert seen.names == ["graphmoe::router", "graphmoe::router", "graphmoe::router_backward"]


def test_expanded_gradients_and_strided_logits_are_accepted():
    case = CASES["DeepSeek-V2-Lite"]
    logits, _, _ = inputs_of(case)
    strided = logits.t().contiguous().t()
    gradients = []
    for x in (logits, strided):
        x.requires_grad_()
        weight_TK = ops.router(x, None, None, *case.settings())[0]
        gradients.append(torch.autograd.grad(weight_TK.sum(), x)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-V3", "softmax over the chosen", "given"])
def test_fake_tensors_have_the_shape_and_strides_of_real_ones(name):
    case = CASES[name]

    def results(logits, bias, chosen):
        outputs = ops.router(logits.requires_grad_(), bias, chosen, *case.settings())
        loss = outputs[0].square().sum() + outputs[3].square().sum() + outputs[4] * outputs[5]
        return *outputs, *torch.autograd.grad(loss, logits)

    inputs = inputs_of(case)
    with FakeTensorMode() as mode:
        fake_results = results(*(None if t is None else mode.from_tensor(t) for t in inputs))
    for fake, real in zip(fake_results, results(*inputs), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "given", "softmax over the chosen"])
def test_torch_accepts_the_ops(name):
    case = CASES[name]
    logits, bias, chosen = inputs_of(case)
    outputs = ops.router(logits, bias, chosen, *case.settings())
    opcheck(ops.router.default, (logits.clone().requires_grad_(), bias, chosen, *case.settings()))
    incoming = [None, *(torch.ones_like(o) for o in differentiable(outputs)[1:])]
    opcheck(ops.router_backward.default, (*incoming, logits, outputs[1], *case.backward_settings()))


def test_logits_of_another_dtype_are_refused():
    with pytest.raises(AssertionError, match=r"torch\.bfloat16"):
        ops.router(torch.zeros(4, 8).bfloat16(), None, None, *Case(1, 4, 8, 2).settings())


@pytest.mark.parametrize("name", names_of(INTERPRETED))
def test_in_the_interpreter(name):
    assert_passed(INTERPRETED, name)


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_ahead_of_time(target):
    facts = compiled("tests.ops.compiled_router", target)
    assert_sound(facts)
    assert facts["64 experts, 1 groups"].wide_loads and facts["gradient of 64 experts"].wide_stores
    assert not [fact.case for fact in facts.values() if fact.atomics]
