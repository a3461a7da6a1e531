"""fuse_router: every router of the model and of transformers; what it leaves, and the numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphmoe.config import AuxLoss, GroupScore, ScoreFunction
from passes.fuse_router import fuse_router
from tests.model.test_router_segment import OPTIONS, make_input, make_router
from tests.passes.blocks import (
    DTYPES,
    Traced,
    assert_left,
    assert_same_numbers,
    operations,
    random,
    rewritten,
    traced,
    transformers_block,
)

INSIDE = {
    "_softmax",
    "sigmoid",
    "sort",
    "topk",
    "slice",
    "gather",
    "scatter_add",
    "logsumexp",
    "log",
    "scatter",
}
"""What the operation takes the place of, in every router of the model."""
LOSSES = [(kind, z) for kind in AuxLoss for z in (0.0, 0.125)]


def assert_fused(plain: Traced) -> Traced:
    fused, (result,) = rewritten(plain, fuse_router)
    before, after = operations(plain), operations(fused)
    assert result == (1, ()) and after["router"] == 1
    assert INSIDE & set(before) and not INSIDE & set(after), after
    assert after.total() - after["getitem"] - after["_to_copy"] < before.total() - before["getitem"]
    return fused


def router_call(fused: Traced):
    (call,) = [node for node in fused.graph.graph.nodes if "graphmoe.router" in str(node.target)]
    return call


@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_every_router_of_the_model_becomes_one_operation_with_the_same_numbers(case):
    function, after, renormalise, bias, groups, group_score = OPTIONS[case]
    aux_loss, z_loss_coef = LOSSES[case % len(LOSSES)]
    dtype = DTYPES[case // len(LOSSES) % 2]
    router = make_router(
        score_function=function,
        renormalise=renormalise,
        num_groups=groups,
        topk_groups=min(groups, 2),
        group_score=group_score,
        selection_bias=bias,
        softmax_after_topk=after,
        routed_scale=1.5,
        aux_loss=aux_loss,
        aux_loss_coef=0.25,
        z_loss_coef=z_loss_coef,
        dtype=dtype,
    )
    plain = traced(router, make_input().detach().to(dtype).requires_grad_())
    fused = assert_fused(plain)
    assert_same_numbers(fused, plain)
    group_top = {GroupScore.max: 1, GroupScore.top2_sum: 2, GroupScore.topk_sum: 2}[group_score]
    _, given_bias, chosen, *options = router_call(fused).args
    assert (given_bias is not None, chosen) == (bias, None)
    num_sequences = 1 if aux_loss is AuxLoss.none else 2
    assert options == [
        *(num_sequences, 4, function.value, groups, min(groups, 2), group_top if groups > 1 else 1),
        *(renormalise and not after, after, 1.5),
    ]


@pytest.mark.parametrize("aux_loss", AuxLoss)
@pytest.mark.parametrize("function", ScoreFunction)
def test_losses_have_the_same_gradients_when_all_tokens_choose_the_same_experts(function, aux_loss):
    router = make_router(
        score_function=function, aux_loss=aux_loss, aux_loss_coef=1.0, z_loss_coef=0.5, selection_bias=True
    )
    with torch.no_grad():
        router.selection_bias.copy_(torch.arange(16.0) * 10)
    plain = traced(router, make_input())
    fused = assert_fused(plain)
    assert_same_numbers(fused, plain)
    assert set(fused.graph(*fused.inputs)[2].flatten().tolist()) == {12, 13, 14, 15}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forced_experts_are_handed_to_the_operation(after, dtype):
    router = make_router(force_balance=True, softmax_after_topk=after, aux_loss_coef=0.5, dtype=dtype)
    plain = traced(router, make_input().detach().to(dtype).requires_grad_())
    fused = assert_fused(plain)
    assert router_call(fused).args[2] is not None
    assert_same_numbers(fused, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("mixtral", {}, (1, 2, "softmax", 1, 1, 1, True, False, 1.0)),
        ("qwen3_moe", {"norm_topk_prob": False}, (1, 2, "softmax", 1, 1, 1, False, False, 1.0)),
        ("qwen3_moe", {"norm_topk_prob": True}, (1, 2, "softmax", 1, 1, 1, True, False, 1.0)),
        ("deepseek_v2", {"topk_method": "greedy"}, (1, 2, "softmax", 1, 1, 1, False, False, 2.5)),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy"},
            (1, 2, "softmax", 4, 2, 1, False, False, 2.5),
        ),
        ("deepseek_v3", {"norm_topk_prob": True}, (1, 2, "sigmoid", 4, 2, 2, True, False, 2.5)),
    ],
)
def test_routers_of_transformers_match(family, changes, options, dtype):
    plain = transformers_block(family, dtype, **changes)
    fused, (result,) = rewritten(plain, fuse_router)
    assert result == (1, ()) and not {"topk", "_softmax", "sigmoid", "gather"} & set(operations(fused))
    assert router_call(fused).args[3:] == options
    assert_same_numbers(fused, plain)


def chosen(logits):
    return logits.softmax(-1).topk(2, dim=-1)


def test_a_softmax_over_the_largest_logits_is_softmax_after_topk():
    def run(logits):
        values, experts = logits.topk(2, dim=-1)
        return values.softmax(-1), experts

    plain = traced(run, random(18, 8))
    fused = assert_fused(plain)
    assert router_call(fused).args[-2] is True
    assert_same_numbers(fused, plain)


def test_a_mean_over_all_tokens_is_the_sum_over_sequences():
    def run(logits):
        scores = logits.softmax(-1)
        weights, experts = scores.topk(2, dim=-1)
        return weights, experts, scores.mean(0), logits.logsumexp(-1).pow(2).sum()

    plain = traced(run, random(18, 8))
    assert_same_numbers(assert_fused(plain), plain)


def test_a_large_term_in_the_denominator_stays_outside():
    def run(logits):
        values, experts = chosen(logits)
        return values / (values.sum(-1, keepdim=True) + 0.5), experts

    plain = traced(run, random(18, 8))
    fused = assert_fused(plain)
    assert router_call(fused).args[-3] is False and operations(fused)["div"] == 1
    assert_same_numbers(fused, plain)


def test_two_routers_of_one_graph_both_match():
    def run(one, two):
        return *chosen(one), *chosen(two)

    plain = traced(run, random(18, 8), random(18, 8, seed=1))
    fused, (result,) = rewritten(plain, fuse_router)
    assert result == (2, ())
    assert_same_numbers(fused, plain)


def scores_returned(logits):
    scores = logits.softmax(-1)
    return *scores.topk(2, dim=-1), scores


def own_loss(logits):
    scores = logits.sigmoid()
    return *scores.topk(2, dim=-1), scores.mean(0)  # of scores that do not add up to 1


def low_precision(logits):
    return chosen(logits.bfloat16())


def no_gradient(logits):
    scores = logits.softmax(-1)
    experts = scores.topk(2, dim=-1).indices
    return scores.detach().gather(1, experts) * logits.sum(), experts


def other_scores(logits):
    scores = F.softplus(logits).sqrt()
    experts = scores.topk(2, dim=-1).indices
    return scores.gather(1, experts), experts


def biased_weights(logits):
    return (logits.softmax(-1) + torch.ones(8)).topk(2, dim=-1)


def group_limited(fill, scores, choice, axis=-1, base=0.0):
    best = choice.view(-1, 4, 2).amax(-1).topk(2, dim=-1).indices
    mask = torch.full((len(choice), 4), base).scatter(1, best, 1.0)
    mask = mask.unsqueeze(axis).expand(-1, *((4, 2) if axis == -1 else (2, 4))).reshape(-1, 8)
    experts = choice.masked_fill(~mask.bool(), fill).topk(2, dim=-1).indices
    return scores.gather(1, experts), experts


def masked_with_zero(logits):
    scores = logits.sigmoid()
    return group_limited(0.0, scores, scores - torch.ones(8))


def groups_of_every_fourth(logits):
    scores = logits.sigmoid()
    return group_limited(float("-inf"), scores, scores, axis=1)


def no_group_left_out(logits):
    scores = logits.sigmoid()
    return group_limited(float("-inf"), scores, scores, base=1.0)


def biased_logits(logits):
    experts = (logits + torch.arange(8.0)).topk(2, dim=-1).indices
    return logits.gather(1, experts).softmax(-1), experts


def unequal_sequences(logits):
    scores = logits.softmax(-1)
    return *scores.topk(2, dim=-1), scores.view(2, 9, 8).mean(1), scores.view(3, 6, 8).mean(1)


LOOK_ALIKES = {
    scores_returned: "scores are also read by output",
    own_loss: "scores are also read by mean",
    low_precision: "is torch.bfloat16, not torch.float32",
    no_gradient: "no weights are gathered by these ids",
    other_scores: "experts are chosen by what is neither softmax nor sigmoid",
    biased_weights: "no weights are gathered by these ids",
    masked_with_zero: "scores outside the best groups become 0.0, not -inf",
    groups_of_every_fourth: "it is no limit to the best groups",
    no_group_left_out: "it is no limit to the best groups",
    biased_logits: "bias or groups act on what is neither softmax nor sigmoid",
    unequal_sequences: "scores are also read by",
}


def limit_by(mask_of):
    """Choose where a mask [T, G] of the scores' groups is set."""

    def run(logits, given):
        scores = logits.sigmoid()
        mask = mask_of(scores.view(-1, 4, 2), given)
        experts = scores.masked_fill(~mask.repeat_interleave(2, dim=1), float("-inf")).topk(2, dim=-1).indices
        return scores.gather(1, experts), experts

    return run


