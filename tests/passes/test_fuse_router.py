"""fuse_router: every router of the model and of transformers becomes one operation."""

import pytest
import torch

from graphmoe.config.schema import AuxLoss, GroupScore, ScoreFunction
from graphmoe.passes.fuse_router import fuse_router
from tests.model.test_router_segment import OPTIONS, make_input, make_router
from tests.passes.blocks import (
    DTYPES,
    assert_same_numbers,
    operations,
    random,
    rewritten,
    traced,
    transformers_block,
)
from tests.passes.routers import assert_fused, router_call

LOSSES = [(kind, z) for kind in AuxLoss for z in (0.0, 0.125)]


def routed(router, x):
    """The traced router; a balance loss over the global batch is given slots of earlier micro-batches."""
    return traced(router, x, *[torch.arange(16.0)] * router.reads_earlier)


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
    plain = routed(router, make_input().detach().to(dtype).requires_grad_())
    fused = assert_fused(plain)
    assert_same_numbers(fused, plain)
    group_top = {GroupScore.max: 1, GroupScore.top2_sum: 2, GroupScore.topk_sum: 2}[group_score]
    _, given_bias, chosen, *options = router_call(fused).args
    assert (given_bias is not None, chosen) == (bias, None)
    num_sequences = 1 if aux_loss is AuxLoss.none else 2
    assert options == [
        *(num_sequences, 4, function.value, groups, min(groups, 2), group_top if groups > 1 else 1),
        *(renormalise and not after, after, 1.5, bias and aux_loss is not AuxLoss.none),
    ]


@pytest.mark.parametrize("aux_loss", AuxLoss)
@pytest.mark.parametrize("function", ScoreFunction)
def test_losses_have_the_same_gradients_when_all_tokens_choose_the_same_experts(function, aux_loss):
    router = make_router(
        score_function=function, aux_loss=aux_loss, aux_loss_coef=1.0, z_loss_coef=0.5, selection_bias=True
    )
    with torch.no_grad():
        router.selection_bias.copy_(torch.arange(16.0) * 10)
    plain = routed(router, make_input())
    fused = assert_fused(plain)
    assert_same_numbers(fused, plain)
    assert set(fused.graph(*fused.inputs)[2].flatten().tolist()) == {12, 13, 14, 15}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forced_experts_are_handed_to_the_operation(after, dtype):
    router = make_router(force_balance=True, softmax_after_topk=after, aux_loss_coef=0.5, dtype=dtype)
    plain = routed(router, make_input().detach().to(dtype).requires_grad_())
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
    assert result[:2] == (1, ()) and not {"topk", "_softmax", "sigmoid", "gather"} & set(operations(fused))
    assert router_call(fused).args[3:] == (*options, False)
    assert_same_numbers(fused, plain)


def test_a_softmax_over_the_largest_logits_is_softmax_after_topk():
    def run(logits):
        values, experts = logits.topk(2, dim=-1)
        return values.softmax(-1), experts

    plain = traced(run, random(18, 8))
    fused = assert_fused(plain)
    assert router_call(fused).args[10] is True
    assert_same_numbers(fused, plain)


def test_logits_of_sequences_are_seen_as_tokens():
    def run(logits_BSE):
        values, experts = logits_BSE.view(18, 8).topk(2, dim=-1)
        counts = experts.view(2, -1) + 8 * torch.arange(2).unsqueeze(1)
        counts = torch.zeros(16).scatter_add(0, counts.flatten(), torch.ones(36))
        return values.softmax(-1), experts, counts, logits_BSE.logsumexp(-1).square().mean()

    plain = traced(run, random(2, 9, 8))
    fused = assert_fused(plain)
    assert router_call(fused).args[0].meta["val"].shape == (18, 8) and router_call(fused).args[3] == 2
    assert_same_numbers(fused, plain)


@pytest.mark.parametrize("negated_first", [False, True])
def test_the_entropy_may_be_negated_before_or_after_its_mean(negated_first):
    def run(logits):
        scores = logits.softmax(-1)
        entropy = (scores * scores.log()).sum(-1)
        return *scores.topk(2, dim=-1), (-entropy).mean() if negated_first else -entropy.mean()

    plain = traced(run, random(18, 8))
    assert_same_numbers(assert_fused(plain), plain)


def test_a_mean_over_all_tokens_is_the_sum_over_sequences():
    def run(logits):
        scores = logits.softmax(-1)
        weights, experts = scores.topk(2, dim=-1)
        return weights, experts, scores.mean(0), logits.logsumexp(-1).pow(2).sum()

    plain = traced(run, random(18, 8))
    assert_same_numbers(assert_fused(plain), plain)
