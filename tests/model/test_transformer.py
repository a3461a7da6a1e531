"""The whole model: causality, ignored labels, the parts of the loss, repeatability."""

import dataclasses

import pytest
import torch

from graphmoe.config.schema import AuxLoss
from graphmoe.model.build import build_model
from tests.model.models import CONFIGS, MLA, B, S, V, both, make_batch
from tests.tolerances import assert_forward_close


@both
def test_a_later_token_never_changes_earlier_logits(name):
    model = build_model(CONFIGS[name])
    tokens, _ = make_batch()
    logits = model(tokens)
    assert logits.shape == (B, S, V) and logits.dtype == torch.float32
    for position in range(1, S):
        changed = tokens.clone()
        changed[:, position:] = (changed[:, position:] + 7) % V
        after = model(changed)
        assert_forward_close(after[:, :position], logits[:, :position])
        assert (after[:, position:] - logits[:, position:]).abs().amax(-1).min() > 1e-2


def test_logits_and_loss_of_a_bf16_model_are_fp32_from_the_head_on():
    model = build_model(MLA, dtype=torch.bfloat16)
    tokens, labels = make_batch()
    h, weight = model.loss_head.norm(model.hidden(tokens)), model.loss_head.head.weight
    logits, loss = model(tokens), model.loss(tokens, labels)
    assert logits.dtype == loss.cross_entropy.dtype == loss.total.dtype == torch.float32
    assert_forward_close(logits, h.double() @ weight.double().T)
    log_p = (h @ weight.T).double().log_softmax(-1)
    picked = log_p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    assert_forward_close(loss.cross_entropy, -picked[labels >= 0].mean())


def test_a_batch_without_labels_has_no_loss_and_finite_gradients():
    model = build_model(dataclasses.replace(MLA, mtp_depth=1))
    tokens, labels = make_batch()
    output = model.loss(tokens, torch.full_like(labels, -100))
    output.total.backward()
    assert output.cross_entropy.item() == 0.0 and output.mtp.item() == 0.0
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_the_total_adds_the_auxiliary_losses_of_every_layer():
    config = dataclasses.replace(MLA, aux_loss_coef=0.5, z_loss_coef=0.25)
    output = build_model(config).loss(*make_batch())
    auxiliary = 0.5 * output.stats_L3[:, 0].double().sum() + 0.25 * output.stats_L3[:, 1].double().sum()
    assert output.stats_L3.shape == (2, 3) and bool((output.stats_L3 > 0).all())
    assert_forward_close(output.total, output.cross_entropy.double() + auxiliary)
    assert output.counts_LE.dtype == torch.int32 and output.counts_LE.sum(1).tolist() == [B * S * 2] * 2


def test_training_works_after_generating_in_inference_mode():
    """The rotary tables are kept: made in inference mode, they could not be saved for a backward."""
    model = build_model(MLA)
    tokens, labels = make_batch()
    with torch.inference_mode():
        model(tokens)
    model.loss(tokens, labels).total.backward()
    assert bool(model.embed.weight.grad.any())


@pytest.mark.parametrize(("name", "dtype"), [("gqa", torch.float32), ("mla", torch.bfloat16)], ids=str)
def test_two_backward_passes_on_several_threads_are_bitwise_equal(name, dtype):
    """Take a model so large that torch uses its threads, and top-8, so that an order of sums would show."""
    changes = {"hidden_size": 96, "top_k": 8, "num_experts": 12, "vocab_size": 500, "mtp_depth": 1}
    config = dataclasses.replace(CONFIGS[name], aux_loss=AuxLoss.sequence, **changes)
    model = build_model(config, dtype=dtype)
    tokens, labels = make_batch(sequences=4, length=128, vocab=500)
    runs = []
    torch.set_num_threads(4)
    for _ in range(4):
        model.zero_grad()
        output = model.loss(tokens, labels)
        output.total.backward()
        runs.append([output.total.detach(), *(p.grad for p in model.parameters())])
    for run in runs[1:]:
        assert all(torch.equal(first, again) for first, again in zip(runs[0], run, strict=True))
