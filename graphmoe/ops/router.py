"""Router arithmetic in plain PyTorch: scores, group-limited top-k, weights and balance losses.

Everything is fp32 and nothing syncs the device. Suffixes: T tokens, E experts, K top-k slots,
G expert groups, B sequences of S tokens (T = B * S).
"""

import torch
from torch import Tensor

from graphmoe.config.schema import AuxLoss, GroupScore, ModelConfig, ScoreFunction

LOG_FLOOR = 1e-30
"""Smallest share whose logarithm the entropy takes."""


def scores_of(logits_TE: Tensor, function: ScoreFunction) -> Tensor:
    """Softmax or sigmoid of the logits -> fp32 [T, E]."""
    if function is ScoreFunction.sigmoid:
        return logits_TE.float().sigmoid()
    return logits_TE.float().softmax(dim=-1)


def select_experts(config: ModelConfig, choice_TE: Tensor) -> Tensor:
    """The top_k experts of each token, best first -> int32 [T, K]. Ties go to the lower id.

    With num_groups > 1 only the experts of the topk_groups best groups can be chosen (DeepSeek-V2,
    section 2.2.2; DeepSeek-V3, section 2.1.2).
    """
    if config.num_groups > 1:
        choice_TE = _keep_best_groups(config, choice_TE)
    return top_indices(choice_TE, config.top_k).int()


def slot_weights(config: ModelConfig, logits_TE: Tensor, scores_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """Weight of each chosen expert: gathered, renormalised and scaled -> fp32 [T, K]."""
    how = (config.renormalise, config.softmax_after_topk, config.routed_scale)
    return weights_of(logits_TE, scores_TE, expert_TK, *how)


def round_robin(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Tensor:
    """Expert ids that load all experts equally, whatever the scores say -> int32 [T, K]."""
    slot_R = torch.arange(num_tokens * top_k, device=device, dtype=torch.int32)
    return (slot_R % num_experts).view(num_tokens, top_k)


def count_per_sequence(expert_TK: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    """Slots that each sequence sends to each expert -> fp32 [B, E]."""
    sequence_B1 = torch.arange(num_sequences, device=expert_TK.device).unsqueeze(1)
    # One flat axis: on a GPU only that form of scatter_add has a deterministic kernel.
    bin_R = (expert_TK.view(num_sequences, -1) + num_experts * sequence_B1).flatten()
    counts = torch.zeros(num_sequences * num_experts, device=expert_TK.device)
    ones_R = torch.ones(len(bin_R), device=expert_TK.device)
    return counts.scatter_add_(0, bin_R, ones_R).view(num_sequences, num_experts)


def balance_loss(mean_BE: Tensor, counts_BE: Tensor) -> Tensor:
    """E * sum(load share * mean score) over the experts, 1 at balance, of `balance_terms` -> fp32 scalar."""
    load_BE = counts_BE / counts_BE.sum(dim=-1, keepdim=True)
    return counts_BE.shape[-1] * (load_BE * mean_BE).sum(dim=-1).mean()


def balance_terms(
    config: ModelConfig, scores_TE: Tensor, counts_BE: Tensor, earlier_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Mean normalised score and load of each expert -> two fp32 [B, E], or [1, E] where sequences are joined.

    They are taken over each sequence (DeepSeek-V2, section 2.2.3), over the micro-batch
    (Switch Transformer, arXiv 2101.03961, section 2.2), or over the global batch so far
    (arXiv 2501.11873): there ``earlier_E`` counts the slots of the step's earlier micro-batches.
    """
    share_TE = scores_TE
    if config.score_function is ScoreFunction.sigmoid:
        share_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
    mean_BE = share_TE.view(len(counts_BE), -1, config.num_experts).mean(dim=1)
    if config.aux_loss is not AuxLoss.sequence:
        mean_BE = mean_BE.mean(dim=0, keepdim=True)
        counts_BE = counts_BE.sum(dim=0, keepdim=True)
    if config.aux_loss is AuxLoss.global_batch:
        assert earlier_E is not None
        counts_BE = counts_BE + earlier_E
    return mean_BE, counts_BE


def z_loss(logits_TE: Tensor) -> Tensor:
    """Mean squared logsumexp of the logits (ST-MoE, arXiv 2202.08906, section 4) -> fp32 scalar."""
    return logits_TE.float().logsumexp(dim=-1).square().mean()


def entropy(scores_TE: Tensor) -> Tensor:
    """Mean entropy in nats of the normalised scores -> fp32 scalar."""
    share_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
    return -(share_TE * share_TE.clamp_min(LOG_FLOOR).log()).sum(dim=-1).mean()


def weights_of(
    logits_TE: Tensor,
    scores_TE: Tensor,
    expert_TK: Tensor,
    renormalise: bool,
    softmax_after_topk: bool,
    scale: float,
) -> Tensor:
    """`slot_weights` without a configuration."""
    if softmax_after_topk:
        weight_TK = logits_TE.float().gather(1, expert_TK.long()).softmax(dim=-1)
    else:
        weight_TK = scores_TE.gather(1, expert_TK.long())
        if renormalise:
            weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weight_TK * scale


def _keep_best_groups(config: ModelConfig, choice_TE: Tensor) -> Tensor:
    best = {
        GroupScore.max: None,
        GroupScore.top2_sum: 2,
        GroupScore.topk_sum: config.top_k // config.topk_groups,
    }[config.group_score]
    return keep_best_groups(choice_TE, config.num_groups, config.topk_groups, best)


def keep_best_groups(choice_TE: Tensor, num_groups: int, topk_groups: int, best: int | None) -> Tensor:
    """The choices with -inf outside the groups with the largest sums of their ``best`` choices, or maxima."""
    choice_TGE = choice_TE.unflatten(-1, (num_groups, -1))
    if best is None:
        score_TG = choice_TGE.amax(dim=-1)
    else:
        score_TG = choice_TGE.sort(dim=-1, descending=True).values[..., :best].sum(dim=-1)
    kept_TG = torch.zeros_like(score_TG, dtype=torch.bool)
    kept_TG = kept_TG.scatter(1, top_indices(score_TG, topk_groups), True)
    return choice_TGE.masked_fill(~kept_TG.unsqueeze(-1), float("-inf")).flatten(1)


def top_indices(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest of the last axis; unlike torch.topk, ties go to the lower index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
