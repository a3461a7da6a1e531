"""fuse_router: which masks, rankings and ids are a choice of experts, and which are not."""

import pytest
import torch

from graphmoe.passes.fuse_permutation import fuse_permutation
from graphmoe.passes.fuse_router import fuse_router
from tests.passes.blocks import assert_left, assert_same_numbers, operations, random, rewritten, traced
from tests.passes.routers import assert_fused, router_call


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
    "second and third": lambda s: s.sort(dim=-1, descending=True, stable=True).indices[:, 1:3],
    "smallest": lambda s: s.sort(dim=-1, stable=True).indices[:, :2],
    "smallest by topk": lambda s: s.topk(2, dim=-1, largest=False).indices,
    "tokens of an expert": lambda s: s.sort(dim=0, descending=True, stable=True).indices[:, :2] % 8,
    "first tokens of a ranking": lambda s: s.sort(dim=-1, descending=True, stable=True).indices[:2],
    "scores over tokens": lambda s: s.topk(2, dim=-1).indices,
}


@pytest.mark.parametrize("name", NO_CHOICES)
def test_other_rankings_choose_no_experts(name):
    def run(logits):
        scores = logits.softmax(0 if "over" in name else -1)
        experts = NO_CHOICES[name](scores)
        return scores.gather(1, experts), experts

    plain = traced(run, random(18, 8))
    assert_left(plain, "1 softmax or sigmoid, none that experts are chosen and weighted by", fuse_router)


def with_ids_of_another(run):
    """Ids that another tensor ranks, and their histogram, as a plan begins with."""

    def routed(logits, other):
        experts = NO_CHOICES["second and third"](other)
        counts = torch.zeros(8).scatter_add(0, experts.flatten(), torch.ones(36))
        order = experts.flatten().argsort(stable=True)
        return run(logits, experts), logits[order // 2], counts

    return traced(routed, random(18, 8), random(18, 8, seed=1))


@pytest.mark.parametrize("planned", [False, True])
def test_ids_from_elsewhere_are_given_experts_where_a_plan_begins_with_them(planned):
    plain = with_ids_of_another(
        lambda logits, ids: logits.sigmoid().gather(1, ids) + logits.gather(1, ids).exp()
    )
    if planned:
        plain, _ = rewritten(plain, fuse_permutation)
        assert operations(plain)["routing_plan"] == 1 and operations(plain)["scatter_add"] == 0
    fused, (result,) = rewritten(plain, fuse_router)
    assert result[:2] == (1, ()) and router_call(fused).args[2] is not None
    assert_same_numbers(fused, plain)


def test_ids_of_some_tokens_are_not_given_experts():
    plain = with_ids_of_another(lambda logits, ids: logits.sigmoid().gather(1, ids[:2]))
    assert_left(plain, "1 softmax or sigmoid, none that experts are chosen and weighted by", fuse_router)


@pytest.mark.parametrize("axis", [0, 1])
def test_constant_ids_are_given_experts_only_for_the_tokens_of_the_scores(axis):
    def run(logits):
        return logits.softmax(-1).gather(axis, torch.arange(4).view(2, 2))

    plain = traced(run, random(18 if axis == 1 else 2, 8))
    assert_left(plain, "1 softmax or sigmoid, none that experts are chosen and weighted by", fuse_router)


def test_a_division_of_columns_is_no_share():
    def run(logits):
        scores = logits.sigmoid()
        return *scores.topk(2, dim=-1), (scores / scores.sum(-1)).mean(0)

    assert_left(traced(run, random(8, 8)), "scores are also read by", fuse_router)


COUNTS = {
    "slots": lambda ids: (ids, 1.0),
    "slots twice": lambda ids: (ids, 2.0),
    "other ids": lambda ids: (ids.flip(1), 1.0),
}


@pytest.mark.parametrize("name", COUNTS)
def test_only_ones_for_each_chosen_expert_are_counts_of_slots(name):
    def run(logits):
        weights, experts = logits.softmax(-1).topk(2, dim=-1)
        ids, step = COUNTS[name](experts)
        bins = ids.reshape(2, -1) + 8 * torch.arange(2).unsqueeze(1)
        return weights, experts, torch.zeros(16).scatter_add(0, bins.flatten(), torch.full((36,), step))

    fused, (result,) = rewritten(plain := traced(run, random(18, 8)), fuse_router)
    assert result[:2] == (1, ()) and operations(fused)["scatter_add"] == (name != "slots")
    assert_same_numbers(fused, plain)


def test_labels_are_no_experts():
    def run(logits, labels):
        return logits.softmax(-1).gather(1, labels).log(), logits.log_softmax(-1).gather(1, labels)

    plain = traced(run, random(18, 8), torch.arange(18).unsqueeze(1) % 8)
    assert_left(plain, "1 softmax or sigmoid, none that experts are chosen and weighted by", fuse_router)
