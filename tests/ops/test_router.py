"""Router arithmetic: selection against brute force, weights and losses against fp64 loops."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from graphmoe.config.schema import AuxLoss, GroupScore, ModelConfig, ScoreFunction
from graphmoe.ops import router
from tests.ops.router_cases import best, coarse_choices
from tests.tolerances import assert_forward_close, assert_gradient_close

SCORES = tuple(ScoreFunction)


def random_logits(T, E, seed=0, scale=2.0):
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.requires_grad_()


def brute_force_selection(config, choice_TE):
    """The experts of each token by the definition of group-limited top-k; plain lists."""
    size = config.num_experts // config.num_groups
    chosen = []
    for choices in choice_TE.tolist():
        groups = [choices[g * size : (g + 1) * size] for g in range(config.num_groups)]
        if config.group_score is GroupScore.max:
            score_of_group = [max(group) for group in groups]
        else:
            count = 2 if config.group_score is GroupScore.top2_sum else config.top_k // config.topk_groups
            score_of_group = [sum(sorted(group, reverse=True)[:count]) for group in groups]
        kept = best(score_of_group, config.topk_groups) if config.num_groups > 1 else [0]
        allowed = [c if i // size in kept else -math.inf for i, c in enumerate(choices)]
        chosen.append(best(allowed, config.top_k))
    return chosen


def group_limits():
    """Configurations with groups that can hold the top-k."""
    for groups, size, limit, per_group in itertools.product((2, 4, 8), (2, 4, 16), (1, 2, 3), (1, 2, 4)):
        if limit <= groups and per_group <= size and limit * per_group <= 16:
            yield groups, size, limit, limit * per_group


def test_plain_selection_matches_brute_force_with_ties():
    draw = random.Random(0)
    for k in range(1, 17):
        for num_experts in (max(k, 2), draw.randint(max(k, 2), 512), 512):
            config = ModelConfig(num_experts=num_experts, top_k=k)
            choice_TE = coarse_choices(draw.choice([1, 5, 13]), num_experts, seed=k)
            chosen = router.select_experts(config, choice_TE)
            assert chosen.dtype == torch.int32
            assert chosen.tolist() == brute_force_selection(config, choice_TE)


@pytest.mark.parametrize("group_score", GroupScore)
def test_group_limited_selection_matches_brute_force_with_tied_groups(group_score):
    limits = list(group_limits())
    assert len(limits) > 40
    for groups, size, limit, k in limits:
        config = ModelConfig(
            num_experts=groups * size, top_k=k, num_groups=groups, topk_groups=limit, group_score=group_score
        )
        choice_TE = coarse_choices(17, groups * size, seed=k)
        chosen = router.select_experts(config, choice_TE)
        assert chosen.tolist() == brute_force_selection(config, choice_TE)


def test_each_group_score_has_a_group_of_its_own():
    choices = torch.tensor([[0.9, 0.0, 0.0, 0.6, 0.6, 0.0, 0.5, 0.5, 0.5]])
    for group_score, expected in (
        (GroupScore.max, [0, 1, 2]),
        (GroupScore.top2_sum, [3, 4, 5]),
        (GroupScore.topk_sum, [6, 7, 8]),
    ):
        config = ModelConfig(num_experts=9, top_k=3, num_groups=3, topk_groups=1, group_score=group_score)
        assert router.select_experts(config, choices).tolist() == [expected]


@pytest.mark.parametrize("groups", [1, 4])
def test_equal_choices_go_to_the_lowest_experts(groups):
    config = ModelConfig(num_experts=256, top_k=8, num_groups=groups, topk_groups=min(groups, 2))
    for value in (-1.0, 0.0, 0.5):
        chosen = router.select_experts(config, torch.full((3, 256), value))
        assert chosen.tolist() == [list(range(8))] * 3


@pytest.mark.parametrize("function", SCORES)
def test_scores_are_fp32_also_for_bf16_logits(function):
    logits = random_logits(9, 33).detach().bfloat16()
    scores = router.scores_of(logits, function)
    exact = logits.double()
    expected = (
        exact.sigmoid() if function is ScoreFunction.sigmoid else exact.exp() / exact.exp().sum(1, True)
    )
    assert scores.dtype == torch.float32
    assert_forward_close(scores, expected)


def weight_variants():
    """(score function, softmax after top-k, renormalise, scale): every valid combination."""
    for function, after, renormalise, scale in itertools.product(SCORES, *[(False, True)] * 2, (1.0, 2.5)):
        if not (after and function is ScoreFunction.sigmoid):
            yield function, after, renormalise, scale


@pytest.mark.parametrize(("function", "after", "renormalise", "scale"), list(weight_variants()))
def test_slot_weights_and_their_gradients_match_a_loop_in_fp64(function, after, renormalise, scale):
    for T, E, K in ((7, 2, 1), (5, 9, 4), (3, 512, 16), (4, 6, 6)):
        config = ModelConfig(
            num_experts=E,
            top_k=K,
            score_function=function,
            softmax_after_topk=after,
            renormalise=renormalise,
            routed_scale=scale,
        )
        logits = random_logits(T, E, seed=E)
        scores = router.scores_of(logits, function)
        experts = router.select_experts(config, scores.detach())
        weights = router.slot_weights(config, logits, scores, experts)
        exact = logits.detach().double().requires_grad_()
        rows = []
        for t, chosen in enumerate(experts.tolist()):
            among = chosen if after else range(E)
            if function is ScoreFunction.sigmoid:
                row = [1 / (1 + (-exact[t, e]).exp()) for e in chosen]
            else:
                row = [exact[t, e].exp() / sum(exact[t, i].exp() for i in among) for e in chosen]
            if renormalise and not after:
                row = [r / sum(row) for r in row]
            rows.append(torch.stack(row) * scale)
        expected = torch.stack(rows)
        assert weights.dtype == torch.float32
        assert_forward_close(weights, expected)
        incoming = torch.randn(T, K, generator=torch.Generator().manual_seed(1))
        (actual,) = torch.autograd.grad(weights, logits, incoming)
        (wanted,) = torch.autograd.grad(expected, exact, incoming.double())
        assert_gradient_close(actual, wanted, terms=float(incoming.norm()) * scale)


@pytest.mark.parametrize(("T", "K", "E"), [(8, 2, 8), (16, 6, 32), (512, 16, 512), (5, 8, 10), (64, 1, 2)])
def test_round_robin_gives_every_expert_the_same_number_of_slots(T, K, E):
    experts = router.round_robin(T, K, E, torch.device("cpu"))
    assert experts.dtype == torch.int32
    assert torch.bincount(experts.flatten(), minlength=E).tolist() == [T * K // E] * E
    assert all(len(set(row)) == K for row in experts.tolist())


def test_round_robin_of_a_rest_differs_by_at_most_one_slot():
    counts = torch.bincount(router.round_robin(7, 3, 4, torch.device("cpu")).flatten(), minlength=4)
    assert counts.tolist() == [6, 5, 5, 5]


def random_experts(T, K, E, seed):
    """Unbalanced: the first experts are the likelier; int32 [T, K]."""
    draw = random.Random(seed)
    rows = [sorted(range(E), key=lambda e: draw.random() * (e + 1))[:K] for _ in range(T)]
    return torch.tensor(rows, dtype=torch.int32)


def test_counts_per_sequence_match_counting():
    for B, S, K, E in ((1, 5, 1, 2), (3, 7, 4, 9), (2, 3, 16, 512)):
        experts = random_experts(B * S, K, E, seed=E)
        counts = router.count_per_sequence(experts, B, E)
        for b, rows in enumerate(experts.view(B, S * K).tolist()):
            assert counts[b].tolist() == [rows.count(e) for e in range(E)]


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


@pytest.mark.parametrize("function", SCORES)
@pytest.mark.parametrize("kind", [a for a in AuxLoss if a is not AuxLoss.none])
def test_balance_loss_and_its_gradient_match_the_written_out_sums(kind, function):
    for B, S, K, E in ((1, 6, 1, 2), (3, 5, 2, 7), (2, 4, 8, 12)):
        config = ModelConfig(num_experts=E, top_k=K, aux_loss=kind, score_function=function)
        logits = random_logits(B * S, E, seed=E)
        experts = random_experts(B * S, K, E, seed=E)
        earlier = [random.Random(E).randint(0, 9) for _ in range(E)]
        counts = router.count_per_sequence(experts, B, E)
        scores = router.scores_of(logits, function)
        loss = router.balance_loss(
            *router.balance_terms(config, scores, counts, torch.tensor(earlier).float())
        )
        exact = logits.detach().double().requires_grad_()
        exact_scores = exact.sigmoid() if function is ScoreFunction.sigmoid else exact.softmax(1)
        expected = written_out_balance_loss(config, exact_scores, experts, B, earlier)
        assert loss.shape == () and loss.dtype == torch.float32
        assert_forward_close(loss, expected)
        gradients = (torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, exact)[0])
        assert_gradient_close(*gradients)


@pytest.mark.parametrize("kind", [a for a in AuxLoss if a is not AuxLoss.none])
def test_balance_loss_is_one_at_balance_and_the_number_of_experts_at_collapse(kind):
    config = ModelConfig(num_experts=8, top_k=1, aux_loss=kind)
    for experts, scores, expected in (
        (router.round_robin(16, 1, 8, torch.device("cpu")), torch.full((16, 8), 1 / 8), 1.0),
        (torch.full((16, 1), 3, dtype=torch.int32), torch.eye(8)[3].expand(16, 8), 8.0),
    ):
        counts = router.count_per_sequence(experts, 2, 8)
        terms = router.balance_terms(config, scores, counts, torch.zeros(8))
        assert router.balance_loss(*terms).item() == pytest.approx(expected)


def test_global_loads_count_all_micro_batches_so_far():
    T, K, E = 10, 2, 6
    config = ModelConfig(num_experts=E, top_k=K, aux_loss=AuxLoss.global_batch)
    earlier, all_experts = torch.zeros(E), []
    for step in range(3):
        scores, experts = random_logits(T, E, seed=step).softmax(1), random_experts(T, K, E, seed=step)
        counts = router.count_per_sequence(experts, 2, E)
        loss = router.balance_loss(*router.balance_terms(config, scores, counts, earlier))
        all_experts.extend(experts.flatten().tolist())
        load = torch.tensor([all_experts.count(e) / len(all_experts) for e in range(E)]).double()
        assert_forward_close(loss, E * (load * scores.double().mean(0)).sum())
        earlier = earlier + counts.sum(0)


def test_z_loss_and_its_gradient_match_a_loop_in_fp64():
    logits = random_logits(11, 7, scale=4.0)
    exact = logits.detach().double().requires_grad_()
    expected = sum(sum(x.exp() for x in row).log() ** 2 for row in exact) / len(exact)
    loss = router.z_loss(logits)
    assert_forward_close(loss, expected)
    assert_gradient_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, exact)[0])
    assert bool(router.z_loss(torch.full((2, 3), 80.0)).isfinite())  # exp(80) squared is beyond fp32


@pytest.mark.parametrize("function", SCORES)
def test_entropy_matches_a_loop_in_fp64(function):
    scores = router.scores_of(random_logits(11, 7), function).detach()
    expected = 0.0
    for row in scores.double().tolist():
        expected -= sum(s / sum(row) * math.log(s / sum(row)) for s in row) / len(scores)
    assert router.entropy(scores).item() == pytest.approx(expected, rel=1e-6)


def test_entropy_of_a_certain_router_is_zero_and_of_an_undecided_one_log_of_the_experts():
    assert router.entropy(torch.eye(8)).item() == 0.0
    assert router.entropy(torch.full((3, 8), 0.25)).item() == pytest.approx(math.log(8))
