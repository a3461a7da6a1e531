"""Building and initialising: names, determinism, independence of weights, the meta device."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphmoe.config.schema import ModelConfig
from graphmoe.model.build import build_model
from graphmoe.plan.layout import Layout, layout_of, own_part

D, V, E = 16, 40, 6
CONFIG = ModelConfig(
    vocab_size=V, hidden_size=D, num_layers=2, num_dense_layers=1, dense_ffn_size=20, num_heads=2,
    kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, num_experts=E, expert_ffn_size=7,
    shared_ffn_size=9, selection_bias=True,
)  # fmt: skip
OUTER = {"embed": [V, D], "loss_head.norm": [D], "loss_head.head": [V, D]}
LATENT = {
    "attn.norm": [D], "attn.q_down": [8, D], "attn.q_norm": [8], "attn.q_up": [2 * (6 + 4), 8],
    "attn.kv_down": [12 + 4, D], "attn.kv_norm": [12], "attn.kv_up": [2 * (6 + 5), 12],
    "attn.out_proj": [D, 2 * 5],
}  # fmt: skip
GROUPED = {
    "attn.norm": [D], "attn.q_proj": [4 * 10, D], "attn.k_proj": [2 * 10, D], "attn.v_proj": [2 * 10, D],
    "attn.q_norm": [10], "attn.k_norm": [10], "attn.out_proj": [D, 4 * 10],
}  # fmt: skip
DENSE = {"mlp.norm": [D], "mlp.gate_up": [40, D], "mlp.down": [D, 20]}
MOE = {"moe_router.norm": [D], "moe_router.gate": [E, D]}
EXPERTS = {"moe_experts.w_gate_up": [E, 14, D], "moe_experts.w_down": [E, D, 7]}
BIAS = {"moe_router.selection_bias": [E]}
SHARED = {"shared_experts.gate_up": [18, D], "shared_experts.down": [D, 9]}
MTP = {"embed_norm": [D], "hidden_norm": [D], "proj": [D, 2 * D], "norm": [D]}


def under(prefix, *shapes):
    """Names below a module: most are of a weight."""
    found = {f"{prefix}{name}": shape for group in shapes for name, shape in group.items()}
    return {name if name.endswith(PLAIN) else f"{name}.weight": shape for name, shape in found.items()}


PLAIN = ("w_gate_up", "w_down", "selection_bias", ".weight")
VARIANTS = {  # name: (changes of CONFIG, expected names and shapes)
    "mla with q-lora and mtp": (
        {"q_lora_rank": 8, "mtp_depth": 1},
        under("", OUTER)
        | under("layers.0.", DENSE, LATENT)
        | under("layers.1.", MOE, EXPERTS, BIAS, SHARED, LATENT)
        | under("mtp.0.", MTP, under("layer.", MOE, EXPERTS, BIAS, SHARED, LATENT)),
    ),
    "gqa with qk-norm, no bias, no shared experts": (
        {
            "attention": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 10,
            "qk_norm": True, "selection_bias": False, "shared_ffn_size": 0,
        },
        under("", OUTER) | under("layers.0.", DENSE, GROUPED) | under("layers.1.", MOE, EXPERTS, GROUPED),
    ),
}  # fmt: skip


def variant(name):
    return dataclasses.replace(CONFIG, **VARIANTS[name][0])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", VARIANTS)
def test_weights_have_the_published_names_shapes_and_dtypes(name, device):
    model = build_model(variant(name), device=device, dtype=torch.bfloat16)
    state = model.state_dict()
    assert {key: list(value.shape) for key, value in state.items()} == VARIANTS[name][1]
    assert {value.device.type for value in state.values()} == {device}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}


@pytest.mark.parametrize("name", VARIANTS)
def test_equal_seeds_give_equal_weights_and_others_others(name):
    first, again, other = (build_model(variant(name), seed=seed).state_dict() for seed in (3, 3, 4))
    for key, value in first.items():
        assert torch.equal(value, again[key]), key
        assert torch.equal(value, other[key]) == ("norm" in key or "selection_bias" in key), key


def test_a_weight_does_not_depend_on_which_others_exist():
    changes = {"num_layers": 4, "mtp_depth": 1, "shared_ffn_size": 0, "q_lora_rank": 8}
    other = dataclasses.replace(CONFIG, **changes, selection_bias=False)
    small, large = (build_model(of).state_dict() for of in (CONFIG, other))
    common = small.keys() & large.keys()
    assert len(common) > 15 and "layers.1.moe_experts.w_down" in common
    for name in common:
        assert torch.equal(small[name], large[name]), name


LAYOUTS = [Layout(dp=3, ep=3), Layout(dp=7, etp=7), Layout(dp=42, ep=3, etp=7)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_hold_their_parts_of_the_experts_of_one_rank(layout):
    whole = dict(build_model(CONFIG, dtype=torch.bfloat16).named_parameters())
    seen = set()
    for rank in range(layout.size("world")):
        own = build_model(CONFIG, dtype=torch.bfloat16, layout=layout, rank=rank)
        for name, parameter in own.named_parameters():
            parallel = layout_of(parameter)
            assert parallel == layout_of(whole[name])
            assert ("moe_experts" in name) == (parallel.summed_over == "edp")
            assert torch.equal(parameter, own_part(whole[name], parallel, layout, rank)), name
        seen.add(tuple(own.layers[1].moe_experts.w_down.flatten().tolist()))
    assert len(seen) == layout.ep * layout.etp


def test_matrices_are_normal_norms_one_and_buffers_zero():
    model = build_model(dataclasses.replace(CONFIG, hidden_size=64, vocab_size=4096, init_std=0.05))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            assert abs(parameter.mean().item()) < 5 * 0.05 / parameter.numel() ** 0.5, name
            assert parameter.std().item() == pytest.approx(0.05, rel=5 / parameter.numel() ** 0.5), name
    assert all(not bool(buffer.any()) for buffer in model.buffers())


class OnlyMeta(TorchDispatchMode):
    """Mode that fails when an op returns a tensor that has memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            assert not isinstance(leaf, torch.Tensor) or leaf.is_meta, f"{func} allocates {leaf.shape}"
        return out


def test_a_model_on_the_meta_device_allocates_nothing():
    huge = dataclasses.replace(
        CONFIG, hidden_size=7168, num_experts=256, expert_ffn_size=2048, vocab_size=130_000, mtp_depth=1
    )
    with OnlyMeta():
        model = build_model(huge, device="meta", dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) > 20e9
