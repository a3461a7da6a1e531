"""The router: arithmetic against brute force and loops, and as one operation with its kernels."""

import functools
import itertools
import random

import pytest
import torch
from torch.library import opcheck

from graphmoe.config.schema import AuxLoss, GroupScore, ModelConfig, ScoreFunction
from graphmoe.ops import router as plain
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import BACKENDS, KERNELS, device_of
from tests.ops.router_cases import (
    CASES,
    SIGMOID,
    Case,
    assert_bad_logits_give_ids_in_range,
    assert_matches_fp64,
    assert_ties_go_to_the_lower_id,
    brute_force_choice,
    by_autograd,
    by_kernels,
    coarse_choices,
    differentiable,
    inputs_of,
)
from tests.ops.row_cases import choose
from tests.tolerances import assert_forward_close, assert_gradient_close

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


def group_limits():
    """Configurations with groups that can hold the top-k."""
    for groups, size, limit, per_group in itertools.product((2, 4, 8), (2, 4, 16), (1, 2, 3), (1, 2, 4)):
        if limit <= groups and per_group <= size and limit * per_group <= 16:
            yield groups, size, limit, limit * per_group


@pytest.mark.parametrize("group_score", GroupScore)
def test_group_limited_selection_matches_brute_force_with_tied_groups(group_score):
    limits = list(group_limits())
    assert len(limits) > 40
    for groups, size, limit, k in limits:
        config = ModelConfig(
            num_experts=groups * size, top_k=k, num_groups=groups, topk_groups=limit, group_score=group_score
        )
        choice_TE = coarse_choices(17, groups * size, seed=k)
        summed = {GroupScore.max: 1, GroupScore.top2_sum: 2, GroupScore.topk_sum: k // limit}[group_score]
        expected = brute_force_choice(choice_TE, k, groups, limit, summed)
        assert torch.equal(plain.select_experts(config, choice_TE), expected)


@pytest.mark.parametrize(("T", "K", "E"), [(8, 2, 8), (16, 6, 32), (512, 16, 512), (5, 8, 10), (64, 1, 2)])
def test_round_robin_gives_every_expert_the_same_number_of_slots(T, K, E):
    experts = plain.round_robin(T, K, E, torch.device("cpu"))
    assert experts.dtype == torch.int32
    assert torch.bincount(experts.flatten(), minlength=E).tolist() == [T * K // E] * E
    assert all(len(set(row)) == K for row in experts.tolist())


def written_out_balance_loss(config, scores, experts, B, earlier):
    """E * sum_e f_e P_e with f and P by counting; ``scores`` fp64 [T, E], result differentiable."""
    T, E = scores.shape
    S, spans = T // B, [range(T)]
    if config.aux_loss is AuxLoss.sequence:
        spans = [range(b * S, (b + 1) * S) for b in range(B)]
    total = 0.0
    for tokens in spans:
        slots = [e for t in tokens for e in experts[t].tolist()]
        seen = len(slots) + (sum(earlier) if config.aux_loss is AuxLoss.global_batch else 0)
        for e in range(E):
            before = earlier[e] if config.aux_loss is AuxLoss.global_batch else 0
            load = (slots.count(e) + before) / seen
            mean = 0.0
            for t in tokens:
                norm = scores[t].sum() if config.score_function is ScoreFunction.sigmoid else 1.0
                mean = mean + scores[t, e] / norm / len(tokens)
            total = total + E * load * mean / len(spans)
    return total


@pytest.mark.parametrize("function", ScoreFunction)
@pytest.mark.parametrize("kind", [a for a in AuxLoss if a is not AuxLoss.none])
def test_balance_loss_and_its_gradient_match_the_written_out_sums(kind, function):
    for B, S, K, E in ((1, 6, 1, 2), (3, 5, 2, 7), (2, 4, 8, 12)):
        config = ModelConfig(num_experts=E, top_k=K, aux_loss=kind, score_function=function)
        generator = torch.Generator().manual_seed(E)
        logits = (torch.randn(B * S, E, generator=generator) * 2).requires_grad_()
        experts = choose("skewed", B * S, K, E)
        earlier = [random.Random(E).randint(0, 9) for _ in range(E)]
        counts = plain.count_per_sequence(experts, B, E)
        scores = plain.scores_of(logits, function)
        loss = plain.balance_loss(*plain.balance_terms(config, scores, counts, torch.tensor(earlier).float()))
        exact = logits.detach().double().requires_grad_()
        exact_scores = exact.sigmoid() if function is ScoreFunction.sigmoid else exact.softmax(1)
        expected = written_out_balance_loss(config, exact_scores, experts, B, earlier)
        assert loss.shape == () and loss.dtype == torch.float32
        assert_forward_close(loss, expected)
        gradients = (torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, exact)[0])
        assert_gradient_close(*gradients)


def ahead_of_time_cases():
    from graphmoe.ops import router_kernels as kernels

    for name, case in {
        "64 experts": Case(16, 256, 64, 6),
        "256 experts in 8 groups": Case(16, 256, 256, 8, groups=(8, 4, 2), count_scores=True, **SIGMOID),
        "160 experts in 8 groups": Case(16, 256, 160, 6, groups=(8, 3, 1)),
        "512 experts": Case(16, 256, 512, 16, count_scores=True, **SIGMOID),
        "after top-k": Case(16, 256, 60, 4, after=True),
        "given": Case(16, 256, 64, 6, chosen="round robin"),
        "one token": Case(1, 1, 64, 6),  # Triton makes a constant of an argument that is 1
    }.items():
        logits, bias, chosen = inputs_of(case, device="meta")
        found = launches_of(name, functools.partial(kernels.forward, logits, bias, chosen, *case.settings()))
        yield from found if name == "64 experts" else found[:1]  # the second adds up partial sums
        with torch.device("meta"):
            sizes = (len(logits), case.K), (case.B, case.E), (), ()
            gradients = [torch.empty(size) for size in sizes]
            expert = torch.empty(len(logits), case.K, dtype=torch.int32)
        settings = logits, expert, *case.backward_settings()
        yield from launches_of(name, functools.partial(kernels.backward, *gradients, *settings))
