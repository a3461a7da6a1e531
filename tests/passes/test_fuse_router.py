"""fuse_router: every router of the model becomes one operation; what is no choice of experts stays."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx, sigmoid

from graphmoe.config.schema import AuxLoss, GroupScore, ScoreFunction
from graphmoe.ops.router import relative_scores
from graphmoe.passes.fuse_permutation import fuse_permutation
from graphmoe.passes.fuse_router import fuse_router
from tests.model.test_router_segment import COVERING, OPTIONS, make_input, make_router, settings_of
from tests.passes.blocks import DTYPES, Traced, assert_left, random, traced

INSIDE = {"_softmax", "sigmoid", "sort", "topk", "slice", "gather", "scatter_add", "logsumexp", "log"}
INSIDE |= {"scatter"}
"""Operations of a router that the fused one replaces; every router of the model has some of them."""
LOSSES = [(kind, z) for kind in AuxLoss for z in (0.0, 0.125)]


def assert_fused(plain: Traced) -> fx.Node:
    """Check that one operation takes the place of the one router, with the same numbers; return its call."""
    fused, (result,) = plain.rewritten(fuse_router)
    before, after = plain.calls, fused.calls
    assert result[:2] == (1, ()) and after["router"] == 1
    assert INSIDE & set(before) and not INSIDE & set(after), after
    assert after.total() - after["getitem"] - after["_to_copy"] < before.total() - before["getitem"]
    fused.assert_same(plain)
    return fused.call("router")


def routed(dtype=torch.float32, bias_E=None, **settings):
    """The traced router; a balance loss over the global batch is given slots of earlier micro-batches."""
    router = make_router(dtype=dtype, **settings)
    if bias_E is not None:
        router.selection_bias.data.copy_(bias_E)
    x = make_input().detach().to(dtype).requires_grad_()
    return traced(router, x, *[torch.arange(16.0)] * router.reads_earlier)


@pytest.mark.parametrize("case", COVERING)
def test_every_router_of_the_model_becomes_one_operation_with_the_same_numbers(case):
    function, after, renormalise, bias, groups, group_score = OPTIONS[case]
    aux_loss, z_loss_coef = LOSSES[case % len(LOSSES)]
    dtype, losses = DTYPES[case // len(LOSSES) % 2], {"aux_loss_coef": 0.25, "z_loss_coef": z_loss_coef}
    plain = routed(dtype, **settings_of(*OPTIONS[case]), aux_loss=aux_loss, **losses)
    group_top = {GroupScore.max: 1, GroupScore.top2_sum: 2, GroupScore.topk_sum: 2}[group_score]
    _, given_bias, chosen, *options = assert_fused(plain).args
    assert (given_bias is not None, chosen) == (bias, None)
    num_sequences = 1 if aux_loss is AuxLoss.none else 2
    assert options == [
        *(num_sequences, 4, function.value, groups, min(groups, 2), group_top if groups > 1 else 1),
        *(renormalise and not after, after, 1.5, bias and aux_loss is not AuxLoss.none),
    ]


@pytest.mark.parametrize("aux_loss", AuxLoss)
@pytest.mark.parametrize("function", ScoreFunction)
def test_losses_have_the_same_gradients_when_all_tokens_choose_the_same_experts(function, aux_loss):
    losses = {"aux_loss": aux_loss, "aux_loss_coef": 1.0, "z_loss_coef": 0.5}
    bias_E = torch.arange(16.0) * 10
    plain = routed(score_function=function, selection_bias=True, bias_E=bias_E, **losses)
    assert_fused(plain)
    assert set(plain.graph(*plain.inputs)[2].flatten().tolist()) == {12, 13, 14, 15}


@pytest.mark.parametrize("add", [F.linear, lambda x, w, b: x @ w.t() + b], ids=["addmm", "mm and add"])
@pytest.mark.parametrize("after", [False, True])
def test_logits_with_a_bias_become_one_operation(add, after, monkeypatch):
    monkeypatch.setattr(F, "linear", lambda x, w, *_: add(x, w, 3 * w[:, 0]))
    losses = {"aux_loss": AuxLoss.micro_batch, "aux_loss_coef": 0.5, "z_loss_coef": 0.5}
    plain = routed(softmax_after_topk=after, **losses)
    assert {"addmm"} & set(plain.calls) or plain.calls["add"]
    assert_fused(plain)


DRAWN = {"expert_load": "hot_experts", "selection_bias": True}
FORCED = [{"force_balance": True, "softmax_after_topk": after} for after in (False, True)]


@pytest.mark.parametrize(
    "settings",
    [
        *({"dtype": dtype, "aux_loss_coef": 0.5, **forced} for dtype in DTYPES for forced in FORCED),
        *({"aux_loss_coef": coef, **DRAWN} for coef in (0.0, 0.5)),
    ],
    ids=str,
)
def test_forced_and_drawn_experts_are_handed_to_the_operation(settings):
    assert assert_fused(routed(**settings)).args[2] is not None


@pytest.mark.parametrize("case", COVERING[::3])
def test_recorded_experts_are_handed_to_the_operation_which_chooses_the_others(case):
    router, x = make_router(**settings_of(*OPTIONS[case]), aux_loss_coef=0.25), make_input()
    given_TK = torch.arange(18 * 4, dtype=torch.int32).view(18, 4) * 5 % 16
    given_TK[::3] = -1
    plain = traced(router, x, given_TK)
    _, bias, chosen, *options = assert_fused(plain).args
    assert (bias is not None, chosen.op, options[-1]) == (OPTIONS[case][3], "placeholder", OPTIONS[case][3])
    own, found = router(x)[2], plain.graph(*plain.inputs)[2]
    assert found[::3].equal(own[::3]) and found[1::3].equal(given_TK[1::3]) and not found.equal(own)


def test_logits_of_sequences_are_seen_as_tokens():
    def run(logits_BSE):
        values, experts = logits_BSE.view(18, 8).topk(2, dim=-1)
        counts = experts.view(2, -1) + 8 * torch.arange(2).unsqueeze(1)
        counts = torch.zeros(16).scatter_add(0, counts.flatten(), torch.ones(36))
        return values.softmax(-1), experts, counts, logits_BSE.logsumexp(-1).square().mean()

    call = assert_fused(traced(run, random(2, 9, 8)))
    assert call.args[0].meta["val"].shape == (18, 8) and call.args[3] == 2


# Routers of two tensors [18, 8]: logits x, and y.


def logits():
    return random(18, 8), random(18, 8, seed=1)


def softmax(x):
    return x.softmax(-1)


def best(values, k=2, **named):
    return values.topk(k, dim=-1, **named).indices


def weighed(scores, choice):
    experts = best(choice)
    return scores.gather(1, experts), experts


def read_by(*readers, of=softmax):
    return lambda x, y: (*(scores := of(x)).topk(2, dim=-1), *(read(scores) for read in readers))


def limited(mask_of, scores_of=sigmoid, bias=0.0, fill=-math.inf, axis=-1):
    """A choice where a mask [18, 4] of the groups of two experts is set."""

    def run(x, y):
        scores = scores_of(x)
        choice = scores + torch.full((8,), bias) if bias else scores
        mask = mask_of(choice.view(-1, 4, 2), y[:, :4])
        sizes = (4, 2) if axis == -1 else (2, 4)
        mask = mask.unsqueeze(axis).expand(-1, *sizes).reshape(-1, 8)
        return weighed(scores, choice.masked_fill(~mask.bool(), fill))

    return run


def mask_of(scores, base=0.0, one=1.0, axis=1, **named):
    """A mask of the groups with the best scores, or another one."""
    mask = base if isinstance(base, torch.Tensor) else torch.full((18, 4), base)
    return mask.scatter(axis, best(scores, **named), one)


def of_maxima(**named):
    return limited(lambda groups, y: mask_of(groups.amax(-1), **named))


def best_groups(groups, _):
    return mask_of(groups.amax(-1))


FUSED = {  # name: (run, arguments of the operation by their position)
    "softmax over the largest logits": (
        lambda x, y: ((t := x.topk(2)).values.softmax(-1), t.indices),
        {10: True},
    ),
    "entropy negated last": (read_by(lambda s: -(s * s.log()).sum(-1).mean()), {10: False}),
    "entropy negated first": (read_by(lambda s: (-(s * s.log()).sum(-1)).mean()), {3: 1}),
    "shares of all tokens, sum of squares": (
        lambda x, y: (*read_by(lambda s: s.mean(0))(x, y), x.logsumexp(-1).pow(2).sum()),
        {3: 1},
    ),
    "groups": (limited(best_groups), {6: 4, 7: 2, 8: 1}),
    "groups, zero outside, no bias": (limited(best_groups, fill=0.0), {6: 4, 7: 2, 8: 1}),
}


@pytest.mark.parametrize(("run", "options"), FUSED.values(), ids=FUSED)
def test_other_spellings_become_one_operation(run, options):
    call = assert_fused(traced(run, *logits()))
    assert {position: call.args[position] for position in options} == options


def slots_of(ids_of, step=1.0):
    def run(x, y):
        weights, experts = x.softmax(-1).topk(2, dim=-1)
        bins = ids_of(experts).reshape(2, -1) + 8 * torch.arange(2).unsqueeze(1)
        return weights, experts, torch.zeros(16).scatter_add(0, bins.flatten(), torch.full((36,), step))

    return run


def divided(divide):
    return lambda x, y: (divide((top := softmax(x).topk(2, dim=-1)).values), top.indices)


def total(w, axis=-1):
    return w.sum(axis, keepdim=True)


BESIDE = {  # name: (run, an operation that stays, how many times)
    "slots": (slots_of(lambda ids: ids), "scatter_add", 0),
    "slots twice": (slots_of(lambda ids: ids, step=2.0), "scatter_add", 1),
    "other ids": (slots_of(lambda ids: ids.flip(1)), "scatter_add", 1),
    "by a sum and a large term": (divided(lambda w: w / (total(w) + 0.5)), "div", 1),
    "by another sum": (divided(lambda w: w / total(w.square())), "div", 1),
    "by another sum and next to nothing": (divided(lambda w: w / (total(w.square()) + 1e-20)), "div", 1),
    "by a sum over tokens": (divided(lambda w: w / total(w, 0)), "div", 1),
    "whole parts": (divided(lambda w: torch.div(w, total(w), rounding_mode="floor") * w), "div", 1),
    "a reciprocal": (divided(lambda w: total(w) / w), "div", 1),
    "squares of other groups of logits": (
        lambda x, y: (*read_by()(x, y), x.view(-1, 2).logsumexp(-1).square().mean()),
        "logsumexp",
        1,
    ),
    "a second router": (lambda x, y: (*read_by()(x, y), *y.sigmoid().topk(3, dim=-1)), "sigmoid", 0),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_no_router_makes_stays_beside_it(name):
    run, stays, count = BESIDE[name]
    plain = traced(run, *logits())
    fused, (result,) = plain.rewritten(fuse_router)
    assert result[:2] == (1 + ("second" in name), ()) and fused.calls[stays] == count
    assert stays != "div" or fused.call("router").args[-3] is False
    fused.assert_same(plain)


def with_ids_of_another(run):
    """Ids that another tensor ranks, and their histogram, as a plan begins with."""

    def routed(x, y):
        experts = y.sort(dim=-1, descending=True, stable=True).indices[:, 1:3]
        counts = torch.zeros(8).scatter_add(0, experts.flatten(), torch.ones(36))
        return run(x, experts), x[experts.flatten().argsort(stable=True) // 2], counts

    return routed


@pytest.mark.parametrize("planned", [False, True])
def test_ids_from_elsewhere_are_given_experts_where_a_plan_begins_with_them(planned):
    run = with_ids_of_another(lambda x, ids: x.sigmoid().gather(1, ids) + x.gather(1, ids).exp())
    plain = traced(run, *logits())
    if planned:
        plain, _ = plain.rewritten(fuse_permutation)
        assert plain.calls["routing_plan"] == 1 and plain.calls["scatter_add"] == 0
    fused, (result,) = plain.rewritten(fuse_router)
    assert result[:2] == (1, ()) and fused.call("router").args[2] is not None
    fused.assert_same(plain)


def ranked(experts_of, axis=-1):
    return lambda x, y: ((scores := x.softmax(axis)).gather(1, experts := experts_of(scores)), experts)


def ordered(scores, dim=-1, descending=True):
    return scores.sort(dim=dim, descending=descending, stable=True).indices


def own_weights(gather):
    """Weights that are made otherwise of scores by softmax, and of their best experts."""
    return lambda x, y: (gather(x, y, scores := softmax(x), experts := best(scores)), experts)


def by_relative_scores(weights_of, of=lambda x, y: x):
    """Weights made of `relative_scores`, of the logits ``of`` in rows of low ones."""

    def run(x, y):
        scores = x.sigmoid()
        relative = relative_scores(of(x, y), scores, ScoreFunction.sigmoid)
        return weights_of(relative.gather(1, best(scores))), best(scores)

    return run


def labelled(x, y):
    labels = y[:, :1].abs().long()
    return x.softmax(-1).gather(1, labels).log(), x.log_softmax(-1).gather(1, labels)


READ = "scores are also read by"
LIMIT = "it does not mask all but the best groups"
NONE = "1 softmax or sigmoid, none that experts are chosen and weighted by"
UNWEIGHED = "no weights are gathered by these ids"
NEITHER = "what is neither softmax nor sigmoid"
LOOK_ALIKES = {  # name: (run, reason)
    "scores returned": (read_by(lambda s: s), f"{READ} output"),
    "means of experts": (read_by(lambda s: s.view(2, 9, 8).mean(2)), f"{READ} view"),
    "means of sequences": (read_by(lambda s: s.view(2, 9, 8).mean(0)), f"{READ} view"),
    "means of pairs": (read_by(lambda s: s.view(-1, 2).mean(0)), f"{READ} view"),
    "shares of some tokens": (read_by(lambda s: (s[:8] / s[:8].sum(-1)).mean(0)), f"{READ} slice"),
    "entropy above a floor": (read_by(lambda s: (s * s.clamp_min(0.01).log()).sum(-1).mean()), READ),
    "entropy of pairs": (read_by(lambda s: ((p := s.view(-1, 2)) * p.log()).sum(-1).mean()), READ),
    "unequal sequences": (read_by(*(lambda s, n=n: s.view(n, -1, 8).mean(1) for n in (2, 3))), READ),
    "shares of pairs": (
        read_by(lambda s: ((p := s.view(-1, 2)) / total(p)).view_as(s).mean(0), of=sigmoid),
        READ,
    ),
    "shares of columns": (
        lambda x, y: read_by(lambda s: (s / s.sum(-1)).mean(0), of=sigmoid)(x[:8], y),
        READ,
    ),
    "scores that do not add up to 1": (read_by(lambda s: s.mean(0), of=sigmoid), f"{READ} mean"),
    "another table": (
        own_weights(lambda x, y, s, ids: y.gather(1, ids) + s.gather(1, ids.flip(1)) + s.gather(1, ids)),
        f"{READ} gather",
    ),
    "relative scores as they are": (by_relative_scores(lambda w: w), UNWEIGHED),
    "relative scores of others": (by_relative_scores(softmax, lambda x, y: y), UNWEIGHED),
    "weights of others": (own_weights(lambda x, y, s, ids: s.gather(1, ids.flip(1))), UNWEIGHED),
    "weights of tokens": (own_weights(lambda x, y, s, ids: s.gather(0, ids)), UNWEIGHED),
    "ids below 1 recorded": (
        own_weights(lambda x, y, s, ids: s.gather(1, torch.where((of := best(y)) < 1, ids, of))),
        UNWEIGHED,
    ),
    "no gradient": (own_weights(lambda x, y, s, ids: s.detach().gather(1, ids) * x.sum()), UNWEIGHED),
    "weights with a bias": (lambda x, y: (softmax(x) + torch.ones(8)).topk(2, dim=-1), UNWEIGHED),
    "bf16": (lambda x, y: x.bfloat16().softmax(-1).topk(2, dim=-1), "is torch.bfloat16, not torch.float32"),
    "other scores": (lambda x, y: weighed(s := F.softplus(x).sqrt(), s), f"experts are chosen by {NEITHER}"),
    "logits with a bias": (
        lambda x, y: ((t := weighed(x, x + torch.arange(8.0)))[0].softmax(-1), t[1]),
        f"bias or groups act on {NEITHER}",
    ),
    "zero outside, with a bias": (
        limited(best_groups, bias=-1.0, fill=0.0),
        "scores outside the best groups become 0.0, not -inf",
    ),
    "groups of every fourth": (limited(best_groups, axis=1), LIMIT),
    "no group left out": (of_maxima(base=1.0), LIMIT),
    "a threshold": (limited(lambda groups, y: groups.amax(-1) > 0.6), LIMIT),
    "an input": (limited(lambda groups, y: y > 0), LIMIT),
    "the worst groups": (of_maxima(largest=False), LIMIT),
    "groups by their mean": (limited(lambda groups, y: mask_of(groups.mean(-1))), LIMIT),
    "groups by another sum": (limited(lambda groups, y: mask_of(groups.view(-1, 2, 4).sum(1))), LIMIT),
    "tokens for each group": (of_maxima(axis=0), LIMIT),
    "zeros written": (of_maxima(one=0.0), LIMIT),
    "groups beside others": (limited(lambda groups, y: mask_of(groups.amax(-1), base=y)), LIMIT),
    "second and third": (ranked(lambda s: ordered(s)[:, 1:3]), NONE),
    "smallest": (ranked(lambda s: ordered(s, descending=False)[:, :2]), NONE),
    "smallest by topk": (ranked(lambda s: best(s, largest=False)), NONE),
    "tokens of an expert": (ranked(lambda s: ordered(s, dim=0)[:, :2] % 8), NONE),
    "first tokens of a ranking": (ranked(lambda s: ordered(s)[:2]), NONE),
    "scores over tokens": (ranked(best, axis=0), NONE),
    "labels": (labelled, NONE),
    "ids of some tokens": (with_ids_of_another(lambda x, ids: x.sigmoid().gather(1, ids[:2])), NONE),
    "constant ids of some tokens": (lambda x, y: softmax(x).gather(1, torch.arange(4).view(2, 2)), NONE),
    "constant ids of tokens": (lambda x, y: softmax(x[:2]).gather(0, torch.arange(4).view(2, 2) % 2), NONE),
    "nothing chosen": (lambda x, y: softmax(x) * x[:, :1].sigmoid(), NONE.replace("1", "2")),
}


@pytest.mark.parametrize(("run", "reason"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alikes_stay_with_a_reason(run, reason):
    assert_left(traced(run, *logits()), reason, fuse_router)
