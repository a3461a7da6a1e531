"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen matrices; adapters train and nothing else.

Suffixes: B batch, S sequence, K and N inputs and outputs of a matrix.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.config.schema import ModelConfig
from graphmoe.model.moe_segments import Experts
from graphmoe.plan.experts import TARGETS
from graphmoe.plan.layout import layout_of

ADAPTER = "lora_"
"""Part of the names of adapters' parameters."""


class LoraLinear(nn.Linear):
    """Frozen matrix with an adapter: y = x W^T + scale (x A^T) B^T, A [rank, K], B [N, rank]."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        """Reuses the weight of ``linear``; where tp cuts that, it cuts an adapter's same dimension."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.scale = linear.weight, scale
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, rank))
        whole = layout_of(linear.weight)
        for cut in whole.cuts:  # all tokens' gradients of the other matrix are summed over tp, its default
            cut_one = self.lora_B if cut.dim == 0 else self.lora_A
            cut_one.parallel = whole  # type: ignore[attr-defined]

    def forward(self, x_BSK: Tensor) -> Tensor:
        low = F.linear(x_BSK, self.lora_A) * self.scale
        return F.linear(x_BSK, self.weight) + F.linear(low, self.lora_B)


def without_adapters(config: ModelConfig) -> ModelConfig:
    return replace(config, lora_rank=0)


def add_adapters(model: nn.Module, config: ModelConfig) -> None:
    """Freeze all weights, and add adapters by ``model.lora_targets``; no-op with ``lora_rank`` 0."""
    if not config.lora_rank:
        return
    model.requires_grad_(False)
    scale = config.lora_alpha / config.lora_rank
    for path, module in [*model.named_modules()]:
        target = next((TARGETS[name] for name in path.split(".") if name in TARGETS), None)
        if target not in config.lora_targets:
            continue
        if isinstance(module, Experts):
            module.adapt(config.lora_rank, scale)
        for name, child in module.named_children():
            # the gate of shared experts has one output
            if isinstance(child, nn.Linear) and name != "gate":
                setattr(module, name, LoraLinear(child, config.lora_rank, scale))
