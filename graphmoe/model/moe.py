"""The MoE segments: moe_router, moe_preprocess, shared_experts, moe_experts and moe_combine.

Suffixes: B batch, S sequence, T = B * S tokens, D hidden, E experts, K top-k slots, R routed rows,
F expert width. With one rank, dispatch hands the tokens on as they are (``moe_dispatch`` is the
identity); rows are gathered in moe_experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.config import AuxLoss, ModelConfig, MoEConfig
from graphmoe.model.norm import RMSNorm
from graphmoe.ops import router as ops
from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.ops.permute import RoutingPlan, permute, routing_plan, unpermute
from graphmoe.segments import part

ROUTER_STATS = ("balance_loss", "z_loss", "router_entropy")


class Router(nn.Module):
    """Pre-MLP norm, gate, scores, top-k and auxiliary losses, in fp32 from the norm on."""

    selection_bias: Tensor
    earlier_counts: Tensor

    def __init__(self, config: ModelConfig, execution: MoEConfig) -> None:
        super().__init__()
        self.config, self.execution = config, execution
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        zeros_E = torch.zeros(config.num_experts)
        self.register_buffer("selection_bias", zeros_E if config.selection_bias else None)
        # Slots of the step's earlier micro-batches, for the balance loss over the global batch.
        self.register_buffer("earlier_counts", zeros_E.clone(), persistent=False)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """-> h [T, D], weights [T, K], experts int32 [T, K], loss scalar, statistics [3]."""
        h_TD = self.norm(x_BSD).flatten(0, 1)
        # bf16 logits would flip the choice between near-equal experts.
        logits_TE = F.linear(h_TD.float(), self.gate.weight.float())
        scores_TE = ops.scores_of(logits_TE, self.config.score_function)
        expert_TK = self._choose(scores_TE.detach())
        weight_TK = ops.slot_weights(self.config, logits_TE, scores_TE, expert_TK)
        loss, stats = self._losses(logits_TE, scores_TE, expert_TK, len(x_BSD))
        return h_TD, weight_TK, expert_TK, loss, stats

    def _choose(self, scores_TE: Tensor) -> Tensor:
        config = self.config
        if self.execution.force_balance:
            return ops.round_robin(len(scores_TE), config.top_k, config.num_experts, scores_TE.device)
        if config.selection_bias:
            scores_TE = scores_TE + self.selection_bias
        return ops.select_experts(config, scores_TE)

    def _losses(
        self, logits_TE: Tensor, scores_TE: Tensor, expert_TK: Tensor, num_sequences: int
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        balance = z = loss = logits_TE.new_zeros(())
        if config.aux_loss is not AuxLoss.none and config.aux_loss_coef > 0:
            counts_BE = ops.count_per_sequence(expert_TK, num_sequences, config.num_experts)
            balance = ops.balance_loss(config, scores_TE, counts_BE, self.earlier_counts)
            loss = loss + config.aux_loss_coef * balance
        if config.z_loss_coef > 0:
            z = ops.z_loss(logits_TE)
            loss = loss + config.z_loss_coef * z
        return loss, torch.stack([balance, z, ops.entropy(scores_TE)]).detach()


class Preprocess(nn.Module):
    """Builds the routing plan on the device."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts

    def forward(self, expert_TK: Tensor) -> RoutingPlan:
        return routing_plan(expert_TK, self.num_experts)


class Experts(nn.Module):
    """Routed experts: gather rows, grouped SwiGLU MLP, weighted sum back to [T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, width, inner = config.num_experts, config.hidden_size, config.expert_ffn_size
        self.w_gate_up = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.w_down = nn.Parameter(torch.empty(experts, width, inner))

    def forward(
        self, h_TD: Tensor, weight_TK: Tensor, ends_E: Tensor, row_TK: Tensor, slot_R: Tensor
    ) -> Tensor:
        h_RD = permute(h_TD, slot_R, row_TK)
        gate_RF, up_RF = grouped_mm(h_RD, self.w_gate_up, ends_E).chunk(2, dim=-1)
        weight_R1 = permute(weight_TK.reshape(-1, 1), slot_R, row_TK.reshape(-1, 1))
        with part("moe_act"):
            act_RF = (F.silu(gate_RF) * up_RF * weight_R1).to(h_RD.dtype)
        return unpermute(grouped_mm(act_RF, self.w_down, ends_E), slot_R, row_TK)


class SwiGLU(nn.Module):
    """down(silu(gate(h)) * up(h)); the shared experts, and the core of the dense MLP."""

    PART = "shared_experts"

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        with part(self.PART):
            gate, up = self.gate_up(h).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)


class DenseMLP(SwiGLU):
    """The mlp segment of a dense layer: x + swiglu(norm(x))."""

    PART = "mlp"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.dense_ffn_size)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + super().forward(self.norm(x_BSD))


def dispatch_local(h_TD: Tensor) -> Tensor:
    """With one rank every expert is local: the tokens are received as they are."""
    return h_TD


def combine(x_BSD: Tensor, routed_TD: Tensor, shared_TD: Tensor | None = None) -> Tensor:
    """Residual + routed + shared experts -> [B, S, D]."""
    if shared_TD is not None:
        routed_TD = routed_TD + shared_TD
    return x_BSD + routed_TD.view_as(x_BSD)
