"""Routed experts with biases and clamped SwiGLU, on each path, beside a loop over slots in fp64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graphmoe.config.schema import MoEConfig
from graphmoe.model.build import build_model
from graphmoe.model.moe_segments import Experts, Router
from graphmoe.ops.dispatch import plan_received
from graphmoe.ops.permute import routing_plan
from graphmoe.plan.buckets import decays, matrices_of
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout, layout_of
from tests.model.models import GQA, filled

N, K, E, EMPTY = 23, 3, 7, 4
MODEL = replace(
    GQA, hidden_size=10, expert_ffn_size=5, num_experts=E, top_k=K, expert_bias=True, swiglu_limit=0.6,
    router_bias=True,
)  # fmt: skip
PATHS = {"forward": E, "received": E, "planned": E, "a rank's experts": 3, "a rank's, planned": 3}


def slots(local: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights and local experts, -1 for those of other ranks. The fifth expert has no token."""
    generator = torch.Generator().manual_seed(0)
    others = torch.tensor([e for e in range(E) if e != EMPTY])
    expert = torch.stack([others[torch.randperm(E - 1, generator=generator)[:K]] for _ in range(N)])
    weight = torch.rand(N, K, generator=generator, dtype=torch.float64)
    h = torch.randn(N, MODEL.hidden_size, generator=generator, dtype=torch.float64)
    return h, weight, expert.masked_fill(expert >= local, -1).int()


def loop(experts: Experts, h: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    rows = []
    for n in range(len(h)):
        total = torch.zeros_like(h[n])
        for k in range(K):
            if (e := int(number[n, k])) >= 0:
                both = experts.w_gate_up[e] @ h[n] + experts.b_gate_up[e]
                gate, up = both.chunk(2)
                gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
                a = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                total = total + weight[n, k] * (experts.w_down[e] @ a + experts.b_down[e])
        rows.append(total)
    return torch.stack(rows)


def by_path(experts: Experts, path: str, h: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    if path == "forward":
        _, ends, row, slot = routing_plan(number, E)
        return experts(h, weight, ends, row, slot)
    if "planned" not in path:
        return experts.received(h, weight, number)
    capacity = Load(len(h), len(h) * K + 5)
    *plan, _ = plan_received(number, torch.tensor(len(h)), len(experts.w_down), capacity)
    return experts.planned(h, weight, *plan)


@pytest.mark.parametrize("path", PATHS)
def test_each_path_has_the_values_and_gradients_of_a_loop_over_slots(path):
    local = PATHS[path]
    experts = filled(Experts(replace(MODEL, num_experts=local)).double(), std=0.5)
    h, weight, number = slots(local)
    given = [h.requires_grad_(), weight.requires_grad_(), *experts.parameters()]
    expected, found = loop(experts, h, weight, number), by_path(experts, path, h, weight, number)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted, actual = (torch.autograd.grad(y, given, dy) for y in (expected, found))
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert local < E or all(not grad[EMPTY].any() for grad in actual[2:])


def test_unused_rows_and_slots_of_other_ranks_are_harmless_whatever_they_hold():
    """Of 9 rows that arrived in room for 23, some slots belong to other ranks; the rest holds NaN."""
    live, local = 9, 3
    experts = filled(Experts(replace(MODEL, num_experts=local)).double(), std=0.5)
    h, weight, number = slots(local)
    number[live:] = -1
    weight[number < 0] = torch.nan
    h[live:] = torch.nan
    dy = torch.randn(N, MODEL.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    here = (number >= 0).any(dim=1)
    dy[~here] = torch.nan
    given = [h.requires_grad_(), weight.requires_grad_(), *experts.parameters()]
    y = by_path(experts, "planned", h, weight, number)
    dh, dweight, *found = torch.autograd.grad(y, given, dy)
    clean = [h[here].detach(), weight[here].detach().nan_to_num(0.0)]
    clean = [each.requires_grad_() for each in clean]
    expected = loop(experts, *clean, number[here])
    torch.testing.assert_close(y[here], expected)
    of_h, of_weight, *wanted = torch.autograd.grad(expected, [*clean, *experts.parameters()], dy[here])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(dh[here], of_h)
    torch.testing.assert_close(dweight[number >= 0], of_weight[number[here] >= 0])


def test_the_bias_of_the_router_moves_choices_and_weights():
    router = filled(Router(MODEL, MoEConfig()), std=0.5)
    x = torch.randn(2, 9, MODEL.hidden_size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        router.gate.bias.zero_()
        router.gate.bias[EMPTY] = 30.0
        _, weight, expert, *_ = router(x)
        assert (expert == EMPTY).any(dim=1).all()
        plain = Router(replace(MODEL, router_bias=False), MoEConfig())
        plain.load_state_dict(router.state_dict(), strict=False)
        assert not torch.equal(plain(x)[1], weight)


def test_biases_start_at_zero_do_not_decay_and_are_updated_by_element():
    model = build_model(replace(MODEL, num_dense_layers=0, num_layers=1), layout=Layout(dp=7, ep=7), rank=2)
    named = dict(model.named_parameters())
    biases = {name for name in named if "b_" in name or name.endswith("gate.bias")}
    assert {name.rpartition("moe_")[2] for name in biases} == {
        "experts.b_gate_up", "experts.b_down", "router.gate.bias",
    }  # fmt: skip
    for name in biases:
        assert not named[name].any() and not decays(named[name]) and matrices_of(name, named[name]) is None
    assert named["layers.0.moe_experts.b_gate_up"].shape == (1, 10)
    assert layout_of(named["layers.0.moe_router.gate.bias"]) == layout_of(
        named["layers.0.moe_router.gate.weight"]
    )
    assert decays(named["layers.0.moe_experts.w_down"])
