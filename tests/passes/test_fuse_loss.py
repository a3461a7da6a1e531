"""fuse_loss: the model's loss segment and that of transformers; what it leaves, and the numbers."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear, nll_loss

from graphmoe.config.schema import ModelConfig
from graphmoe.model.transformer import LossHead
from graphmoe.ops.collectives import all_reduce
from graphmoe.passes.fuse_loss import fuse_loss
from graphmoe.plan.layout import Layout
from tests.passes.blocks import DTYPES, D, Traced, assert_left, random, traced

B, S, V = 2, 9, 20
IGNORED = -100
HEAD = {"mm", "t", "_log_softmax", "nll_loss_forward", "_unsafe_view"}
MODEL = ModelConfig(hidden_size=D, vocab_size=V)


def labels(ignored: str = "some") -> torch.Tensor:
    values = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(4))
    if ignored == "some":
        values[0, 2:5] = IGNORED
    return values if ignored != "all" else torch.full_like(values, IGNORED)


def head(dtype=torch.float32):
    return (random(V, D, seed=1, dtype=dtype).detach() / D**0.5).requires_grad_()


class Loss(LossHead):
    def forward(self, x_BSD, labels_BS):
        return self.cross_entropy(self.norm(x_BSD), labels_BS)


def fused(plain: Traced, losses: int = 1) -> Traced:
    fused, (result,) = plain.rewritten(fuse_loss)
    assert result[:2] == (losses, ()) and fused.calls["linear_cross_entropy"] == losses
    assert not HEAD & set(fused.calls) and plain.calls["nll_loss_forward"] == losses
    return fused


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_segment_of_the_model_matches(dtype):
    plain = traced(Loss(MODEL).to(dtype), random(B, S, D, dtype=dtype), labels())
    fused(plain).assert_same(plain, *([*plain.inputs[:-1], labels(ignored)] for ignored in ("none", "all")))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_items", [None, 7])
def test_the_loss_of_causal_models_of_transformers_matches(dtype, num_items):
    from transformers.loss.loss_utils import ForCausalLMLoss

    def run(h_BSD, w_VD, labels_BS):
        return ForCausalLMLoss(linear(h_BSD, w_VD), labels_BS, V, num_items)

    plain = traced(run, random(B, S, D, dtype=dtype), head(dtype), labels())
    fused(plain).assert_same(plain, [*plain.inputs[:-1], labels("none")])


def sequences(h, w, y):
    log_probs = linear(h.view(B, S, D), w).float().log_softmax(-1)
    return nll_loss(log_probs.flatten(0, 1), y, reduction="sum")


def with_count(h, w, y):
    return torch.ops.aten.nll_loss_forward(linear(h, w).log_softmax(-1), y, None, 1, IGNORED)


def two_uses_of_a_head(h, w, y):
    return loss(h, w, y) + 0.3 * loss(h * 2, w, y, reduction="sum")


@pytest.mark.parametrize(("run", "losses"), [(sequences, 1), (with_count, 1), (two_uses_of_a_head, 2)])
def test_other_spellings_match(run, losses):
    plain = traced(run, random(B * S, D), head(), labels().flatten())
    fused(plain, losses).assert_same(plain)


def test_a_mean_over_no_labels_is_nan_as_before():
    plain = traced(loss, random(B * S, D), head(), labels("all").flatten())
    assert all(bool(each.graph(*each.inputs)[0].isnan()) for each in (plain, fused(plain)))


def loss(h, w, y, **named):
    return cross_entropy(linear(h, w).float(), y, **named)


def with_z_loss(h, w, y):
    x = linear(h, w)
    return cross_entropy(x.float(), y) + x.logsumexp(-1).square().mean()


NO_SOFTMAX, READ = "is not a log_softmax over the vocabulary", "the logits are also read by"
LOOK_ALIKES = {  # name: (run, reason)
    "no log_softmax": (lambda h, w, y: nll_loss(linear(h, w), y), NO_SOFTMAX),
    "over tokens": (lambda h, w, y: nll_loss(linear(h, w).log_softmax(0), y), NO_SOFTMAX),
    "a smaller vocabulary": (
        lambda h, w, y: cross_entropy(linear(h, w).view(-1, V // 2), y.repeat(2)),
        "[18, 20] logits become [36, 10], [36, 10]",
    ),
    "a smaller one behind the softmax": (
        lambda h, w, y: nll_loss(linear(h, w).log_softmax(-1).view(-1, V // 2), y.repeat(2)),
        "[18, 20] logits become [18, 20], [36, 10]",
    ),
    "logits returned": (lambda h, w, y: (cross_entropy(logits := linear(h, w), y), logits), READ),
    "a z-loss": (with_z_loss, f"{READ} logsumexp"),
    "a bias": (lambda h, w, y: cross_entropy(linear(h, w, w[:, 0]).float(), y), "the head has a bias"),
    "capped": (lambda h, w, y: cross_entropy(30 * torch.tanh(linear(h, w) / 30), y), "not by a head"),
    "bf16": (
        lambda h, w, y: cross_entropy(linear(h.bfloat16(), w.bfloat16()), y),
        "the loss is computed in torch.bfloat16",
    ),
    "stored otherwise": (lambda h, w, y: cross_entropy(h @ w.view(D, V), y), "is stored as [D, V]"),
    "weighted classes": (lambda h, w, y: loss(h, w, y, weight=w[:, 0]), "classes are weighted"),
    "not reduced": (lambda h, w, y: loss(h, w, y, reduction="none"), "losses are not reduced"),
    "smoothed": (lambda h, w, y: loss(h, w, y, label_smoothing=0.1), READ),
    "no loss": (
        lambda h, w, y: (linear(h, w).log_softmax(-1), y),
        "1 log_softmax, and no nll_loss behind one",
    ),
}


@pytest.mark.parametrize(("run", "reason"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alikes_stay_with_a_reason(run, reason):
    assert_left(traced(run, random(B * S, D), head().detach(), labels().flatten()), reason, fuse_loss)


@pytest.mark.parametrize("factors", [(0.9, 1), (1, 0.9)], ids=["smoothed", "scaled"])
def test_look_alikes_of_ranks_that_share_the_vocabulary_stay(factors):
    share, scale = factors

    def run(h_TD, w_VD, y_T):
        logits_TV = linear(h_TD, w_VD)
        shifted_TV = logits_TV - all_reduce(logits_TV.detach().amax(-1), "tp", 2, "max").unsqueeze(1)
        own_T = (scale * shifted_TV).gather(1, y_T.remainder(V).unsqueeze(1)).squeeze(1)
        sums_T = torch.stack([shifted_TV.exp().sum(-1), own_T.masked_fill(y_T >= V, 0.0)])
        sums_T = all_reduce(sums_T, "tp", 2)
        return (sums_T[0].log() - share * sums_T[1]).masked_fill(y_T == IGNORED, 0.0).sum()

    plain = traced(run, random(B * S, D), head(), labels().flatten())
    assert_left(plain, "is not reduced for the loss of the label's logit", fuse_loss)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loss_of_ranks_that_share_the_vocabulary_matches(dtype):
    plain = traced(Loss(MODEL, Layout(tp=2)).to(dtype), random(B, S, D, dtype=dtype), labels().repeat(1, 2))
    fused, (result,) = plain.rewritten(fuse_loss)
    assert result[:2] == (1, ()) and fused.calls["linear_cross_entropy"] == 1
    assert not {"mm", "all_reduce", "exp", "index_along"} & {*fused.calls} and fused.calls["all_gather"] == 1
