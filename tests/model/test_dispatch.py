"""The plan by which tokens go to ranks, and experts of tokens that came from ranks."""

import pytest
import torch

from graphmoe.config.schema import ModelConfig, MoEConfig
from graphmoe.model.layer import MoELayer
from graphmoe.model.moe import Experts
from graphmoe.ops.dispatch import send_plan
from graphmoe.plan.layout import Layout
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh
from tests.ops.row_cases import fresh_memory_is_nan
from tests.tolerances import assert_forward_close, assert_gradient_close

T, D, INNER, NUM_EXPERTS, K = 11, 6, 5, 12, 4
CONFIG = ModelConfig(hidden_size=D, expert_ffn_size=INNER, num_experts=NUM_EXPERTS, top_k=K)


def route(seed=0):
    likelihood = torch.tensor([9.0, 5, 1, 1, 0, 0, 1, 1, 1, 1, 8, 8]).expand(T, -1)
    return torch.multinomial(likelihood, K, generator=torch.Generator().manual_seed(seed)).int()


@pytest.mark.parametrize("ep, etp", [(1, 1), (2, 1), (4, 1), (12, 1), (2, 3), (1, 2)])
def test_rows_go_to_each_rank_of_each_block_once_in_the_order_of_tokens(ep, etp):
    experts = route()
    plan = send_plan(experts, NUM_EXPERTS, ep, etp)
    expected = []
    for rank in range(ep * etp):
        block = rank // etp
        expected.append([t for t in range(T) if block in (experts[t] // (NUM_EXPERTS // ep)).tolist()])
    assert plan.send_counts_P.tolist() == [len(tokens) for tokens in expected]
    live = int(plan.send_ends_P[-1])
    assert live == sum(map(len, expected))
    assert (plan.send_slot_R[:live] // (K * etp)).tolist() == sum(expected, [])
    rows = sorted(plan.send_row_TW[plan.send_row_TW >= 0].tolist())
    assert rows == list(range(live))
    assert {tensor.dtype for tensor in plan} == {torch.int32}


def make_experts(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    module = Experts(CONFIG, Layout(dp=3, ep=3)).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    return module, generator


def run_both(module, h, weight, numbers):
    """Outputs and gradients in separate steps and by one operation."""
    for run in (module.received, lambda *tensors: module.received_fused("torch", (), *tensors)):
        inputs = (h.detach().requires_grad_(), weight.detach().requires_grad_())
        with fresh_memory_is_nan():
            out = run(*inputs, numbers)
            yield out, *torch.autograd.grad(out.sin().sum(), (*inputs, *module.parameters()))


def test_slots_of_experts_elsewhere_add_nothing_and_have_no_gradient():
    module, generator = make_experts()
    h = torch.randn(T, D, generator=generator)
    weight = torch.rand(T, K, generator=generator)
    numbers = route() - 4  # this rank holds 4 to 7
    elsewhere = (numbers < 0) | (numbers > 3)
    numbers = numbers.masked_fill(elsewhere, -1)
    assert elsewhere.all(dim=1).any() and not elsewhere.all()
    expected = torch.zeros(T, D, dtype=torch.double)
    for t, k in (~elsewhere).nonzero().tolist():
        gate_up, down = (p.detach()[numbers[t, k]].double() for p in module.parameters())
        gate, up = (gate_up @ h[t].double()).chunk(2)
        expected[t] += weight[t, k] * (down @ (gate * gate.sigmoid() * up))
    plain, fused = run_both(module, h, weight, numbers)
    assert_forward_close(plain[0], expected)
    assert not plain[2][elsewhere].any() and plain[2][~elsewhere].all()
    for one, other in zip(plain, fused, strict=True):
        assert_gradient_close(other, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rank_that_receives_nothing_has_zero_gradients(dtype):
    module, _ = make_experts(dtype)
    numbers = torch.empty(0, K, dtype=torch.int32)
    for out, *gradients in run_both(module, torch.empty(0, D, dtype=dtype), torch.empty(0, K), numbers):
        assert out.shape == (0, D)
        assert [list(g.shape) for g in gradients] == [[0, D], [0, K], [4, 10, D], [4, D, 5]]
        assert not any(gradient.any() for gradient in gradients)


def test_one_rank_that_dispatches_to_itself_computes_what_one_without_a_dispatcher_does():
    config = ModelConfig(num_experts=NUM_EXPERTS, top_k=K, hidden_size=32, num_heads=2, expert_ffn_size=8)
    dispatcher = AllToAll(Mesh(Layout()), NUM_EXPERTS)
    layers = [MoELayer(config, MoEConfig(), Layout(), d) for d in (None, dispatcher)]
    with torch.no_grad():
        for parameter in layers[0].parameters():
            parameter.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    layers[1].load_state_dict(layers[0].state_dict())
    generator = torch.Generator().manual_seed(0)
    x, angle = torch.randn(2, 7, 32, generator=generator), torch.rand(7, config.qk_rope_head_dim // 2)
    alone, sent = (layer(x, angle.cos(), angle.sin()) for layer in layers)
    assert alone[4:] == sent[4:] == (None, None), (
        "slots counted apart, and a load, where the host counts rows"
    )
    for one, other in zip(alone[:4], sent[:4], strict=True):
        assert other.dtype == one.dtype
        assert_forward_close(other.float(), one.float())
    names = [[s.name + "*" * s.dynamic for s in layer.segments()] for layer in layers]
    assert [name.rstrip("*") for name in names[1]] == names[0]
    assert [name for name in names[1] if "*" in name] == ["moe_dispatch*", "moe_experts*", "moe_combine*"]
    assert {s.name for s in layers[1].segments() if s.stream == "comm"} == {"moe_dispatch", "moe_combine"}


def test_experts_of_other_ranks_need_a_dispatcher():
    with pytest.raises(AssertionError, match="experts are on other ranks"):
        MoELayer(ModelConfig(), MoEConfig(), Layout(dp=2, ep=2)).segments()
