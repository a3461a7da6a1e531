"""The tables of number formats: a row in each is all that a format needs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from graphmoe.config.formats import FORMATS, Fp8Recipe
from graphmoe.ops import fp8_mlp  # noqa: F401  # registers the operations
from graphmoe.ops.formats import KERNELS
from graphmoe.ops.fp8 import Stored
from tests.ops.test_fp8_mlp import layer

ops = torch.ops.graphmoe


def coarser(stored: Stored) -> Stored:
    """Clear the last mantissa bit."""
    return (stored[0].view(torch.uint8) & 0xFE).view(stored[0].dtype), stored[1]


@pytest.fixture
def toy(monkeypatch):
    steps = (by := KERNELS["rowwise"]).experts(False)

    def product(x: Stored, *rest: Any, **words: Any) -> None:
        steps.product(coarser(x), *rest, **words)

    own = {name: lambda *x, of=of: coarser(of(*x)) for name, of in zip(by._fields[:3], by[:3], strict=True)}
    own["experts"] = lambda on_gpu: steps._replace(product=product)
    monkeypatch.setitem(FORMATS, "toy", FORMATS["rowwise"]._replace(rates="unknown"))
    monkeypatch.setitem(KERNELS, "toy", by._replace(**own))
    return "toy"


def test_each_format_has_facts_and_kernels():
    assert ["none", "auto", *FORMATS] == [*Fp8Recipe] and [*KERNELS] == [*FORMATS]
    assert all(bool(FORMATS[name].why_no_experts) == (KERNELS[name].experts is None) for name in FORMATS)


def test_a_format_from_outside_trains_dense_products_and_experts(toy):
    (x, up, down, weight_TK), plan, _ = layer((48, 2, 5, 64, 32), torch.float32)
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    w, up, down = w / 8, up / 8, down / 8
    goal = ops.grouped_mlp(x @ w.T, up, down, weight_TK, *plan, "torch")[0]
    noise = torch.Generator().manual_seed(2)
    trained = [each + 0.1 * torch.randn(each.shape, generator=noise) for each in (w, up, down)]

    def results(recipe: str) -> list[Tensor]:
        first, *experts = (each.requires_grad_() for each in trained)
        y = ops.fp8_mlp(ops.fp8_linear(x, first, "fp8", recipe), *experts, weight_TK, *plan, recipe)
        loss = (y - goal).square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, trained)]

    for coarse, fine in zip(results(toy)[1:], results("rowwise")[1:], strict=True):
        assert 0.8 < torch.cosine_similarity(coarse.flatten(), fine.flatten(), dim=0) < 0.9999
    adam, losses = torch.optim.Adam(trained, 0.02), []
    for _ in range(20):
        loss, *gradients = results(toy)
        losses.append(loss.item())
        for each, gradient in zip(trained, gradients, strict=True):
            each.grad = gradient
        adam.step()
    assert losses[-1] < losses[0] / 2
