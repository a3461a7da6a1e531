"""The moe_router segment: norm, gate, choice, weights and losses put together."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from graphmoe.config.schema import AuxLoss, GroupScore, ModelConfig, MoEConfig, ScoreFunction
from graphmoe.model.moe_segments import Router
from graphmoe.plan.forced_loads import ends, load
from tests.model.models import filled
from tests.ops.test_router import Case, choice_of, written_out
from tests.tolerances import assert_forward_close, assert_gradient_close

B, S, D = 2, 9, 12
OPTIONS = [
    options
    for options in itertools.product(ScoreFunction, *[(False, True)] * 3, (1, 4), GroupScore)
    if not (options[0] is ScoreFunction.sigmoid and options[1])  # softmax_after_topk is for softmax scores
]


def make_router(*, force_balance=False, expert_load="none", seed=0, dtype=torch.float32, **changes):
    """A router with random weights and, where it has them, a random selection bias and a load."""
    config = ModelConfig(**({"hidden_size": D, "num_experts": 16, "top_k": 4} | changes))
    execution = MoEConfig(force_balance=force_balance, expert_load=expert_load)
    router = filled(Router(config, execution).to(dtype), 0.5, seed)
    if router.load_ends is not None:
        share = load(expert_load, 1, 0, config.num_experts, config.top_k, 2)
        router.load_ends = torch.tensor(ends(share))
    if config.selection_bias:
        torch.nn.init.uniform_(router.selection_bias, -0.3, 0.3, torch.Generator().manual_seed(seed))
    return router


def make_input(seed=0, sequences=B):
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randn(sequences, S, D, generator=generator).requires_grad_()


COVERING = (0, 2, 6, 7, 12, 20, 33, 37, 40, 42, 47, 51, 53, 56, 58, 62)
"""Options with each pair of values, and with each of losses and dtypes that tests of passes give them."""


def settings_of(function, after, renormalise, bias, groups, group_score):
    return {
        "score_function": function, "softmax_after_topk": after, "renormalise": renormalise,
        "num_groups": groups, "topk_groups": min(groups, 2), "group_score": group_score,
        "selection_bias": bias, "routed_scale": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_combination_of_options_matches_fp64(options):
    function, after, renormalise, bias, groups, group_score = options
    router = make_router(**settings_of(*options), aux_loss_coef=0.25, z_loss_coef=0.125)
    x = make_input()
    h, weights, experts, loss, stats = router(x)
    summed = {GroupScore.max: 1, GroupScore.top2_sum: 2, GroupScore.topk_sum: 4 // min(groups, 2)}
    limit = (groups, min(groups, 2), summed[group_score])
    case = Case(B, S, 16, 4, function.value, limit, renormalise, after, 1.5)
    exact_x, norm, gate = (t.detach().double() for t in (x, router.norm.weight, router.gate.weight))
    scale = (exact_x.square().mean(-1, keepdim=True) + router.config.norm_eps).rsqrt()
    expected_h = (exact_x * scale * norm).flatten(0, 1)
    logits = expected_h @ gate.T
    assert torch.equal(experts, choice_of(case, logits, router.selection_bias))
    expected_weights, share_sum_BE, z_sum, entropy_sum = written_out(case, logits, experts)
    # DeepSeek-V3, equation 18: the best scores count, without bias and groups.
    counted = choice_of(case, logits, groups=(1, 1, 1)) if bias else experts
    load_BE = torch.stack([torch.bincount(slots.flatten(), minlength=16) for slots in counted.split(S)])
    balance = 16 * (load_BE / (4 * S) * share_sum_BE / S).sum(1).mean()
    expected_stats = torch.stack([balance, z_sum / (B * S), entropy_sum / (B * S)])
    assert {weights.dtype, loss.dtype, stats.dtype} == {torch.float32} and experts.dtype == torch.int32
    assert_forward_close(h, expected_h)
    assert_forward_close(weights, expected_weights)
    assert_forward_close(stats, expected_stats)
    assert_forward_close(loss, 0.25 * expected_stats[0] + 0.125 * expected_stats[1])
    assert not stats.requires_grad


def test_forced_balance_is_exact_and_its_gradients_still_reach_the_gate():
    router = make_router(force_balance=True, num_experts=12, top_k=4)
    x = make_input()
    h, weights, experts, _, stats = router(x)
    assert torch.bincount(experts.flatten(), minlength=12).tolist() == [B * S * 4 // 12] * 12
    scores = F.linear(h, router.gate.weight).softmax(-1)
    assert torch.equal(weights, scores.gather(1, experts.long()))
    assert stats[0].item() == pytest.approx(1.0, abs=0.2)
    weights.square().sum().backward()
    assert all(bool(t.grad.any()) for t in (x, router.gate.weight, router.norm.weight))
    assert bool((router.gate.weight.grad != 0).any(dim=1).all())  # every expert's row


def test_a_forced_load_counts_in_the_balance_loss_whatever_bias_and_groups_choose():
    limits = {"selection_bias": True, "num_groups": 4, "topk_groups": 2}
    router = make_router(expert_load="idle_rank", aux_loss=AuxLoss.micro_batch, **limits)
    h, weights, experts, _, stats, *_ = router(make_input())
    counts = torch.bincount(experts.flatten(), minlength=16)
    assert counts[:8].tolist() == [0] * 8 and counts[8:].sub(B * S // 2).abs().max() <= 1
    scores = F.linear(h, router.gate.weight).softmax(-1)
    assert torch.equal(weights, scores.gather(1, experts.long()))
    assert_forward_close(stats[0], 16 * (counts / (B * S * 4) * scores.mean(0)).sum().double())


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kind", [AuxLoss.sequence, AuxLoss.micro_batch, AuxLoss.global_batch])
@pytest.mark.parametrize("function", ScoreFunction)
def test_the_balance_loss_counts_the_best_scores_whatever_the_bias_chooses(function, kind, groups):
    router = make_router(
        score_function=function, selection_bias=True, aux_loss=kind, aux_loss_coef=1.0,
        num_groups=groups, topk_groups=min(groups, 2),
    )  # fmt: skip
    with torch.no_grad():
        router.selection_bias.copy_(torch.arange(16.0))
    seen, scores_before = torch.zeros(16), []
    for step in range(2):
        x = make_input(seed=step)
        h, _, experts, loss, *_ = router(x, *[seen.clone()] * router.reads_earlier)
        logits = h.double() @ router.gate.weight.double().T
        exact = logits.sigmoid() if function is ScoreFunction.sigmoid else logits.softmax(-1)
        scores_before.append(exact.detach())
        expected = equation_18(exact, torch.cat(scores_before), kind)
        assert_forward_close(loss, expected)
        gradient, wanted = (torch.autograd.grad(t, x, retain_graph=True)[0] for t in (loss, expected))
        assert_gradient_close(gradient, wanted)
        if kind is AuxLoss.global_batch:
            seen += router(x, seen.clone())[5]
            best = torch.cat(scores_before).topk(4).indices
            assert seen.tolist() == torch.bincount(best.flatten(), minlength=16).tolist()
        assert set(experts.flatten().tolist()) == {12, 13, 14, 15}


def equation_18(scores, scores_so_far, kind):
    """The balance loss of DeepSeek-V3 (equations 17 to 20, coefficient 1) in fp64, over what it says."""
    losses = []
    for part in scores.chunk(B) if kind is AuxLoss.sequence else [scores]:
        counted = scores_so_far if kind is AuxLoss.global_batch else part
        chosen = counted.topk(4).indices.flatten()
        f = torch.bincount(chosen, minlength=16) * 16 / (4 * len(counted))
        losses.append((f * (part / part.sum(1, keepdim=True)).mean(0)).sum())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("changes", [{"aux_loss": AuxLoss.none}, {"aux_loss_coef": 0.0}])
def test_without_coefficients_the_loss_is_zero_and_the_entropy_is_still_told(changes):
    *_, loss, stats = make_router(**changes)(make_input())
    assert loss.item() == 0.0 and stats[:2].tolist() == [0.0, 0.0] and stats[2].item() > 0


def test_logits_are_fp32_in_a_bf16_model():
    router = make_router(dtype=torch.bfloat16)
    x = make_input().bfloat16()
    h, weights, experts, loss, _ = router(x)
    assert (h.dtype, weights.dtype, loss.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    scores = (h.double() @ router.gate.weight.double().T).softmax(-1)
    assert_forward_close(weights, scores.gather(1, experts.long()))
