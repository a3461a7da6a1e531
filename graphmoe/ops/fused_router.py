"""Router scores, choice, weights and statistics as one operation with a backward of its own.

Suffixes: T tokens, E experts, K top-k slots, B sequences of S tokens (T = B * S).

On a GPU each direction is one Triton kernel (and a small one that adds partial sums in a fixed order);
elsewhere it is the plain form below, which is also what defines the results. No device sync. Given equal
scores both choose the same experts, ties included; their exp differs by a few roundings, so the choice may
differ where two scores (or sums of a group) agree to about 1e-6 of their size.
"""

from typing import Any

import torch
from torch import Tensor

from graphmoe.config.schema import ScoreFunction
from graphmoe.ops import router as plain


@torch.library.custom_op("graphmoe::router", mutates_args=())
def _forward(
    logits_TE: Tensor, bias_E: Tensor | None, chosen_TK: Tensor | None,
    num_sequences: int, top_k: int, score: str, num_groups: int, topk_groups: int, group_top: int,
    renormalise: bool, softmax_after_topk: bool, scale: float, count_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> weight_TK f32, expert_TK i32, counts_BE f32, share_sum_BE f32, z_sum f32 [], entropy_sum f32 [].

    ``logits_TE`` is fp32. ``score`` is "softmax" or "sigmoid". ``bias_E`` is added to the scores for the
    choice only. With ``num_groups`` > 1 the choice is limited to the ``topk_groups`` groups with the
    largest sum of their ``group_top`` best experts. ``chosen_TK`` replaces the choice. Ties go to the
    lower id. A NaN is the worst choice, so ids are in range and differ whatever the logits; weights and
    sums show the NaN.

    ``counts_BE``: slots per sequence and expert; with ``count_scores`` those that the scores alone would
    fill, without bias and groups. ``share_sum_BE``: the tokens' normalised scores, summed
    over each sequence. ``z_sum``: squared logsumexp, ``entropy_sum``: entropy in nats of the normalised
    scores, both summed over all tokens. Differentiable in the logits, but for experts and counts.
    """
    assert logits_TE.dtype == torch.float32, logits_TE.dtype
    weighting = (renormalise, softmax_after_topk, scale)
    if logits_TE.is_cuda:
        from graphmoe.ops import router_kernels

        sizes = (num_sequences, top_k, score, num_groups, topk_groups, group_top)
        return router_kernels.forward(logits_TE, bias_E, chosen_TK, *sizes, *weighting, count_scores)
    scores_TE = plain.scores_of(logits_TE, ScoreFunction(score))
    if chosen_TK is None:
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        expert_TK = choose(choice_TE, top_k, num_groups, topk_groups, group_top)
    else:
        expert_TK = chosen_TK.to(torch.int32, copy=True).contiguous()
    weight_TK = plain.weights_of(logits_TE, scores_TE, expert_TK, *weighting)
    counted_TK = choose(scores_TE, top_k, 1, 1, 1) if count_scores else expert_TK
    counts_BE = plain.count_per_sequence(counted_TK, num_sequences, logits_TE.shape[1])
    return weight_TK, expert_TK, counts_BE, *_sums(logits_TE, scores_TE, num_sequences)


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
    scores_TE = plain.scores_of(logits_TE, ScoreFunction(score))
    dscores_TE, dlogits_TE = torch.zeros_like(scores_TE), torch.zeros_like(scores_TE)
    if dweight_TK is not None:
        from_TE, into_TE = (logits_TE, dlogits_TE) if softmax_after_topk else (scores_TE, dscores_TE)
        value_TK = from_TE.gather(1, expert_TK.long())
        gradient_TK = _value_gradient(dweight_TK * scale, value_TK, renormalise, softmax_after_topk)
        into_TE.scatter_add_(1, expert_TK.long(), gradient_TK)
    norm_T1 = scores_TE.sum(dim=-1, keepdim=True)
    share_TE = scores_TE / norm_T1
    dshare_TE = torch.zeros_like(scores_TE)
    if dshare_sum_BE is not None:
        dshare_TE += dshare_sum_BE.repeat_interleave(len(logits_TE) // num_sequences, dim=0)
    if dentropy_sum is not None:
        # Without the 1 of (s log s)': a term that all shares have in common drops out below.
        dshare_TE -= dentropy_sum * share_TE.clamp_min(plain.LOG_FLOOR).log()
    dscores_TE += (dshare_TE - (dshare_TE * share_TE).sum(dim=-1, keepdim=True)) / norm_T1
    if score == "sigmoid":
        dlogits_TE += dscores_TE * scores_TE * (1 - scores_TE)
    else:
        dlogits_TE += scores_TE * (dscores_TE - (dscores_TE * scores_TE).sum(dim=-1, keepdim=True))
    if dz_sum is not None:
        dlogits_TE += dz_sum * 2 * logits_TE.logsumexp(dim=-1, keepdim=True) * logits_TE.softmax(dim=-1)
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
    ctx.set_materialize_grads(False)  # a result that nobody differentiates costs its gradient nothing


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    dweight_TK, _, _, dshare_sum_BE, dz_sum, dentropy_sum = gradients
    logits_TE, expert_TK = ctx.saved_tensors
    dlogits_TE = torch.ops.graphmoe.router_backward(
        dweight_TK, dshare_sum_BE, dz_sum, dentropy_sum, logits_TE, expert_TK, *ctx.arguments
    )
    return dlogits_TE, *[None] * 12


_forward.register_autograd(_backward, setup_context=_save)


def choose(choice_TE: Tensor, top_k: int, num_groups: int, topk_groups: int, group_top: int) -> Tensor:
    """The top_k experts of each token, best first -> int32 [T, K]; a NaN is the worst choice."""
    choice_TE = choice_TE.masked_fill(choice_TE.isnan(), float("-inf"))
    if num_groups > 1:
        choice_TE = plain.keep_best_groups(choice_TE, num_groups, topk_groups, group_top)
    return plain.top_indices(choice_TE, top_k).int().contiguous()


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


def _sums(logits_TE: Tensor, scores_TE: Tensor, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Shares summed over each sequence [B, E], squared logsumexp [] and entropy [] over all tokens."""
    share_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
    share_sum_BE = share_TE.view(num_sequences, -1, scores_TE.shape[1]).sum(dim=1)
    z_sum = logits_TE.logsumexp(dim=-1).square().sum()
    entropy_sum = -(share_TE * share_TE.clamp_min(plain.LOG_FLOOR).log()).sum()
    return share_sum_BE, z_sum, entropy_sum
