"""The routed experts against loops over tokens in fp64."""

import pytest
import torch

from graphmoe.config.schema import ModelConfig
from graphmoe.model.moe import Experts, Preprocess
from tests.tolerances import assert_forward_close, assert_gradient_close

T, D, INNER, NUM_EXPERTS, K = 13, 7, 5, 6, 3
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ROUTINGS = ("random", "unbalanced, one expert without tokens", "all tokens on the same experts")


def route(name, generator):
    """K distinct experts of each token -> int32 [T, K]."""
    likelihood = torch.ones(T, NUM_EXPERTS)
    if name.startswith("unbalanced"):
        likelihood = torch.tensor([20.0, 5.0, 0.0, 2.0, 1.0, 1.0]).expand(T, -1)
    if name.startswith("all"):
        return torch.tensor([[4, 0, 5]], dtype=torch.int32).expand(T, -1).contiguous()
    return torch.multinomial(likelihood, K, generator=generator).int()


def make_case(routing, dtype):
    """Experts with random weights, inputs that require gradients, and the experts of each token."""
    generator = torch.Generator().manual_seed(len(routing))
    config = ModelConfig(hidden_size=D, expert_ffn_size=INNER, num_experts=NUM_EXPERTS, top_k=K)
    module = Experts(config).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    h = torch.randn(T, D, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(T, K, generator=generator)
    weights = (weights.double() if dtype == torch.float64 else weights).requires_grad_()
    return module, Preprocess(config), h, weights, route(routing, generator)


def run(module, preprocess, h, weights, experts):
    plan = preprocess(experts)
    return module(h, weights, plan.ends_E, plan.row_TK, plan.slot_R)


def per_token(h, weights, experts, w_gate_up, w_down):
    """sum_k weight * down @ (silu(gate @ h) * (up @ h)) for one token after the other."""
    outputs = []
    for token, chosen in enumerate(experts.tolist()):
        total = torch.zeros(D, dtype=h.dtype)
        for slot, expert in enumerate(chosen):
            gate, up = w_gate_up[expert][:INNER] @ h[token], w_gate_up[expert][INNER:] @ h[token]
            act = gate / (1 + (-gate).exp()) * up
            total = total + weights[token, slot] * (w_down[expert] @ act)
        outputs.append(total)
    return torch.stack(outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_values_and_all_gradients_match_a_loop_over_tokens(routing, dtype):
    module, preprocess, h, weights, experts = make_case(routing, dtype)
    inputs = (h, weights, module.w_gate_up, module.w_down)
    out = run(module, preprocess, h, weights, experts)
    assert out.dtype == dtype and out.shape == (T, D)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = per_token(*exact[:2], experts, *exact[2:])
    incoming = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(out, inputs, incoming)
    wanted = torch.autograd.grad(expected, exact, incoming.double())
    # bf16 rounds the two inner activations too, which the table's rows for one product leave out.
    if dtype == torch.bfloat16:
        assert (out.double() - expected).norm() < 1e-2 * expected.norm()
        assert all((a.double() - b).norm() < 2e-2 * b.norm() for a, b in zip(gradients, wanted, strict=True))
        return
    assert_forward_close(out, expected)
    for actual, exact_gradient in zip(gradients, wanted, strict=True):
        assert_gradient_close(actual, exact_gradient)


@torch.no_grad()
def test_a_routing_weight_is_not_rounded_to_bf16():
    module, preprocess, h, weights, experts = make_case("random", torch.bfloat16)
    generator, more, one = torch.Generator().manual_seed(2), [], []
    for _ in range(100):  # the outputs are rounded to bf16: the mean of many shows the weight behind
        h = torch.randn(h.shape, generator=generator).bfloat16()
        one.append(run(module, preprocess, h, torch.ones_like(weights), experts).double())
        more.append(run(module, preprocess, h, torch.full_like(weights, 1.003), experts).double())
    one, more = torch.cat(one), torch.cat(more)
    assert float((one * more).sum() / one.square().sum()) == pytest.approx(1.003, abs=3e-4)  # 1.0 in bf16
