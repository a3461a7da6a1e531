"""The fused router: results, gradients, ties, bad logits, fakes, and its kernels."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from graphmoe.config.schema import GroupScore, ModelConfig, ScoreFunction
from graphmoe.ops import router as plain
from tests.ops.ahead_of_time import TARGETS, assert_sound, compiled
from tests.ops.interpreted import BACKENDS, KERNELS, assert_passed_in_the_interpreter, device_of
from tests.ops.router_cases import (
    CASES,
    Case,
    assert_bad_logits_give_ids_in_range,
    assert_matches_fp64,
    assert_ties_go_to_the_lower_id,
    by_autograd,
    by_kernels,
    differentiable,
    inputs_of,
)

ops = torch.ops.graphmoe


def runs_of(backend):
    """Ways to the results: by autograd, and for a GPU's tensors the kernels by themselves too."""
    return {"plain": [by_autograd], "interpreted": [by_kernels], "cuda": [by_autograd, by_kernels]}[backend]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_gradients_match_fp64(backend, name):
    for run in runs_of(backend):
        assert_matches_fp64(run, CASES[name], device_of(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lower_id_and_ids_are_in_range_whatever_the_logits(backend):
    for run in runs_of(backend):
        assert_ties_go_to_the_lower_id(run, device_of(backend))
        assert_bad_logits_give_ids_in_range(run, device_of(backend))


@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_take_several_blocks_and_sum_more_than_one_block_of_rows(backend, monkeypatch):
    """Blocks of 4 tokens and few programs, so that the last round of each is cut or empty."""
    from graphmoe.ops import router_kernels

    for sizes in ({"MOST_PROGRAMS": 1}, {"MOST_PROGRAMS": 7}, {"SUMMED_ROWS": 4, "SUMMED_COLUMNS": 8}):
        with monkeypatch.context() as patch:
            for name, size in {"BLOCK": 64, **sizes}.items():
                patch.setattr(router_kernels, name, size)
            assert_matches_fp64(by_kernels, Case(2, 45, 15, 3, renormalise=True), device_of(backend))
            assert_matches_fp64(by_kernels, Case(2, 45, 12, 3, groups=(3, 2, 1)), device_of(backend))


@pytest.mark.slow
def test_the_kernels_pass_in_the_interpreter():
    assert_passed_in_the_interpreter(__file__)


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


@pytest.mark.parametrize("name", ["DeepSeek-V3", "given", "softmax over the chosen"])
def test_torch_accepts_the_ops(name):
    case = CASES[name]
    logits, bias, chosen = inputs_of(case)
    outputs = ops.router(logits, bias, chosen, *case.settings())
    opcheck(ops.router.default, (logits.clone().requires_grad_(), bias, chosen, *case.settings()))
    incoming = [None, *(torch.ones_like(o) for o in differentiable(outputs)[1:])]
    opcheck(ops.router_backward.default, (*incoming, logits, outputs[1], *case.backward_settings()))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_ahead_of_time(target):
    facts = compiled("tests.ops.test_fused_router", target)
    assert_sound(facts)
    assert facts["64 experts, 1 groups"].wide_loads and facts["gradient of 64 experts"].wide_stores
    assert not [fact.case for fact in facts.values() if fact.atomics]


def ahead_of_time_cases():
    return [*forward_cases(), *backward_cases()]


def forward_cases():
    import triton

    from graphmoe.ops import router_kernels as router

    f32, i32 = "*fp32:16", "*i32:16"
    signature = {
        **dict.fromkeys(("logits", "bias", "weight", "partial"), f32),
        **dict.fromkeys(("S", "programs"), "i32:16"),
        "expert": i32,
        "steps": "i32",
        "scale": "fp32",
    }
    cases = []
    for E, K, sigmoid, groups, limit, best in (
        (64, 6, False, 1, 1, 1),
        (256, 8, True, 8, 4, 2),
        (160, 6, False, 8, 3, 1),
        (512, 16, True, 1, 1, 1),
    ):
        sizes = (triton.next_power_of_2(groups), triton.next_power_of_2(E // groups))
        experts = {"E": E, "K": K, "SLOTS": triton.next_power_of_2(K)}
        switches = {"SIGMOID": sigmoid, "RENORMALISE": sigmoid, "AFTER_TOPK": False, "chosen": None}
        switches["COUNT_SCORES"] = sigmoid
        limits = {"GROUPS": groups, "TOPK_GROUPS": limit, "GROUP_TOP": best}
        padded = {"PADDED_GROUPS": sizes[0], "PADDED_SIZE": sizes[1]}
        tokens = router.tokens_of_block(sizes[0] * sizes[1], 4096)
        cases.append(
            {
                "name": f"{E} experts, {groups} groups",
                "kernel": router._forward_kernel,
                "signature": signature,
                "constexprs": {**experts, **switches, **limits, **padded, "TOKENS": tokens},
            }
        )
    after = {**cases[0]["constexprs"], "AFTER_TOPK": True, "bias": None}
    unbiased = {name: kind for name, kind in signature.items() if name != "bias"}
    cases.append({**cases[0], "name": "after top-k", "signature": unbiased, "constexprs": after})
    given = {name: value for name, value in cases[0]["constexprs"].items() if name != "chosen"}
    with_chosen = {**signature, "chosen": i32}
    cases.append({**cases[0], "name": "given", "signature": with_chosen, "constexprs": given})
    ones = dict.fromkeys(("S", "programs", "steps"), 1)  # Triton makes a constant of an argument that is 1
    rest = {name: kind for name, kind in cases[0]["signature"].items() if name not in ones}
    constexprs = {**cases[0]["constexprs"], **ones}
    cases.append({**cases[0], "name": "one token", "signature": rest, "constexprs": constexprs})
    outputs = dict.fromkeys(("partial", "counts", "share", "z_sum", "entropy_sum"), f32)
    cases.append(
        {
            "kernel": router._sum_kernel,
            "signature": {**outputs, **dict.fromkeys(("programs", "all_programs"), "i32:16")},
            "constexprs": {"E": 64, "ROWS": router.SUMMED_ROWS, "COLUMNS": router.SUMMED_COLUMNS},
        }
    )
    return cases


def backward_cases():
    import triton

    from graphmoe.ops import router_kernels as router

    floats = ("dweight", "dshare_sum", "dz_sum", "dentropy_sum", "logits", "dlogits")
    signature = {
        **dict.fromkeys(floats, "*fp32:16"),
        "expert": "*i32:16",
        **dict.fromkeys(("T", "S"), "i32:16"),
        "scale": "fp32",
    }
    cases = []
    for E, K, sigmoid, after in ((64, 6, False, False), (60, 4, False, True), (512, 16, True, False)):
        width = triton.next_power_of_2(E)
        sizes = {"E": E, "K": K, "WIDTH": width, "TOKENS": router.tokens_of_block(width, 4096)}
        switches = {"SIGMOID": sigmoid, "RENORMALISE": sigmoid, "AFTER_TOPK": after}
        cases.append(
            {
                "name": f"gradient of {E} experts",
                "kernel": router._backward_kernel,
                "signature": signature,
                "constexprs": {**sizes, **switches},
            }
        )
    ones = {"T": 1, "S": 1}  # Triton makes a constant of an argument that is 1
    rest = {name: kind for name, kind in signature.items() if name not in ones}
    constexprs = {**cases[0]["constexprs"], **ones}
    cases.append({**cases[0], "name": "gradient of one token", "signature": rest, "constexprs": constexprs})
    return cases
