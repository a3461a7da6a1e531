"""The MoE segments: moe_router, moe_preprocess, shared_experts, moe_experts and moe_combine.

Suffixes: B batch, S sequence, T = B * S tokens, D hidden, E experts, K choices, R rows (tokens in expert
order; *slot*: token * K + k), F expert width, N received tokens, L local experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphmoe.ops.swiglu  # noqa: F401  # registers the operation
from graphmoe.config.schema import AuxLoss, ModelConfig, MoEConfig
from graphmoe.model.blocks import RMSNorm, column_parallel, row_parallel
from graphmoe.ops import router as ops
from graphmoe.ops.collectives import all_gather, index_along, reduce_scatter, sums_over
from graphmoe.ops.dispatch import REPLICAS, SEND_PLAN, SendPlan, send_plan
from graphmoe.ops.gradients import Gradient
from graphmoe.ops.grouped_mlp import grouped_mlp_into
from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.ops.permute import RoutingPlan, permute, routing_plan, unpermute
from graphmoe.ops.replicas import place_of_slots, with_replicas
from graphmoe.plan.forced_loads import NO_LOAD
from graphmoe.plan.layout import ALONE, Cut, Layout, ParameterLayout
from graphmoe.segments import part

ROUTER_STATS = ("balance_loss", "z_loss", "router_entropy")


class Router(nn.Module):
    """Pre-MLP norm, gate, scores, top-k and auxiliary losses; in fp32 after the norm.

    Losses and statistics cover the tokens of all cp and tp ranks.
    """

    selection_bias: Tensor
    earlier_counts: Tensor
    load_ends: Tensor | None

    def __init__(self, config: ModelConfig, execution: MoEConfig, layout: Layout = ALONE) -> None:
        super().__init__()
        self.config, self.execution = config, execution
        self.sharing, self.dp = layout.size("cp_tp"), layout.dp
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=config.router_bias)
        zeros_E = torch.zeros(config.num_experts)
        self.register_buffer("selection_bias", zeros_E if config.selection_bias else None)
        # Slots of the step's earlier micro-batches, for the balance loss over the global batch.
        self.register_buffer("earlier_counts", zeros_E.clone(), persistent=False)
        # Of a forced load, by `graphmoe.plan.forced_loads.ends`; the host sets it before each step.
        is_forced = execution.expert_load != NO_LOAD
        self.register_buffer("load_ends", zeros_E.long() if is_forced else None, persistent=False)

    @property
    def has_balance(self) -> bool:
        return self.config.aux_loss is not AuxLoss.none and self.config.aux_loss_coef > 0

    @property
    def reads_earlier(self) -> bool:
        return self.config.aux_loss is AuxLoss.global_batch and self.has_balance

    @property
    def counts_apart(self) -> bool:
        # the balance loss counts other slots than those routed
        return self.reads_earlier and self.config.selection_bias

    def forward(self, x_BSD: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        """Return h [T, D], weights [T, K], experts int32 [T, K], loss scalar, statistics [3].

        With ``input_scaling`` weights are 1, and the last tensor is h times the scores, the experts' input.
        If `counts_apart`, also the balance loss's counts int32 [E]. ``more``: if `reads_earlier`, experts'
        counts of earlier micro-batches; then optionally recorded experts [T, K], -1 for the own choice.
        """
        # a copy for each micro-batch: its backward may recompute the routing after later ones were counted
        earlier_E = more[0] if self.reads_earlier else None
        h_TD = self.norm(x_BSD).flatten(0, 1)
        # bf16 logits would flip the choice between near-equal experts.
        logits_TE = F.linear(h_TD.float(), self.gate.weight.float())
        if self.gate.bias is not None:
            logits_TE = logits_TE + self.gate.bias.float()
        scores_TE = ops.scores_of(logits_TE, self.config.score_function)
        expert_TK = self._choose(scores_TE.detach())
        for given_TK in more[self.reads_earlier :]:
            expert_TK = ops.replayed(given_TK, expert_TK)
        how = self.config.renormalise, self.config.softmax_after_topk, self.config.routed_scale
        relative_TE = ops.relative_scores(logits_TE, scores_TE, self.config.score_function)
        weight_TK = ops.weights_of(logits_TE, scores_TE, relative_TE, expert_TK, *how)
        counts_BE, counted = None, list[Tensor]()
        if self.has_balance:
            counted_TK = self._counted(scores_TE.detach(), expert_TK)
            counts_BE = ops.count_per_sequence(counted_TK, len(x_BSD), self.config.num_experts)
            counted = [counts_BE.sum(dim=0).int()] if self.counts_apart else []
        loss, stats = self._losses(logits_TE, relative_TE, counts_BE, earlier_E)
        if self.config.input_scaling:
            # one choice: the score of the token is that of its row
            scaled_TD = (h_TD.float() * weight_TK).to(h_TD.dtype)
            return h_TD, torch.ones_like(weight_TK), expert_TK, loss, stats, *counted, scaled_TD
        return h_TD, weight_TK, expert_TK, loss, stats, *counted

    def _choose(self, scores_TE: Tensor) -> Tensor:
        config = self.config
        if self.execution.force_balance:
            return ops.round_robin(len(scores_TE), config.top_k, config.num_experts, scores_TE.device)
        if self.load_ends is not None:
            return ops.draw_experts(len(scores_TE), config.top_k, self.load_ends)
        if config.selection_bias:
            scores_TE = scores_TE + self.selection_bias
        return ops.select_experts(config, scores_TE)

    def _counted(self, scores_TE: Tensor, expert_TK: Tensor) -> Tensor:
        # DeepSeek-V3 (arXiv 2412.19437, equation 18) ignores bias and groups here, as Megatron-Core does:
        # a bias that balances the load would otherwise leave the balance loss no gradient
        is_forced = self.execution.force_balance or self.load_ends is not None
        if not self.config.selection_bias or is_forced:
            return expert_TK
        return ops.top_indices(scores_TE, self.config.top_k).int()

    def _losses(
        self, logits_TE: Tensor, relative_TE: Tensor, counts_BE: Tensor | None, earlier_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        balance = z = loss = logits_TE.new_zeros(())
        terms: Sequence[Tensor] = ()
        if counts_BE is not None:
            mean_BE, counts_BE = ops.balance_terms(config, relative_TE, counts_BE, earlier_E)
            terms = mean_BE, self._of_global_batch(counts_BE, earlier_E)
        if config.z_loss_coef > 0:
            z = ops.z_loss(logits_TE)
        entropy, z, *terms = self._of_all_tokens(ops.entropy(relative_TE), z, *terms)
        if counts_BE is not None:
            balance = ops.balance_loss(*terms)
            loss = loss + config.aux_loss_coef * balance
        if config.z_loss_coef > 0:
            loss = loss + config.z_loss_coef * z
        return loss, torch.stack([balance, z, entropy]).detach()

    def _of_global_batch(self, counts_BE: Tensor, earlier_E: Tensor | None) -> Tensor:
        # micro-batches are dealt to ranks in turn: count all earlier ones, and lower ranks' current ones
        if earlier_E is None or self.dp == 1 or not torch.is_grad_enabled():
            return counts_BE
        both_12E = torch.stack([counts_BE, earlier_E[None]], dim=1)
        both_R2E = all_gather(both_12E, "dp", self.dp, dim=0)
        ranks_R1 = torch.arange(self.dp, device=counts_BE.device).unsqueeze(1)
        has_begun_R1 = ranks_R1 <= index_along("dp", counts_BE)
        return torch.where(has_begun_R1, both_R2E[:, 0], both_R2E[:, 1]).sum(dim=0, keepdim=True)

    def _of_all_tokens(self, *means: Tensor) -> tuple[Tensor, ...]:
        if self.sharing == 1:
            return means
        # every rank has the same number of tokens, so a mean of means is the mean
        return tuple(total / self.sharing for total in sums_over("cp_tp", self.sharing, *means))


class Preprocess(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts

    def forward(self, expert_TK: Tensor) -> RoutingPlan:
        return routing_plan(expert_TK, self.num_experts)


class SendPreprocess(nn.Module):
    """Segment moe_preprocess with a dispatcher: plans on the device which rows go to which rank."""

    def __init__(self, config: ModelConfig, layout: Layout, replica_slots: int = 0) -> None:
        """``replica_slots`` of each rank: with any, calls are collectives over ep."""
        super().__init__()
        self.num_experts, self.layout, self.replica_slots = config.num_experts, layout, replica_slots

    @property
    def writes(self) -> tuple[str, ...]:
        return ("counts", *SEND_PLAN, *(REPLICAS if self.replica_slots else ()))

    def forward(self, expert_TK: Tensor) -> tuple[Tensor, ...]:
        """Return rows per expert [E], `SendPlan`; with replicas each choice's copy [T, K], slots' experts."""
        if slots := self.replica_slots:
            ep, owned = self.layout.ep, self.num_experts // self.layout.ep
            counts_E, place_TK, expert_RS = place_of_slots(expert_TK, ep, self.num_experts, slots)
            of_places = send_plan(place_TK, ep * (owned + slots), ep, self.layout.etp)
            return counts_E, *of_places, place_TK, expert_RS
        slots_R = expert_TK.flatten()
        counts_E = slots_R.new_zeros(self.num_experts).scatter_add_(
            0, slots_R.long(), torch.ones_like(slots_R)
        )
        plan: SendPlan = send_plan(expert_TK, self.num_experts, self.layout.ep, self.layout.etp)
        return counts_E, *plan


class Experts(nn.Module):
    """Routed experts; a rank holds E / ep consecutive ones, and 1 / etp of the width of each."""

    GATE_UP = ParameterLayout((Cut(0, "ep"), Cut(1, "etp", pieces=2)), "edp")
    DOWN = ParameterLayout((Cut(0, "ep"), Cut(2, "etp")), "edp")
    BIAS = ParameterLayout((Cut(0, "ep"),), "edp", is_bias=True)
    ADAPTER = ParameterLayout((Cut(0, "ep"),), "edp")
    b_gate_up: nn.Parameter | None
    b_down: nn.Parameter | None
    scale: float | None = None
    """Factor on the outputs of LoRA adapters; None without."""
    assumed_rows: int | None = None
    """Rows that ``received`` assumes in a dry run; None: the real count."""

    def __init__(self, config: ModelConfig, layout: Layout = ALONE) -> None:
        super().__init__()
        experts, width = config.num_experts // layout.ep, config.hidden_size
        inner = config.expert_ffn_size // layout.etp
        self.w_gate_up = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.w_down = nn.Parameter(torch.empty(experts, width, inner))
        self.w_gate_up.parallel = self.GATE_UP  # type: ignore[attr-defined]
        self.w_down.parallel = self.DOWN  # type: ignore[attr-defined]
        self.limit = config.swiglu_limit
        for name, size in (("b_gate_up", 2 * inner), ("b_down", width)):
            bias = nn.Parameter(torch.empty(experts, size)) if config.expert_bias else None
            self.register_parameter(name, bias)
            if bias is not None:
                bias.parallel = self.BIAS  # type: ignore[attr-defined]

    def adapt(self, rank: int, scale: float) -> None:
        """Add LoRA adapters of each expert: A [rank, D], which gate and up share, B [2f, rank]; of down."""
        self.scale = scale
        for name in ("gate_up", "down"):
            experts, outputs, inputs = getattr(self, f"w_{name}").shape
            for which, shape in (("A", (experts, rank, inputs)), ("B", (experts, outputs, rank))):
                adapter = nn.Parameter(torch.empty(shape))
                adapter.parallel = self.ADAPTER  # type: ignore[attr-defined]
                self.register_parameter(f"lora_{which}_{name}", adapter)

    def _product(self, name: str, x_RC: Tensor, w_ENC: Tensor, ends_E: Tensor) -> Tensor:
        y_RN = grouped_mm(x_RC, w_ENC, ends_E)
        if self.scale is None:
            return y_RN
        a_ERC, b_ENR = getattr(self, f"lora_A_{name}"), getattr(self, f"lora_B_{name}")
        return y_RN + grouped_mm(grouped_mm(x_RC, a_ERC, ends_E) * self.scale, b_ENR, ends_E)

    def forward(
        self, h_TD: Tensor, weight_TK: Tensor, ends_E: Tensor, row_TK: Tensor, slot_R: Tensor
    ) -> Tensor:
        """Return each token's weighted sum of expert outputs [T, D]; all experts are local."""
        h_RD = permute(h_TD, slot_R, row_TK)
        h_RH = self._product("gate_up", h_RD, self.w_gate_up, ends_E)
        weight_R1 = permute(weight_TK.reshape(-1, 1), slot_R, row_TK.reshape(-1, 1))
        act_RF = self._activation(h_RH, weight_R1, ends_E)
        y_TD = unpermute(self._product("down", act_RF, self.w_down, ends_E), slot_R, row_TK)
        return self._plus_bias(y_TD, weight_TK, row_TK, ends_E)

    def received(self, h_ND: Tensor, weight_NK: Tensor, number_NK: Tensor) -> Tensor:
        """Return weighted sums over local experts [N, D]. Syncs the device once.

        ``number_NK``: local expert, from 0; other values are other ranks' experts.
        """
        return self.planned(h_ND, weight_NK, *self.plan(number_NK))

    def planned(
        self,
        h_ND: Tensor,
        weight_NK: Tensor,
        ends_L: Tensor,
        row_NK: Tensor,
        slot_R: Tensor,
        expert_RS: Tensor | None = None,
    ) -> Tensor:
        """Return sums over local experts [N, D] by a routing plan; rows from the last end on are padding.

        With ``expert_RS`` (replica slots' experts), replicas follow this rank's experts.
        """
        # with replicas, a collective over ep in forward and backward
        w_gate_up, w_down = (with_replicas(w, expert_RS) for w in (self.w_gate_up, self.w_down))
        h_RD = torch.ops.graphmoe.permute(h_ND, slot_R, row_NK, ends_L)
        h_RH = self._product("gate_up", h_RD, w_gate_up, ends_L)
        row_S1 = row_NK.reshape(-1, 1)
        weight_R1 = torch.ops.graphmoe.permute(weight_NK.reshape(-1, 1), slot_R, row_S1, ends_L)
        y_RD = self._product("down", self._activation(h_RH, weight_R1, ends_L), w_down, ends_L)
        y_ND = torch.ops.graphmoe.unpermute(y_RD, slot_R, row_NK, ends_L, None)
        return self._plus_bias(y_ND, weight_NK, row_NK, ends_L)

    def received_fused(
        self, backend: str, totals: Sequence[Gradient], h_ND: Tensor, weight_NK: Tensor, number_NK: Tensor
    ) -> Tensor:
        """Return `received`'s result by fused kernels; the backward adds weight gradients to ``totals``."""
        ends_L, row_NK, slot_R = self.plan(number_NK)
        if len(slot_R) == 0 or self.scale is not None:  # vendor kernels may refuse empty inputs
            return self.planned(h_ND, weight_NK, ends_L, row_NK, slot_R)
        arguments = (h_ND, self.w_gate_up, self.w_down, weight_NK, slot_R, row_NK, ends_L)
        if totals:  # of weights, then biases, whose gradients autograd adds
            y_ND = grouped_mlp_into(totals[:2], backend, *arguments, **self.activation_options)
        else:
            y_ND = torch.ops.graphmoe.grouped_mlp(*arguments, backend, **self.activation_options)[0]
        return self._plus_bias(y_ND, weight_NK, row_NK, ends_L)

    def plan(self, number_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return end rows [L], each slot's row [N, K] (-1: not local), each row's slot [R]."""
        _, ends_L, row_NK, slot_R = torch.ops.graphmoe.routing_plan(number_NK, len(self.w_down))
        # the device sync: slicing by the real count leaves no padding rows
        rows = int(ends_L[-1]) if self.assumed_rows is None else self.assumed_rows
        return ends_L, row_NK, slot_R[:rows]

    def _activation(self, h_RH: Tensor, weight_R1: Tensor, ends_L: Tensor) -> Tensor:
        gate_RF, up_RF = h_RH.chunk(2, dim=-1)
        with part("moe_act"):
            # the pass fuse_activation looks for one grouped product, not for the sum of two
            if self.b_gate_up is not None or self.limit or self.scale is not None:
                return torch.ops.graphmoe.swiglu(h_RH, weight_R1, ends_L, self.b_gate_up, self.limit)
            return (F.silu(gate_RF) * up_RF * weight_R1).to(gate_RF.dtype)

    @property
    def activation_options(self) -> dict[str, Any]:
        """Arguments of ``graphmoe::grouped_mlp`` for other activations than SwiGLU."""
        return {"b_gate_up": self.b_gate_up, "limit": self.limit}

    def _plus_bias(self, y_ND: Tensor, weight_NK: Tensor, row_NK: Tensor, ends_L: Tensor) -> Tensor:
        return y_ND if self.b_down is None else y_ND + self.down_bias(weight_NK, row_NK, ends_L)

    def down_bias(self, weight_NK: Tensor, row_NK: Tensor, ends_L: Tensor) -> Tensor:
        """Return each token's weighted sum of its local experts' biases of down [N, D]. No device sync.

        A slot without a row (-1) adds 0, even if its weight is NaN, and so does its gradient.
        """
        assert self.b_down is not None
        row_NK1, starts_L = row_NK.unsqueeze(2), F.pad(ends_L[:-1], (1, 0))
        is_of_NKL = (row_NK1 >= starts_L) & (row_NK1 < ends_L)
        weight_NL = torch.where(is_of_NKL, weight_NK.unsqueeze(2), 0.0).sum(dim=1)
        bias_ND = weight_NL.to(self.b_down.dtype) @ self.b_down
        return bias_ND.masked_fill((row_NK < 0).all(dim=1, keepdim=True), 0.0)


class SwiGLU(nn.Module):
    """down(silu(gate(h)) * up(h)): shared experts, and the core of the dense MLP.

    ``gated``: times sigmoid(h w) of each token (Qwen3-Next).
    """

    PART = "shared_experts"

    def __init__(self, width: int, inner: int, tp: int = 1, *, gated: bool = False) -> None:
        super().__init__()
        self.tp = tp
        self.gate = nn.Linear(width, 1, bias=False) if gated else None
        self.gate_up = column_parallel(width, 2 * inner, tp, pieces=2)
        self.down = row_parallel(inner, width, tp)

    def forward(self, h: Tensor) -> Tensor:
        with part(self.PART):
            # Tokens are independent, so their order is free: along dim 0 nothing is copied.
            gate, up = self.gate_up(all_gather(h, "tp", self.tp, dim=0)).chunk(2, dim=-1)
            out = reduce_scatter(self.down(F.silu(gate) * up), "tp", self.tp, dim=0)
            return out if self.gate is None else out * torch.sigmoid(self.gate(h))


class DenseMLP(SwiGLU):
    PART = "mlp"

    def __init__(self, config: ModelConfig, layout: Layout = ALONE) -> None:
        super().__init__(config.hidden_size, config.dense_ffn_size, layout.tp)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + super().forward(self.norm(x_BSD))


def dispatch_local(h_TD: Tensor) -> Tensor:
    """Return the tokens unchanged: all experts are on this rank."""
    return h_TD


def combine(x_BSD: Tensor, routed_TD: Tensor, shared_TD: Tensor | None = None) -> Tensor:
    """Return the sum of residual, routed and shared experts, [B, S, D]."""
    if shared_TD is not None:
        routed_TD = routed_TD + shared_TD
    return x_BSD + routed_TD.view_as(x_BSD)


def update_selection_bias(bias_E: Tensor, counts_E: Tensor, rate: float, done: Tensor) -> None:
    """Balance by bias (arXiv 2408.15664, algorithm 1), in place; no-op if ``done`` is 0.0."""
    load_E = counts_E.float()
    # sign, not the difference: the update rate does not depend on the imbalance
    bias_E.add_((load_E.mean() - load_E).sign() * rate * done)
