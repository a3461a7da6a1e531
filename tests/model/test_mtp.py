"""Multi-token prediction: shift, masking, loss weight and where the gradients go."""

import dataclasses

import pytest
import torch

from graphmoe.config.schema import AuxLoss
from graphmoe.model.blocks import IGNORED
from graphmoe.model.build import build_model
from graphmoe.plan.pipeline.layouts import pieces_of
from tests.model.models import MLA, B, S, make_batch
from tests.tolerances import assert_forward_close, assert_gradient_close

CONFIG = dataclasses.replace(
    MLA, num_layers=2, num_experts=4, aux_loss=AuxLoss.none, mtp_depth=2, mtp_loss_weight=0.4
)


def mean_cross_entropy(model, h, targets):
    """Mean of -log p(target) over the targets that are not ignored, in fp64."""
    log_p = (h.double() @ model.loss_head.head.weight.double().T).log_softmax(-1)
    kept = targets != IGNORED
    return -log_p[kept].gather(-1, targets[kept].unsqueeze(-1)).mean()


def written_out_mtp_loss(model, tokens, labels):
    """Depth k sees position i, token i + k, and predicts token i + k + 1; short sequences, no padding."""
    h, losses = model.loss_head.norm(model.hidden(tokens)), []
    rope = model.rope(S, tokens.device)
    for k, layer in enumerate(model.mtp, start=1):
        length = S - k
        embedded = model.embed(tokens[:, k:])
        h = layer.norm(layer(h[:, :length], embedded, *(t[:length] for t in rope)).x_BSD)
        losses.append(mean_cross_entropy(model, h, labels[:, k:]))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_loss_and_its_gradients_match_the_written_out_one(depth):
    model = build_model(dataclasses.replace(CONFIG, mtp_depth=depth))
    tokens, labels = make_batch()
    output, parameters = model.loss(tokens, labels), tuple(model.parameters())
    main = mean_cross_entropy(model, model.loss_head.norm(model.hidden(tokens)), labels)
    mtp = written_out_mtp_loss(model, tokens, labels)
    assert_forward_close(output.cross_entropy, main)
    assert_forward_close(output.mtp, mtp)
    assert_forward_close(output.total, main + 0.4 * mtp)
    wanted = torch.autograd.grad(main + 0.4 * mtp, parameters)
    for actual, expected in zip(torch.autograd.grad(output.total, parameters), wanted, strict=True):
        assert_gradient_close(actual, expected)


@pytest.mark.parametrize("rank_of", [(0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 0, 0)])
def test_stages_of_ranks_with_prediction_and_loss_apart_are_the_whole_model(rank_of):
    whole, (tokens, labels) = build_model(CONFIG), make_batch()
    stages = pieces_of("Ett|m|m|L", num_layers=2, mtp_depth=2, num_stages=4)
    ranks = {
        rank: build_model(CONFIG, stages=[stages[number] for number in range(4) if rank_of[number] == rank])
        for rank in rank_of
    }
    carried, outputs = (), []
    for rank, stage in zip(rank_of, stages, strict=True):
        outputs.append(ranks[rank].stage(stage, carried, tokens, labels))
        carried = outputs[-1].carried
    found, expected = sum(output.total for output in outputs), whole.loss(tokens, labels)
    assert_forward_close(found, expected.total)
    assert_forward_close(outputs[-1].mtp, expected.mtp)
    found.backward()
    expected.total.backward()
    for name, parameter in whole.named_parameters():
        parts = [dict(model.named_parameters()).get(name) for model in ranks.values()]
        assert_gradient_close(sum(part.grad for part in parts if part is not None), parameter.grad)


def test_statistics_and_counts_of_mtp_layers_come_last():
    model = build_model(CONFIG)
    output = model.loss(*make_batch())
    assert output.stats_L3.shape == (3, 3) and output.counts_LE.shape == (3, 4)
    assert output.counts_LE.sum(dim=1).tolist() == [B * S * 2] * 3
    names = {module: name for name, module in model.named_modules()}
    order = [names[router] for router in model.routers()]
    assert order == ["layers.1.moe_router", "mtp.0.layer.moe_router", "mtp.1.layer.moe_router"]


def test_a_depth_projects_the_normed_embedding_first_then_the_normed_state():
    layer = build_model(CONFIG).mtp[0]
    h, embedded = torch.randn(2, B, S, 32, generator=torch.Generator().manual_seed(0))
    half = layer.proj.weight.double().chunk(2, dim=1)
    rope = build_model(CONFIG).rope(S, torch.device("cpu"))
    normed = [x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() for x in (embedded, h)]
    joined = normed[0] @ half[0].T + normed[1] @ half[1].T
    expected = layer.layer(joined.float(), *rope).x_BSD
    assert_forward_close(layer(h, embedded, *rope).x_BSD, expected)
