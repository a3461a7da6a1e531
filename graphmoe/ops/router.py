"""The router: scores, group-limited top-k, weights and balance losses; fp32, no device sync.

Suffixes: T tokens, E experts, K choices of a token, G expert groups, B sequences of S tokens (T = B * S). A
pass replaces these functions by ``torch.ops.graphmoe.router``; they are its reference.
"""

from typing import Any

import torch
from torch import Tensor

from graphmoe.config.schema import AuxLoss, GroupScore, ModelConfig, ScoreFunction
from graphmoe.plan.forced_loads import UNIT

GOLDEN = round(UNIT * (5**0.5 - 1) / 2) | 1
LOG_FLOOR = 1e-30  # smallest share in the entropy's logarithm
LOW_LOGIT = -20.0  # below it a sigmoid is the exponential of its logit, to the last bit of fp32


def scores_of(logits_TE: Tensor, function: ScoreFunction) -> Tensor:
    """Return softmax or sigmoid of the logits -> fp32 [T, E]."""
    if function is ScoreFunction.sigmoid:
        return logits_TE.float().sigmoid()
    return logits_TE.float().softmax(dim=-1)


def relative_scores(logits_TE: Tensor, scores_TE: Tensor, function: ScoreFunction) -> Tensor:
    """Return scores up to a factor per token, so that low sigmoids don't underflow -> fp32 [T, E]."""
    if function is not ScoreFunction.sigmoid:
        return scores_TE
    is_low_T1 = logits_TE.amax(dim=-1, keepdim=True) < LOW_LOGIT
    # low sigmoids underflow (to 0 below -104), but their ratios are those of the softmax
    return torch.where(is_low_T1, logits_TE.softmax(dim=-1), scores_TE)


def select_experts(config: ModelConfig, choice_TE: Tensor) -> Tensor:
    """Return the top_k experts of each token, best first -> int32 [T, K]. Ties go to the lower id."""
    # experts of the best groups only (DeepSeek-V2, section 2.2.2; DeepSeek-V3, section 2.1.2)
    if config.num_groups > 1:
        best = {
            GroupScore.max: None,
            GroupScore.top2_sum: 2,
            GroupScore.topk_sum: config.top_k // config.topk_groups,
        }[config.group_score]
        choice_TE = keep_best_groups(choice_TE, config.num_groups, config.topk_groups, best)
    return top_indices(choice_TE, config.top_k).int()


