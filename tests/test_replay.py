"""Recorded routes: of the model's own choice, of random experts, of some tokens; and what is refused."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import graphmoe
from graphmoe.api import replaying
from graphmoe.config.schema import ConfigError, MoEConfig, ScoreFunction
from graphmoe.model.layer import MoELayer
from graphmoe.segments import run_segments
from tests.model.models import GQA, S, filled
from tests.test_api import SMALL, TOKENS, nll, replayed, weights_of
from tests.tolerances import assert_forward_close, assert_gradient_close

BIASED = (
    "model.selection_bias=true", "model.score_function=sigmoid", "model.num_groups=4", "model.topk_groups=2",
)  # fmt: skip
TRACED = ("compile.enabled=true", "compile.cache=false")


def random_routes(shape, num_experts, seed=0):
    """Different experts of each token; the last one has none, and the first one most tokens."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(*shape[:-1], num_experts - 1, generator=generator)
    scores[..., 0] += torch.rand(shape[:-1], generator=generator) < 0.9
    return scores.topk(shape[-1]).indices.int()


@pytest.mark.parametrize("words", [(), BIASED, (*TRACED, *BIASED)], ids=["plain", "biased", "traced"])
def test_the_own_choice_replayed_is_bitwise_the_same_step(words, as_traced):
    words = (*SMALL, "model.num_layers=3", "model.aux_loss=sequence", "model.aux_loss_coef=0.1", *words)
    with graphmoe.Trainer(*words) as trainer, graphmoe.Trainer(*words) as other:
        for _ in range(2):
            routes = trainer.routes(TOKENS)
            assert (routes.shape, routes.dtype) == ((4, 32, 2, trainer.plan.model.top_k), torch.int32)
            halves = [*zip(TOKENS.chunk(2), routes.chunk(2), strict=True)]
            assert trainer.step(halves, replayed) == other.step([*TOKENS.chunk(2)], nll)
        assert all(map(torch.equal, weights_of(trainer).values(), weights_of(other).values()))


@pytest.mark.parametrize("words", [(), TRACED], ids=["plain", "traced"])
def test_given_experts_are_counted_and_tokens_without_keep_theirs(words, as_traced):
    words = (*SMALL, "model.num_layers=3", "model.selection_bias=true", *words)
    with graphmoe.Trainer(*words) as trainer, torch.no_grad():
        own, plain = trainer.routes(TOKENS), trainer.log_probs(TOKENS)
        num_experts = trainer.plan.model.num_experts
        given = random_routes(own.shape, num_experts)
        given[:, :20] = -1
        some, filled_in = trainer.log_probs(TOKENS, given), own.clone()
        filled_in[:, 20:] = given[:, 20:]
        assert some.equal(trainer.log_probs(TOKENS, filled_in.long()))
        assert some[:, :20].equal(plain[:, :20]) and not some[:, 20:].equal(plain[:, 20:])
        with torch.enable_grad():
            trainer.step((TOKENS, given), replayed)
        for layer, router in enumerate(trainer.model.routers()):
            counts = torch.bincount(filled_in[:, :, layer].flatten(), minlength=num_experts).float()
            torch.testing.assert_close(router.selection_bias, 0.001 * (counts.mean() - counts).sign())


@pytest.mark.parametrize("function", ScoreFunction)
@pytest.mark.parametrize("renormalise", [False, True])
def test_random_experts_are_those_of_plain_torch_with_every_gradient(function, renormalise):
    config = dataclasses.replace(
        GQA, num_experts=8, top_k=3, score_function=function, renormalise=renormalise, selection_bias=False,
        routed_scale=1.5, aux_loss_coef=0.3,
    )  # fmt: skip
    layer = filled(MoELayer(config, MoEConfig())).double()
    x = torch.randn(2, S, config.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table = torch.ones(S, config.head_dim // 2), torch.zeros(S, config.head_dim // 2)
    expert_TK = random_routes((2 * S, 3), 8)
    counts = torch.bincount(expert_TK.flatten(), minlength=8)
    assert counts[7] == 0 and counts[0] > 2 * S * 0.8
    x.requires_grad_()
    found = layer(x, *table, execute=replaying(run_segments, [expert_TK]))
    attended = layer.attn(x, *table)
    h = layer.moe_router.norm(attended).flatten(0, 1)
    logits = F.linear(h.float(), layer.moe_router.gate.weight.float())
    scores = logits.sigmoid() if function is ScoreFunction.sigmoid else logits.softmax(-1)
    outputs = layer.shared_experts(h)
    for token, chosen in enumerate(expert_TK.tolist()):
        weights = scores[token, chosen] / (scores[token, chosen].sum() if renormalise else 1) * 1.5
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = (layer.moe_experts.w_gate_up[expert] @ h[token]).chunk(2)
            routed = layer.moe_experts.w_down[expert] @ (weight * F.silu(gate) * up)
            outputs = outputs.index_add(0, torch.tensor([token]), routed[None])
    expected = attended + outputs.view_as(x)
    shares = (scores / scores.sum(1, keepdim=True)).view(2, S, 8).mean(1)
    loads = torch.stack([torch.bincount(e.flatten(), minlength=8) for e in expert_TK.chunk(2)]) / (3 * S)
    balance = 8 * (loads * shares).sum(1).mean()
    assert found.counts_E.equal(counts.int())
    torch.testing.assert_close(found.x_BSD, expected, rtol=1e-6, atol=1e-6)  # scores are in fp32
    assert_forward_close(found.loss, 0.3 * balance)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    ours, theirs = (
        torch.autograd.grad((y * grad).sum() + loss, wanted, allow_unused=True)
        for y, loss in ((found.x_BSD, found.loss), (expected, 0.3 * balance))
    )
    for one, other in zip(ours, theirs, strict=True):
        assert_gradient_close(one.float(), other)


BAD = {
    "shape": (lambda routes: routes[:, 1:], r"routes are int32 \[4, 31, .*must be int32 \[4, 32, 1, 6\]"),
    "dtype": (lambda routes: routes.float(), "routes are float32 "),
    "range": (lambda routes: routes.fill_(64), r"routes\[0, 0, 0\] is \[64, 64, .*from 0 to 63"),
    "twice": (lambda routes: routes.index_fill_(3, torch.tensor([1, 2]), 0), "must be 6 different experts"),
    "some": (lambda routes: routes.index_fill_(3, torch.tensor([1]), -1), "or -1 in each place"),
    "below": (lambda routes: routes.fill_(-2), r"is \[-2, -2"),
}


def test_what_is_no_route_is_one_line():
    with graphmoe.Trainer(*SMALL, "model.num_experts=64", "model.top_k=6") as trainer:
        own = trainer.routes(TOKENS)
        for change, message in BAD.values():
            with pytest.raises(ConfigError, match=message) as caught:
                trainer.log_probs(TOKENS, change(own.clone()))
            assert "\n" not in str(caught.value)
    dense = graphmoe.Trainer(*SMALL, "model.num_dense_layers=2")
    with dense, pytest.raises(ConfigError, match="no MoE layers"):
        dense.routes(TOKENS)
