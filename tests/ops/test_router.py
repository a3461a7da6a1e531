"""Router arithmetic: selection against brute force, weights and losses against fp64 loops."""

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


@pytest.mark.parametrize(("T", "K", "E"), [(8, 2, 8), (16, 6, 32), (512, 16, 512), (5, 8, 10), (64, 1, 2)])
def test_round_robin_gives_every_expert_the_same_number_of_slots(T, K, E):
    experts = router.round_robin(T, K, E, torch.device("cpu"))
    assert experts.dtype == torch.int32
    assert torch.bincount(experts.flatten(), minlength=E).tolist() == [T * K // E] * E
    assert all(len(set(row)) == K for row in experts.tolist())


def random_experts(T, K, E, seed):
    """Unbalanced: the first experts are the likelier; int32 [T, K]."""
    draw = random.Random(seed)
    rows = [sorted(range(E), key=lambda e: draw.random() * (e + 1))[:K] for _ in range(T)]
    return torch.tensor(rows, dtype=torch.int32)


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