def round_robin(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Tensor:
    """Return expert ids that load all experts equally, independent of scores -> int32 [T, K]."""
    slot_R = torch.arange(num_tokens * top_k, device=device, dtype=torch.int32)
    return (slot_R % num_experts).view(num_tokens, top_k)


def draw_experts(num_tokens: int, top_k: int, end_E: Tensor) -> Tensor:
    """Draw distinct experts at given loads -> int32 [T, K]. ``end_E``: int64 `plan.forced_loads.ends`."""
    # Systematic sampling: a token takes the experts at K points one unit apart; points of neighbouring tokens
    # are the golden ratio apart, so any run of tokens has nearly the loads.
    token_T1 = torch.arange(num_tokens, device=end_E.device).unsqueeze(1)
    # the mask is also correct if a compiler multiplies in 32 bits
    point_TK = (token_T1 * GOLDEN & (UNIT - 1)) + UNIT * torch.arange(top_k, device=end_E.device)
    return torch.searchsorted(end_E, point_TK, right=True, out_int32=True)


def replayed(given_TK: Tensor, own_TK: Tensor) -> Tensor:
    """Return the given experts; the own ones of tokens whose given ids are -1."""
    return torch.where(given_TK < 0, own_TK, given_TK)


def count_per_sequence(expert_TK: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    """Return how often each sequence's tokens choose each expert -> fp32 [B, E]."""
    sequence_B1 = torch.arange(num_sequences, device=expert_TK.device).unsqueeze(1)
    # a flat axis: only this scatter_add has a deterministic GPU kernel
    bin_R = (expert_TK.view(num_sequences, -1) + num_experts * sequence_B1).flatten()
    counts = torch.zeros(num_sequences * num_experts, device=expert_TK.device)
    ones_R = torch.ones(len(bin_R), device=expert_TK.device)
    return counts.scatter_add_(0, bin_R, ones_R).view(num_sequences, num_experts)


def balance_loss(mean_BE: Tensor, counts_BE: Tensor) -> Tensor:
    """Return E * sum(load share * mean score), 1 at balance -> fp32 scalar."""
    load_BE = counts_BE / counts_BE.sum(dim=-1, keepdim=True)
    return counts_BE.shape[-1] * (load_BE * mean_BE).sum(dim=-1).mean()


def balance_terms(
    config: ModelConfig, relative_TE: Tensor, counts_BE: Tensor, earlier_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return mean normalised scores and counts of choices, fp32 [B, E]; [1, E] unless per sequence."""
    share_TE = relative_TE
    if config.score_function is ScoreFunction.sigmoid:
        share_TE = relative_TE / relative_TE.sum(dim=-1, keepdim=True)
    # over each sequence (DeepSeek-V2, section 2.2.3), the micro-batch (Switch Transformer, arXiv 2101.03961,
    # section 2.2), or the global batch so far (arXiv 2501.11873), with slots of earlier micro-batches in
    # earlier_E
    mean_BE = share_TE.view(len(counts_BE), -1, config.num_experts).mean(dim=1)
    if config.aux_loss is not AuxLoss.sequence:
        mean_BE = mean_BE.mean(dim=0, keepdim=True)
        counts_BE = counts_BE.sum(dim=0, keepdim=True)
    if config.aux_loss is AuxLoss.global_batch:
        assert earlier_E is not None
        counts_BE = counts_BE + earlier_E
    return mean_BE, counts_BE


def z_loss(logits_TE: Tensor) -> Tensor:
    """Return the mean squared logsumexp of logits -> fp32 scalar (ST-MoE, arXiv 2202.08906, section 4)."""
    return logits_TE.float().logsumexp(dim=-1).square().mean()


def entropy(relative_TE: Tensor) -> Tensor:
    """Return the mean entropy of the normalised scores, in nats."""
    share_TE = relative_TE / relative_TE.sum(dim=-1, keepdim=True)
    return -(share_TE * share_TE.clamp_min(LOG_FLOOR).log()).sum(dim=-1).mean()


def weights_of(
    logits_TE: Tensor, scores_TE: Tensor, relative_TE: Tensor, expert_TK: Tensor, renormalise: bool,
    softmax_after_topk: bool, scale: float,
) -> Tensor:  # fmt: skip
    """Return the routing weights of the chosen experts -> fp32 [T, K]."""
    if softmax_after_topk:
        weight_TK = logits_TE.float().gather(1, expert_TK.long()).softmax(dim=-1)
    else:
        weight_TK = (relative_TE if renormalise else scores_TE).gather(1, expert_TK.long())
        if renormalise:
            weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weight_TK * scale


def keep_best_groups(choice_TE: Tensor, num_groups: int, topk_groups: int, best: int | None) -> Tensor:
    """Return scores, -inf outside the groups with the largest sums of ``best`` scores (None: maxima)."""
    choice_TGE = choice_TE.unflatten(-1, (num_groups, -1))
    if best is None:
        score_TG = choice_TGE.amax(dim=-1)
    else:
        score_TG = choice_TGE.sort(dim=-1, descending=True).values[..., :best].sum(dim=-1)
    kept_TG = torch.zeros_like(score_TG, dtype=torch.bool)
    kept_TG = kept_TG.scatter(1, top_indices(score_TG, topk_groups), True)
    return choice_TGE.masked_fill(~kept_TG.unsqueeze(-1), float("-inf")).flatten(1)


def top_indices(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest [T, k]; unlike torch.topk, ties go to the lower index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


@torch.library.custom_op("graphmoe::router", mutates_args=())
def _forward(
    logits_TE: Tensor, bias_E: Tensor | None, chosen_TK: Tensor | None,
    num_sequences: int, top_k: int, score: str, num_groups: int, topk_groups: int, group_top: int,
    renormalise: bool, softmax_after_topk: bool, scale: float, count_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return weight_TK, expert_TK i32, counts_BE, share_sum_BE, z_sum [], entropy_sum []; all but ids fp32.

    ``bias_E`` changes the selection, ``chosen_TK`` replaces it in rows without -1; with ``count_scores``
    counts ignore bias and groups. A group's score is the sum of its ``group_top`` best.
    """
    assert logits_TE.dtype == torch.float32, logits_TE.dtype
    weighting = (renormalise, softmax_after_topk, scale)
    if logits_TE.is_cuda:
        from graphmoe.ops import router_kernels

        # The kernel's exp differs by roundings, so the choice may differ if two scores agree to about 1e-6.
        sizes = (num_sequences, top_k, score, num_groups, topk_groups, group_top)
        return router_kernels.forward(logits_TE, bias_E, chosen_TK, *sizes, *weighting, count_scores)
    scores_TE = scores_of(logits_TE, ScoreFunction(score))
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    expert_TK = choose(choice_TE, top_k, num_groups, topk_groups, group_top)
    if chosen_TK is not None:
        expert_TK = replayed(chosen_TK.int(), expert_TK).contiguous()
    relative_TE = relative_scores(logits_TE, scores_TE, ScoreFunction(score))
    weight_TK = weights_of(logits_TE, scores_TE, relative_TE, expert_TK, *weighting)
    counted_TK = choose(scores_TE, top_k, 1, 1, 1) if count_scores else expert_TK
    counts_BE = count_per_sequence(counted_TK, num_sequences, logits_TE.shape[1])
    return weight_TK, expert_TK, counts_BE, *_sums(logits_TE, relative_TE, num_sequences)


@torch.library.custom_op("graphmoe::router_backward", mutates_args=())
def _backward_op(
    dweight_TK: Tensor | None, dshare_sum_BE: Tensor | None, dz_sum: Tensor | None,
    dentropy_sum: Tensor | None, logits_TE: Tensor, expert_TK: Tensor,
    num_sequences: int, score: str, renormalise: bool, softmax_after_topk: bool, scale: float,
) -> Tensor:  # fmt: skip
    if logits_TE.is_cuda:
        from graphmoe.ops import router_kernels

        settings = (num_sequences, score, renormalise, softmax_after_topk, scale)
        return router_kernels.backward(
            dweight_TK, dshare_sum_BE, dz_sum, dentropy_sum, logits_TE, expert_TK, *settings
        )
    scores_TE = scores_of(logits_TE, ScoreFunction(score))
    relative_TE = relative_scores(logits_TE, scores_TE, ScoreFunction(score))
    is_low_T1 = logits_TE.amax(dim=-1, keepdim=True) < LOW_LOGIT
    lse_T1 = logits_TE.logsumexp(dim=-1, keepdim=True)
    drelative_TE, dlogits_TE = torch.zeros_like(scores_TE), torch.zeros_like(scores_TE)
    if dweight_TK is not None:
        from_TE, into_TE = (logits_TE, dlogits_TE) if softmax_after_topk else (relative_TE, drelative_TE)
        value_TK = from_TE.gather(1, expert_TK.long())
        gradient_TK = _value_gradient(dweight_TK * scale, value_TK, renormalise, softmax_after_topk)
        if score == "sigmoid" and not (renormalise or softmax_after_topk):
            gradient_TK = gradient_TK * torch.where(is_low_T1, lse_T1.exp(), 1.0)  # scores / relative scores
        into_TE.scatter_add_(1, expert_TK.long(), gradient_TK)
    norm_T1 = relative_TE.sum(dim=-1, keepdim=True)
    share_TE = relative_TE / norm_T1
    dshare_TE = torch.zeros_like(scores_TE)
    if dshare_sum_BE is not None:
        dshare_TE += dshare_sum_BE.repeat_interleave(len(logits_TE) // num_sequences, dim=0)
    if dentropy_sum is not None:
        # (s log s)' without its 1: a term common to all shares cancels below
        dshare_TE -= dentropy_sum * share_TE.clamp_min(LOG_FLOOR).log()
    drelative_TE += (dshare_TE - (dshare_TE * share_TE).sum(dim=-1, keepdim=True)) / norm_T1
    if score == "sigmoid":
        # A low score is exp(logit) times a factor that cancels in shares and renormalised weights.
        dlogits_TE += drelative_TE * relative_TE * torch.where(is_low_T1, 1.0, 1 - scores_TE)
    else:
        dlogits_TE += scores_TE * (drelative_TE - (drelative_TE * scores_TE).sum(dim=-1, keepdim=True))
    if dz_sum is not None:
        dlogits_TE += dz_sum * 2 * lse_T1 * logits_TE.softmax(dim=-1)
    return dlogits_TE


@_forward.register_fake
def _(logits_TE: Tensor, bias_E: Any, chosen_TK: Any, num_sequences: int, top_k: int, *_: Any) -> Any:
    T, E = logits_TE.shape
    sizes = (T, top_k), (num_sequences, E), (num_sequences, E), (), ()
    weight_TK, *sums = (logits_TE.new_empty(size) for size in sizes)
    return weight_TK, logits_TE.new_empty(T, top_k, dtype=torch.int32), *sums


_backward_op.register_fake(lambda *arguments: arguments[4].new_empty(arguments[4].shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_TE, _, _, num_sequences, _, score, _, _, _, renormalise, softmax_after_topk, scale, _ = inputs
    ctx.save_for_backward(logits_TE, output[1])
    ctx.arguments = num_sequences, score, renormalise, softmax_after_topk, scale
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)  # unused gradients are None instead of zeros


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    dweight_TK, _, _, dshare_sum_BE, dz_sum, dentropy_sum = gradients
    logits_TE, expert_TK = ctx.saved_tensors
    dlogits_TE = torch.ops.graphmoe.router_backward(
        dweight_TK, dshare_sum_BE, dz_sum, dentropy_sum, logits_TE, expert_TK, *ctx.arguments
    )
    return dlogits_TE, *[None] * 12


_forward.register_autograd(_backward, setup_context=_save)


def choose(choice_TE: Tensor, top_k: int, num_groups: int, topk_groups: int, group_top: int) -> Tensor:
    """Return the top_k experts of each token, best first -> int32 [T, K]; NaN ranks last."""
    # NaN ranks last, so ids are valid and distinct
    choice_TE = choice_TE.masked_fill(choice_TE.isnan(), float("-inf"))
    if num_groups > 1:
        choice_TE = keep_best_groups(choice_TE, num_groups, topk_groups, group_top)
    return top_indices(choice_TE, top_k).int().contiguous()


def _value_gradient(
    dweight_TK: Tensor, value_TK: Tensor, renormalise: bool, softmax_after_topk: bool
) -> Tensor:
    if softmax_after_topk:
        weight_TK = value_TK.softmax(dim=-1)
        return weight_TK * (dweight_TK - (dweight_TK * weight_TK).sum(dim=-1, keepdim=True))
    if not renormalise:
        return dweight_TK
    norm_T1 = value_TK.sum(dim=-1, keepdim=True) + 1e-20
    return (dweight_TK - (dweight_TK * value_TK).sum(dim=-1, keepdim=True) / norm_T1) / norm_T1


def _sums(logits_TE: Tensor, relative_TE: Tensor, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    share_TE = relative_TE / relative_TE.sum(dim=-1, keepdim=True)
    share_sum_BE = share_TE.view(num_sequences, -1, relative_TE.shape[1]).sum(dim=1)
    z_sum = logits_TE.logsumexp(dim=-1).square().sum()
    entropy_sum = -(share_TE * share_TE.clamp_min(LOG_FLOOR).log()).sum()
    return share_sum_BE, z_sum, entropy_sum