def best_of(values, **named):
    return values.topk(2, dim=-1, **named).indices


NO_LIMITS = {
    "a threshold": lambda groups, given: groups.amax(-1) > 0.6,
    "an input": lambda groups, given: given.bool(),
    "the worst groups": lambda groups, given: torch.zeros(18, 4).scatter(
        1, best_of(groups.amax(-1), largest=False), 1.0
    ),
    "groups by their mean": lambda groups, given: torch.zeros(18, 4).scatter(
        1, best_of(groups.mean(-1)), 1.0
    ),
    "groups by another sum": lambda groups, given: torch.zeros(18, 4).scatter(
        1, best_of(groups.view(-1, 2, 4).sum(1)), 1.0
    ),
    "tokens for each group": lambda groups, given: torch.zeros(18, 4).scatter(
        0, best_of(groups.amax(-1)), 1.0
    ),
    "zeros written": lambda groups, given: torch.zeros(18, 4).scatter(1, best_of(groups.amax(-1)), 0.0),
    "groups beside others": lambda groups, given: given.scatter(1, best_of(groups.amax(-1)), 1.0),
}


@pytest.mark.parametrize("name", NO_LIMITS)
def test_other_masks_are_no_limit_to_the_best_groups(name):
    run = limit_by(lambda groups, given: NO_LIMITS[name](groups, given).bool())
    plain = traced(run, random(18, 8), torch.zeros(18, 4))
    assert_left(plain, "it is no limit to the best groups", fuse_router)


