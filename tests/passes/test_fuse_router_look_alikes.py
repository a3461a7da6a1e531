"""fuse_router: what it leaves, and the reasons that it gives."""

import pytest
import torch
import torch.nn.functional as F

from graphmoe.passes.fuse_router import fuse_router
from tests.passes.blocks import assert_left, assert_same_numbers, operations, random, rewritten, traced
from tests.passes.routers import assert_fused, router_call

DIVISIONS = {
    "a large term": lambda w: w / (w.sum(-1, keepdim=True) + 0.5),
    "another sum": lambda w: w / w.square().sum(-1, keepdim=True),
    "another sum and next to nothing": lambda w: w / (w.square().sum(-1, keepdim=True) + 1e-20),
    "a sum over tokens": lambda w: w / w.sum(0, keepdim=True),
    "whole parts": lambda w: torch.div(w, w.sum(-1, keepdim=True), rounding_mode="floor") * w,
    "a reciprocal": lambda w: w.sum(-1, keepdim=True) / w,
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_divisions_that_do_not_renormalise_stay_outside(name):
    def run(logits):
        weights, experts = logits.softmax(-1).topk(2, dim=-1)
        return DIVISIONS[name](weights), experts

    plain = traced(run, random(18, 8))
    fused, (result,) = rewritten(plain, fuse_router)
    assert result[:2] == (1, ()) and router_call(fused).args[-3] is False
    assert operations(fused)["div"] == 1
    assert_same_numbers(fused, plain)


def test_the_z_loss_of_other_groups_of_logits_stays_outside():
    def run(logits):
        return *logits.softmax(-1).topk(2, dim=-1), logits.view(-1, 2).logsumexp(-1).square().mean()

    plain = traced(run, random(18, 8))
    fused, (result,) = rewritten(plain, fuse_router)
    assert result[:2] == (1, ()) and operations(fused)["logsumexp"] == 1
    assert_same_numbers(fused, plain)


def test_a_gather_from_another_table_is_not_taken_for_weights():
    def run(logits, table):
        scores = logits.softmax(-1)
        experts = scores.topk(2, dim=-1).indices
        return table.gather(1, experts), scores.gather(1, experts.flip(1)), scores.gather(1, experts), experts

    plain = traced(run, random(18, 8), random(18, 8, seed=1))
    assert_left(plain, "scores are also read by gather", fuse_router)


def test_two_routers_of_one_graph_both_match():
    def run(one, two):
        return *one.softmax(-1).topk(2, dim=-1), *two.sigmoid().topk(3, dim=-1)

    plain = traced(run, random(18, 8), random(18, 8, seed=1))
    fused, (result,) = rewritten(plain, fuse_router)
    assert result[:2] == (2, ())
    assert_same_numbers(fused, plain)


def shares_of_pairs(logits):
    scores = logits.sigmoid()
    pairs = scores.view(-1, 2)
    return *scores.topk(2, dim=-1), (pairs / pairs.sum(-1, keepdim=True)).view(18, 8).mean(0)


def entropy_of_pairs(logits):
    scores = logits.softmax(-1)
    pairs = scores.view(-1, 2)
    return *scores.topk(2, dim=-1), (pairs * pairs.log()).sum(-1).mean()


def weights_of_others(logits):
    scores = logits.softmax(-1)
    experts = scores.topk(2, dim=-1).indices
    return scores.gather(1, experts.flip(1)), experts


def weights_of_tokens(logits):
    scores = logits.softmax(-1)
    experts = scores.topk(2, dim=-1).indices
    return scores.gather(0, experts), experts


def sums_by(reduce):
    """A router with one more reader of its scores."""

    def run(logits):
        scores = logits.softmax(-1)
        return *scores.topk(2, dim=-1), reduce(scores)

    return run


def scores_returned(logits):
    scores = logits.softmax(-1)
    return *scores.topk(2, dim=-1), scores


def own_loss(logits):
    scores = logits.sigmoid()
    return *scores.topk(2, dim=-1), scores.mean(0)  # of scores that do not add up to 1


def low_precision(logits):
    return logits.bfloat16().softmax(-1).topk(2, dim=-1)


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
    weights_of_others: "no weights are gathered by these ids",
    weights_of_tokens: "no weights are gathered by these ids",
    sums_by(lambda s: s.view(2, 9, 8).mean(2)): "scores are also read by view",
    sums_by(lambda s: s.view(2, 9, 8).mean(0)): "scores are also read by view",
    sums_by(lambda s: s.view(-1, 2).mean(0)): "scores are also read by view",
    sums_by(lambda s: (s[:8] / s[:8].sum(-1)).mean(0)): "scores are also read by slice",
    sums_by(lambda s: (s * s.clamp_min(0.01).log()).sum(-1).mean()): "scores are also read by",
    shares_of_pairs: "scores are also read by",
    entropy_of_pairs: "scores are also read by",
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
