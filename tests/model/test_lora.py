"""LoRA adapters: values and gradients against plain fp64 arithmetic, what is frozen, initial values."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.config.choices import LORA_TARGETS
from graphmoe.config.schema import ModelConfig, MoEConfig
from graphmoe.model.build import build_model
from graphmoe.model.layer import MoELayer
from graphmoe.model.lora import ADAPTER, LoraLinear, add_adapters
from graphmoe.model.moe_segments import Experts
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import run_segments
from tests.model.models import CONFIGS, GQA, MLA, B, S, both, filled, make_batch
from tests.tolerances import assert_forward_close, assert_gradient_close, relative_error

RANK, ALPHA = 4, 6.0
ADAPTED = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_targets": [*LORA_TARGETS]}
OF_EXPERTS = {"plain": {}, "biased": {"expert_bias": True, "swiglu_limit": 0.4}}


def adapters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if ADAPTER in name}


def test_a_matrix_with_an_adapter_has_the_gradients_of_the_formula():
    linear = filled(LoraLinear(nn.Linear(7, 5, bias=False), 3, 0.5).double())
    linear.weight.requires_grad_(False)
    x = torch.randn(2, 6, 7, dtype=torch.float64, requires_grad=True)
    y = linear(x)
    y.backward(dy := torch.randn_like(y))
    W, A, B = linear.weight, linear.lora_A, linear.lora_B
    flat, of_rows = x.detach().flatten(0, 1), dy.flatten(0, 1)
    assert_forward_close(y.flatten(0, 1), flat @ W.T + 0.5 * (flat @ A.T) @ B.T)
    assert_gradient_close(x.grad.flatten(0, 1), of_rows @ W + 0.5 * (of_rows @ B) @ A)
    assert_gradient_close(A.grad, 0.5 * (of_rows @ B).T @ flat)
    assert_gradient_close(B.grad, 0.5 * of_rows.T @ (flat @ A.T))
    assert W.grad is None


def of_each_expert(experts: Experts, h: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """The experts token by token, of adapted weights W + scale B A; fp64."""
    named = dict(experts.named_parameters())
    whole = {n: named[f"w_{n}"] + experts.scale * named[f"lora_B_{n}"] @ named[f"lora_A_{n}"]
             for n in ("gate_up", "down")}  # fmt: skip
    rows = []
    for token, (number, own) in enumerate(zip(chosen.tolist(), weight, strict=True)):
        total = torch.zeros_like(h[0])
        for e, w in zip(number, own, strict=True):
            if e >= len(experts.w_down):
                continue  # another rank's
            hidden = whole["gate_up"][e] @ h[token]
            if experts.b_gate_up is not None:
                hidden = hidden + experts.b_gate_up[e]
            gate, up = hidden.chunk(2)
            if experts.limit:
                gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
                act = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                act = F.silu(gate) * up
            y = whole["down"][e] @ act
            total = total + w * (y if experts.b_down is None else y + experts.b_down[e])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_experts_have_the_gradients_of_adapted_weights_and_read_no_dead_row(kind, dtype):
    model = replace(MLA, **OF_EXPERTS[kind])
    made = filled(Experts(model), std=0.4).requires_grad_(False)
    made.adapt(RANK, ALPHA / RANK)
    made = filled(made, std=0.4).to(dtype)
    # 5 of 6 tokens choose expert 1, none expert 3; 6 and 7 are other ranks', so the plan has dead rows
    chosen = torch.tensor([[1, 0], [1, 2], [4, 1], [1, 6], [5, 1], [7, 6]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(6, model.hidden_size, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.rand(6, 2, generator=generator, dtype=dtype, requires_grad=True)
    _, ends, row, slot = torch.ops.graphmoe.routing_plan(chosen, 6)
    assert len(slot) > ends[-1]
    spoiled = []

    class SpoilsDeadRows(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func.name() in ("graphmoe::grouped_mm", "graphmoe::grouped_mm_dgrad"):
                result[ends[-1] :] = torch.nan
                spoiled.append(func.name())
            return result

    with SpoilsDeadRows():
        y = made.planned(h, weight, ends, row, slot)
        y.backward(dy := torch.randn(y.shape, generator=generator, dtype=dtype))
    assert len(spoiled) == 6 + 6  # products forward, and of gradients of rows
    exact = filled(Experts(model), std=0.4).requires_grad_(False)
    exact.adapt(RANK, ALPHA / RANK)
    exact.load_state_dict(made.state_dict())
    exact = exact.double()
    inputs = [each.detach().double().requires_grad_() for each in (h, weight)]
    of_exact = of_each_expert(exact, *inputs, chosen)
    of_exact.backward(dy.double())
    assert_forward_close(y, of_exact)
    for own, wanted in zip((h, weight), inputs, strict=True):
        assert_gradient_close(own.grad, wanted.grad)
    named = dict(exact.named_parameters())
    for name, adapter in adapters(made).items():
        assert_gradient_close(adapter.grad, named[name].grad)
        assert not adapter.grad[3].any(), "no token chose it"
    assert [n for n, p in made.named_parameters() if p.grad is not None] == [*adapters(made)]


@both
def test_a_new_adapter_changes_no_loss_and_no_other_initial_weight(name):
    plain = build_model(CONFIGS[name])
    adapted = build_model(replace(CONFIGS[name], **ADAPTED))
    own = dict(adapted.named_parameters())
    assert all(p.equal(own[n]) and not own[n].requires_grad for n, p in plain.named_parameters())
    wanted, found = (model.loss(*make_batch()) for model in (plain, adapted))
    assert found.cross_entropy.equal(wanted.cross_entropy) if name != "hybrid" else True
    assert relative_error(found.total, wanted.total) < 1e-6
    found.total.backward()
    assert {n for n, p in own.items() if p.grad is not None} == {*adapters(adapted)}


def test_adapters_are_beside_the_targets_and_drawn_as_peft_draws_them():
    model = build_model(replace(MLA, **ADAPTED))
    for path, adapter in adapters(model).items():
        bound = adapter.shape[-1] ** -0.5
        if ".lora_B" in path:
            assert not adapter.any()
        else:
            assert bound / 2 < adapter.abs().max() <= bound and abs(adapter.mean()) < bound / 4
    only = {}
    for target in LORA_TARGETS:
        found = adapters(build_model(replace(MLA, lora_rank=2, lora_targets=[target]), device="meta"))
        only[target] = {path.split(".")[2] for path in found}
    parts = {"attention": {"attn"}, "mlp": {"mlp"}, "shared_experts": {"shared_experts"}}
    assert only == parts | {"experts": {"moe_experts"}}
    gated = build_model(replace(GQA, shared_gate=True, lora_rank=2), device="meta")
    assert not any(".gate.lora" in path for path in adapters(gated))


def layer_grads(model: ModelConfig, chunk: Load | None) -> dict[str, Tensor]:
    made = MoELayer(model, MoEConfig(), dispatcher=AllToAll(Mesh(Layout()), model.num_experts, chunk))
    holder = nn.ModuleDict({"layers": nn.ModuleList([made])})
    add_adapters(holder, model)
    filled(made, seed=1).double()
    x = torch.randn(B, S, model.hidden_size, dtype=torch.float64, requires_grad=True)
    x = x.detach().copy_(torch.linspace(-1, 1, x.numel()).view_as(x)).requires_grad_()
    made.use(made.dispatcher)
    output = made(x, torch.ones(S, 2), torch.zeros(S, 2), run_segments)
    output.x_BSD.square().mean().backward()
    return {"y": output.x_BSD.detach(), "dx": x.grad} | {n: p.grad for n, p in adapters(made).items()}


@pytest.mark.parametrize("targets", [["experts"], ["attention"]])
def test_the_path_in_chunks_trains_the_same_adapters(targets):
    model = replace(MLA, lora_rank=2, lora_targets=targets, num_dense_layers=0)
    whole, chunked = layer_grads(model, None), layer_grads(model, Load(7, 1000))
    assert whole.keys() == chunked.keys() and len(whole) > 4
    for name, tensor in whole.items():
        assert relative_error(chunked[name], tensor) < 1e-6, name