def test_the_mask_of_the_best_groups_is_a_limit():
    run = limit_by(lambda groups, given: torch.zeros(18, 4).scatter(1, best_of(groups.amax(-1)), 1.0).bool())
    plain = traced(run, random(18, 8), torch.zeros(18, 4))
    assert_same_numbers(assert_fused(plain), plain)


NO_CHOICES = {
    "second and third": lambda s: s.softmax(-1).sort(-1, descending=True, stable=True).indices[:, 1:3],
    "smallest": lambda s: s.softmax(-1).sort(-1, stable=True).indices[:, :2],
    "tokens of an expert": lambda s: s.softmax(-1).sort(0, descending=True, stable=True).indices[:, :2] % 8,
    "first tokens of a ranking": lambda s: s.softmax(-1).sort(-1, descending=True, stable=True).indices[:2],
    "scores over tokens": lambda s: s.softmax(0).topk(2, dim=-1).indices,
}


@pytest.mark.parametrize("name", NO_CHOICES)
def test_other_rankings_choose_no_experts(name):
    def run(logits):
        experts = NO_CHOICES[name](logits)
        return logits.softmax(0 if "over" in name else -1).gather(1, experts), experts

    plain = traced(run, random(18, 8))
    assert_left(plain, "softmax or sigmoid, none that experts are chosen and weighted by", fuse_router)


@pytest.mark.parametrize("look_alike", LOOK_ALIKES, ids=lambda f: f.__name__)
def test_look_alikes_stay_with_a_reason(look_alike):
    assert_left(traced(look_alike, random(18, 8)), LOOK_ALIKES[look_alike], fuse_router)


def test_zero_outside_the_best_groups_is_as_good_as_infinity_without_a_bias():
    def run(logits):
        scores = logits.sigmoid()
        return group_limited(0.0, scores, scores)

    plain = traced(run, random(18, 8))
    assert_same_numbers(assert_fused(plain), plain)


def test_a_softmax_that_nothing_is_chosen_by_is_counted():
    plain = traced(lambda x: F.softmax(x, -1) * x[:, :1].sigmoid(), random(18, 8))
    assert_left(plain, "2 softmax or sigmoid, none that experts are chosen and weighted by", fuse_router)
