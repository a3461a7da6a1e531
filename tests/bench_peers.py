"""Stand-ins for other projects' packages: the signatures that their sources have, computed in plain PyTorch.

Suffixes as in graphmoe/bench/peers.py.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType

import torch
from torch.nn import functional as F


class ActivationType(Enum):
    SWIGLU = "swiglu"


def moe_general_routing_inputs(
    x, router_scores, token_indices, expert_indices, w1, b1, w2, b2, E, stream_id, activation_type,
    is_inference_mode_enabled=False,
):  # fmt: skip
    """SonicMoE: w1 [2F, D, E] with gate and up in turns, w2 [D, F, E]; tokens in ascending order."""
    assert activation_type is ActivationType.SWIGLU and b1 is None and b2 is None and w2.shape[-1] == E
    assert bool((token_indices.diff() >= 0).all()) and expert_indices.dtype == torch.int32
    experts = expert_indices.long()
    h_RH = torch.einsum("rd,hdr->rh", x[token_indices], w1[..., experts])
    a_RF = F.silu(h_RH[:, ::2]) * h_RH[:, 1::2]
    y_RD = torch.einsum("rf,dfr->rd", a_RF, w2[..., experts]) * router_scores.unsqueeze(1)
    return torch.zeros_like(x).index_add(0, token_indices, y_RD.to(x.dtype)), None


def flatten_sort_count(expert_idxs, num_experts):
    """ScatterMoE: expert of each row, slot of each row, ends of the experts."""
    experts, slots = expert_idxs.flatten().sort()
    return experts, slots, expert_idxs.flatten().bincount(minlength=num_experts).cumsum(-1)


def parallel_linear(
    inputs, expert_weights, k, sorted_expert_idxs, sorted_scattered_idxs, expert_offsets,
    expert_biases=None, gates=None, grouped_in=False, grouped_out=False,
):  # fmt: skip
    """ScatterMoE: expert_weights [E, in, out]; rows by expert where grouped, else by slot."""
    assert len(sorted_scattered_idxs) == len(inputs) * k
    rows = inputs if grouped_in else inputs[sorted_scattered_idxs // k]
    out = torch.einsum("ri,rio->ro", rows, expert_weights[sorted_expert_idxs])
    if grouped_out:
        return out
    by_slot = torch.zeros_like(out).index_copy(0, sorted_scattered_idxs, out)
    return (gates.unsqueeze(1) @ by_slot.view(*gates.shape, -1)).squeeze(1)


class LigerFusedMoEFunction:
    """Liger-Kernel: gate_up_proj [E, 2F, D], down_proj [E, D, F]."""

    @staticmethod
    def forward(ctx, x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        raise NotImplementedError

    @staticmethod
    def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        h_TKH = torch.einsum("td,tkhd->tkh", x, gate_up_proj[top_k_index.long()])
        gate, up = h_TKH.chunk(2, dim=-1)
        y_TKD = torch.einsum("tkf,tkdf->tkd", F.silu(gate) * up, down_proj[top_k_index.long()])
        return (y_TKD * top_k_weights.unsqueeze(-1)).sum(1).to(x.dtype)


def liger_fused_linear_cross_entropy(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0,
    label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
):  # fmt: skip
    assert accum_dtype is torch.float32
    return F.cross_entropy((input @ weight.T).float(), target, reduction=reduction)


def chunked_linear_cross_entropy(
    x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True, use_scaled_exp=None
):
    assert not tuned
    return F.cross_entropy((x @ weight.T).float(), target, reduction=reduction)


def linear_cross_entropy(
    e, c, targets, bias=None, ignore_index=-100, softcap=None, reduction="mean", shift=0, return_lse=False,
    filter_eps="auto",
):  # fmt: skip
    assert filter_eps is None
    return F.cross_entropy((e @ c.T).float(), targets, reduction=reduction)


MODULES = {
    "sonicmoe.functional": [moe_general_routing_inputs],
    "sonicmoe.enums": [ActivationType],
    "scattermoe": [flatten_sort_count, parallel_linear],
    "liger_kernel.ops": [LigerFusedMoEFunction],
    "liger_kernel.transformers.functional": [liger_fused_linear_cross_entropy],
    "quack.linear_cross_entropy": [chunked_linear_cross_entropy],
    "cut_cross_entropy": [linear_cross_entropy],
}


def install(monkeypatch) -> None:
    """Put the stand-ins where imports find them, until the end of the test."""
    for name, contents in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        module = ModuleType(name)
        for value in contents:
            setattr(module, value.__name__, value)
        monkeypatch.setitem(sys.modules, name, module)
