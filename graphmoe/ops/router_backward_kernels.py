"""Triton kernel of the router's backward.

Suffixes: T tokens, E experts, K top-k slots, B sequences of S tokens. In the kernel a block has TOKENS rows
and WIDTH columns, the experts padded to a power of two.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphmoe.ops.router_kernels import THREADS, scores_of, tokens_of_block
from graphmoe.ops.vendors import num_warps


def backward(
    dweight_TK: Tensor | None,
    dshare_BE: Tensor | None,
    dz_sum: Tensor | None,
    dentropy_sum: Tensor | None,
    logits_TE: Tensor,
    expert_TK: Tensor,
    num_sequences: int,
    score: str,
    renormalise: bool,
    softmax_after_topk: bool,
    scale: float,
) -> Tensor:
    """Gradient of the logits, fp32 [T, E]."""
    T, E = logits_TE.shape
    dlogits_TE = torch.empty(T, E, dtype=torch.float32, device=logits_TE.device)
    width = triton.next_power_of_2(E)
    tokens = tokens_of_block(width, T)
    _backward_kernel[(triton.cdiv(T, tokens),)](
        None if dweight_TK is None else dweight_TK.contiguous(),
        None if dshare_BE is None else dshare_BE.contiguous(), dz_sum, dentropy_sum, logits_TE.contiguous(),
        expert_TK.contiguous(), dlogits_TE, T, T // num_sequences, scale,
        E=E, K=expert_TK.shape[1], SIGMOID=score == "sigmoid", RENORMALISE=renormalise,
        AFTER_TOPK=softmax_after_topk, WIDTH=width, TOKENS=tokens, num_warps=num_warps(THREADS),
    )  # fmt: skip
    return dlogits_TE


@triton.jit
def _backward_kernel(
    dweight, dshare_sum, dz_sum, dentropy_sum, logits, expert, dlogits, T, S, scale,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    AFTER_TOPK: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Scores again, then the chain rule over all experts; a slot's terms are spread over the columns."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)[None, :]
    live, real = token < T, column < E
    mask = live[:, None] & real
    x = tl.load(logits + token[:, None] * E + column, mask=mask, other=0.0)
    x = tl.where(real, x, float("-inf"))
    score, share, softmax, lse, norm = scores_of(x, SIGMOID)
    dshare = tl.zeros((TOKENS, WIDTH), tl.float32)
    if dshare_sum is not None:
        dshare += tl.load(dshare_sum + (token // S)[:, None] * E + column, mask=mask, other=0.0)
    if dentropy_sum is not None:
        # Without the 1 of (s log s)': a term that all shares have in common drops out below.
        dshare -= tl.load(dentropy_sum) * tl.log(tl.maximum(share, 1e-30))
    dscore = (dshare - tl.sum(dshare * share, 1)[:, None]) / norm[:, None]
    dx = tl.zeros((TOKENS, WIDTH), tl.float32)
    if dweight is not None:
        given, times = tl.zeros((TOKENS, WIDTH), tl.float32), tl.zeros((TOKENS, WIDTH), tl.float32)
        for k in range(K):
            hit = column == tl.load(expert + token * K + k, mask=live, other=-1)[:, None]
            given += tl.where(hit, tl.load(dweight + token * K + k, mask=live, other=0.0)[:, None], 0.0)
            times += tl.where(hit, 1.0, 0.0)
        given *= scale
        if AFTER_TOPK:
            highest = tl.max(tl.where(times > 0, x, float("-inf")), 1)
            power = tl.where(times > 0, tl.exp(x - highest[:, None]), 0.0)
            power /= tl.sum(power * times, 1)[:, None]
            dx += power * (given - times * tl.sum(given * power, 1)[:, None])
        elif RENORMALISE:
            total = (tl.sum(score * times, 1) + 1e-20)[:, None]
            dscore += (given - times * tl.sum(given * score, 1)[:, None] / total) / total
        else:
            dscore += given
    if SIGMOID:
        dx += dscore * score * (1 - score)
    else:
        dx += score * (dscore - tl.sum(dscore * score, 1)[:, None])
    if dz_sum is not None:
        dx += tl.load(dz_sum) * 2 * lse[:, None] * softmax
    tl.store(dlogits + token[:, None] * E + column, dx, mask=mask)
