"""fuse_loss: the model's loss segment and that of transformers; what it leaves, and the numbers."""

import functools

import pytest
import torch
import torch.nn.functional as F

from graphmoe.config.schema import ModelConfig
from graphmoe.model.transformer import LossHead
from graphmoe.passes.fuse_loss import fuse_loss
from graphmoe.plan.layout import Layout
from tests.passes.blocks import (
    DTYPES,
    D,
    Traced,
    assert_left,
    assert_same_numbers,
    operations,
    random,
    rewritten,
    traced,
)

B, S, V = 2, 9, 20
IGNORED = -100
HEAD = {"mm", "t", "_log_softmax", "nll_loss_forward", "_unsafe_view"}


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


def assert_fused(plain: Traced, losses: int = 1) -> Traced:
    fused, (result,) = rewritten(plain, fuse_loss)
    assert result[:2] == (losses, ()) and operations(fused)["linear_cross_entropy"] == losses
    assert not HEAD & set(operations(fused)) and operations(plain)["nll_loss_forward"] == losses
    return fused


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_segment_of_the_model_matches(dtype):
    module = Loss(ModelConfig(hidden_size=D, vocab_size=V)).to(dtype)
    plain = traced(module, random(B, S, D, dtype=dtype), labels())
    others = ([*plain.inputs[:-1], labels(ignored)] for ignored in ("none", "all"))
    assert_same_numbers(assert_fused(plain), plain, *others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_items", [None, 7])
def test_the_loss_of_causal_models_of_transformers_matches(dtype, num_items):
    from transformers.loss.loss_utils import ForCausalLMLoss

    def run(h_BSD, w_VD, labels_BS):
        return ForCausalLMLoss(F.linear(h_BSD, w_VD), labels_BS, V, num_items)

    plain = traced(run, random(B, S, D, dtype=dtype), head(dtype), labels())
    assert_same_numbers(assert_fused(plain), plain, [*plain.inputs[:-1], labels("none")])


SPELLINGS = {  # name: (run, losses)
    "sequences": (
        lambda h, w, target: F.nll_loss(
            F.linear(h.view(B, S, D), w).float().log_softmax(-1).flatten(0, 1), target, reduction="sum"
        ),
        1,
    ),
    "with the number of labels": (
        lambda h, w, target: torch.ops.aten.nll_loss_forward(
            F.linear(h, w).log_softmax(-1), target, None, 1, IGNORED
        ),
        1,
    ),
    "two uses of a head": (
        lambda h, w, target: (
            cross_entropy(h, w, target) + 0.3 * cross_entropy(h * 2, w, target, reduction="sum")
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_match(name):
    run, losses = SPELLINGS[name]
    plain = traced(run, random(B * S, D), head(), labels().flatten())
    assert_same_numbers(assert_fused(plain, losses), plain)


def test_a_mean_over_no_labels_is_nan_as_before():
    plain = traced(cross_entropy, random(B * S, D), head(), labels("all").flatten())
    fused = assert_fused(plain)
    assert bool(plain.graph(*plain.inputs)[0].isnan()) and bool(fused.graph(*fused.inputs)[0].isnan())


def cross_entropy(h, w, target, **named):
    return F.cross_entropy(F.linear(h, w).float(), target, **named)


LOOK_ALIKES = {  # name: (run, reason)
    "no log_softmax": (
        lambda h, w, target: F.nll_loss(F.linear(h, w), target),
        "is not a log_softmax over the vocabulary",
    ),
    "over tokens": (
        lambda h, w, target: F.nll_loss(F.linear(h, w).log_softmax(0), target),
        "is not a log_softmax over the vocabulary",
    ),
    "a smaller vocabulary": (
        lambda h, w, target: F.cross_entropy(F.linear(h, w).view(-1, V // 2), target.repeat(2)),
        "[18, 20] logits become [36, 10], [36, 10]",
    ),
    "a smaller one behind the softmax": (
        lambda h, w, target: F.nll_loss(F.linear(h, w).log_softmax(-1).view(-1, V // 2), target.repeat(2)),
        "[18, 20] logits become [18, 20], [36, 10]",
    ),
    "logits returned": (
        lambda h, w, target: (F.cross_entropy(logits := F.linear(h, w), target), logits),
        "the logits are also read by",
    ),
    "a z-loss": (
        lambda h, w, target: (
            F.cross_entropy((x := F.linear(h, w)).float(), target) + x.logsumexp(-1).square().mean()
        ),
        "the logits are also read by logsumexp",
    ),
    "a bias": (
        lambda h, w, target: F.cross_entropy(F.linear(h, w, w[:, 0]).float(), target),
        "the head has a bias",
    ),
    "capped": (
        lambda h, w, target: F.cross_entropy(30 * torch.tanh(F.linear(h, w) / 30), target),
        "not by a head",
    ),
    "bf16": (
        lambda h, w, target: F.cross_entropy(F.linear(h.bfloat16(), w.bfloat16()), target),
        "the loss is computed in torch.bfloat16",
    ),
    "stored otherwise": (
        lambda h, w, target: F.cross_entropy(h @ w.view(D, V), target),
        "is stored as [D, V]",
    ),
    "weighted classes": (
        lambda h, w, target: cross_entropy(h, w, target, weight=w[:, 0]),
        "classes are weighted",
    ),
    "not reduced": (functools.partial(cross_entropy, reduction="none"), "losses are not reduced"),
    "smoothed": (functools.partial(cross_entropy, label_smoothing=0.1), "the logits are also read by"),
    "no loss": (
        lambda h, w, target: (F.linear(h, w).log_softmax(-1), target),
        "1 log_softmax, and no nll_loss behind one",
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_stay_with_a_reason(name):
    run, reason = LOOK_ALIKES[name]
    assert_left(traced(run, random(B * S, D), head().detach(), labels().flatten()), reason, fuse_loss)


def test_a_loss_of_ranks_that_share_the_vocabulary_is_known():
    module = Loss(ModelConfig(hidden_size=D, vocab_size=V), Layout(tp=2))
    plain = traced(module, random(B, S, D), labels().repeat(1, 2))
    assert_left(plain, "ranks share the vocabulary", fuse_loss)
    assert not rewritten(plain, fuse_loss)[1][0].expected
