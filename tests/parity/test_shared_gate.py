"""Qwen3-Next's MoE block: shared experts times the sigmoid of a gate, beside transformers."""

import dataclasses

import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from graphmoe.config.schema import AuxLoss, ModelConfig, MoEConfig
from graphmoe.model.build import build_model
from graphmoe.model.layer import MoELayer
from graphmoe.model.sizes import count_parameters
from graphmoe.plan.buckets import decays, matrices_of
from graphmoe.segments import run_segments

MODEL = ModelConfig(
    hidden_size=26, num_experts=9, top_k=3, expert_ffn_size=7, shared_ffn_size=11, shared_gate=True,
    renormalise=True, aux_loss=AuxLoss.none,
)  # fmt: skip
THEIRS = {
    "gate.weight": "moe_router.gate.weight", "experts.gate_up_proj": "moe_experts.w_gate_up",
    "experts.down_proj": "moe_experts.w_down", "shared_expert.down_proj.weight": "shared_experts.down.weight",
    "shared_expert_gate.weight": "shared_experts.gate.weight",
}  # fmt: skip


def test_values_and_gradients_are_those_of_transformers():
    theirs = Qwen3NextSparseMoeBlock(
        Qwen3NextConfig(
            hidden_size=26, num_experts=9, num_experts_per_tok=3, moe_intermediate_size=7,
            shared_expert_intermediate_size=11, norm_topk_prob=True, experts_implementation="eager",
        )
    )  # fmt: skip
    ours, generator = MoELayer(MODEL, MoEConfig()), torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3, generator)
    named = dict(theirs.named_parameters())
    pairs = {ours_name: named[name] for name, ours_name in THEIRS.items()}
    both = [named[f"shared_expert.{which}_proj.weight"] for which in ("gate", "up")]
    torch.nn.init.ones_(ours.moe_router.norm.weight)
    for name, parameter in pairs.items():
        ours.get_parameter(name).data.copy_(parameter.data)
    ours.shared_experts.gate_up.weight.data.copy_(torch.cat(both))
    x = torch.randn(2, 17, 26, generator=generator, requires_grad=True)
    (found,) = run_segments(ours.segments()[1:], {"x": x}, ("x",))
    expected = x + theirs(ours.moe_router.norm(x))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn(found.shape, generator=generator)
    wanted = torch.autograd.grad(expected, [x, *pairs.values(), *both], grad)
    own = [x, *(ours.get_parameter(name) for name in pairs), ours.shared_experts.gate_up.weight]
    *actual, of_both = torch.autograd.grad(found, own, grad)
    for one, other in zip((*actual, *of_both.chunk(2)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_gate_is_counted_and_updated_as_the_router():
    counts, without = (
        count_parameters(dataclasses.replace(MODEL, shared_gate=gate)) for gate in (True, False)
    )
    for kind in ("total", "active"):
        assert counts[kind]["shared_experts"] == without[kind]["shared_experts"] + 3 * 26
    weights = dict(build_model(MODEL, device="meta").named_parameters())
    name = "layers.1.shared_experts.gate.weight"
    assert decays(weights[name]) and matrices_of(name, weights[name]) is None
    assert matrices_of("layers.1.shared_experts.gate_up.weight", weights[name.replace("gate", "gate_up")])
