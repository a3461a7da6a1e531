"""Triton kernels of the router: forward, sum of its partial results, and backward.

Suffixes as in `ops.router`; P programs. A tile is TOKENS x WIDTH: experts, padded to a power of two; if they
are grouped, the number of groups and their size are each padded.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphmoe.ops import num_warps

BLOCK, THREADS = 1024, 128  # elements of a block of logits; threads
# keeps the partial sums small; not a device property, which would change the summation order
MOST_PROGRAMS = 1024
SUMMED_ROWS, SUMMED_COLUMNS = 32, 32

TAKEN = tl.constexpr(-(2**31))  # below the key of every number
NO_CHOICE = tl.constexpr(-2139095041)  # the key of -inf
NO_EXPERT = tl.constexpr(2**30)
LOW_LOGIT = tl.constexpr(-20.0)  # as graphmoe.ops.router, which imports this file


def forward(
    logits_TE: Tensor, bias_E: Tensor | None, chosen_TK: Tensor | None, num_sequences: int, top_k: int,
    score: str, num_groups: int, topk_groups: int, group_top: int, renormalise: bool,
    softmax_after_topk: bool, scale: float, count_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return weight_TK, expert_TK int32, counts_BE, share_sum_BE, z_sum [], entropy_sum [] of the router."""
    (T, E), S, device = logits_TE.shape, logits_TE.shape[0] // num_sequences, logits_TE.device
    weight_TK = torch.empty(T, top_k, dtype=torch.float32, device=device)
    expert_TK = torch.empty(T, top_k, dtype=torch.int32, device=device)
    size = E // num_groups
    padded_groups, padded_size = triton.next_power_of_2(num_groups), triton.next_power_of_2(size)
    tokens = tokens_of_block(padded_groups * padded_size, S)
    blocks = triton.cdiv(S, tokens)
    programs = max(min(blocks, MOST_PROGRAMS // max(num_sequences, 1)), 1)
    partial_PX = torch.empty(num_sequences * programs, 2 * E + 2, dtype=torch.float32, device=device)
    _forward_kernel[(len(partial_PX),)](
        logits_TE.contiguous(), None if bias_E is None else bias_E.float().contiguous(),
        None if chosen_TK is None else chosen_TK.int().contiguous(), weight_TK, expert_TK, partial_PX, S,
        programs, triton.cdiv(blocks, programs), scale,
        E=E, K=top_k, SLOTS=triton.next_power_of_2(top_k), SIGMOID=score == "sigmoid",
        RENORMALISE=renormalise, AFTER_TOPK=softmax_after_topk, COUNT_SCORES=count_scores,
        GROUPS=num_groups, PADDED_GROUPS=padded_groups, PADDED_SIZE=padded_size,
        TOPK_GROUPS=min(topk_groups, num_groups), GROUP_TOP=min(group_top, size), TOKENS=tokens,
        num_warps=num_warps(THREADS),
    )  # fmt: skip
    counts_BE, share_BE = (partial_PX.new_empty(num_sequences, E) for _ in range(2))
    z_sum, entropy_sum = (partial_PX.new_empty(()) for _ in range(2))
    _sum_kernel[(num_sequences, triton.cdiv(2 * E, SUMMED_COLUMNS) + 1)](
        partial_PX, counts_BE, share_BE, z_sum, entropy_sum, programs, len(partial_PX),
        E=E, ROWS=SUMMED_ROWS, COLUMNS=SUMMED_COLUMNS,
    )  # fmt: skip
    return weight_TK, expert_TK, counts_BE, share_BE, z_sum, entropy_sum


def backward(
    dweight_TK: Tensor | None, dshare_BE: Tensor | None, dz_sum: Tensor | None, dentropy_sum: Tensor | None,
    logits_TE: Tensor, expert_TK: Tensor, num_sequences: int, score: str, renormalise: bool,
    softmax_after_topk: bool, scale: float,
) -> Tensor:  # fmt: skip
    """Return the gradient of the logits, fp32 [T, E]."""
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


def tokens_of_block(width: int, rows: int) -> int:
    return max(min(BLOCK // width, triton.next_power_of_2(rows)), 1)


@triton.jit
def _key(x):
    """Map floats to integers in the same order; NaN is -inf, whose key is NO_CHOICE."""
    bits = tl.where(x == x, x, float("-inf")).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _number(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _first_best(key, index, AXIS: tl.constexpr):
    best = tl.max(key, AXIS)
    return tl.min(tl.where(key == tl.expand_dims(best, AXIS), index, NO_EXPERT), AXIS)


@triton.jit
def _columns(
    SIZE: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr
):
    column = tl.arange(0, PADDED_GROUPS * PADDED_SIZE)
    real, id_E = column < GROUPS * SIZE, column
    # a separate case: it hides from the compiler that ids are consecutive, so its loads are narrow
    if GROUPS > 1 and SIZE != PADDED_SIZE:
        real = (column // PADDED_SIZE < GROUPS) & (column % PADDED_SIZE < SIZE)
        id_E = tl.where(real, column // PADDED_SIZE * SIZE + column % PADDED_SIZE, NO_EXPERT)
    return id_E, real


@triton.jit
def _limit_to_groups(
    key,
    GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    key_TGE = tl.reshape(key, (TOKENS, PADDED_GROUPS, PADDED_SIZE))
    member = tl.arange(0, PADDED_SIZE)[None, None, :]
    group = tl.arange(0, PADDED_GROUPS)[None, :]
    left, score = key_TGE, tl.zeros((TOKENS, PADDED_GROUPS), tl.float32)
    for _ in range(GROUP_TOP):
        score += _number(tl.max(left, 2))
        left = tl.where(member == _first_best(left, member, 2)[:, :, None], TAKEN, left)
    group_key = tl.where(group < GROUPS, _key(score), TAKEN)
    for _ in range(TOPK_GROUPS):
        group_key = tl.where(group == _first_best(group_key, group, 1)[:, None], TAKEN, group_key)
    dropped = (group_key != TAKEN)[:, :, None] & (key_TGE != TAKEN)
    return tl.reshape(tl.where(dropped, NO_CHOICE, key_TGE), (TOKENS, PADDED_GROUPS * PADDED_SIZE))


@triton.jit
def scores_of(x, SIGMOID: tl.constexpr):
    """Return scores, `relative_scores`, their sum, shares of it, softmax, logsumexp, flags of low logits."""
    highest = tl.max(x, 1)
    power = tl.exp(x - highest[:, None])
    total = tl.sum(power, 1)
    softmax = power / total[:, None]
    score, relative, share, norm = softmax, softmax, softmax, tl.full(total.shape, 1.0, tl.float32)
    low = highest < LOW_LOGIT
    if SIGMOID:
        score = 1 / (1 + tl.exp(-x))
        relative = tl.where(low[:, None], softmax, score)
        norm = tl.sum(relative, 1)
        share = relative / norm[:, None]
    return score, relative, norm, share, softmax, highest + tl.log(total), low


@triton.jit
def _pick(
    key, value, id_1E, chosen_row, live,
    K: tl.constexpr, SLOTS: tl.constexpr, FILL: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Return ids and values of each token's K best keys, or of ids given as no -1, and counts per expert."""
    slot = tl.arange(0, SLOTS)[None, :]
    ids = tl.zeros((key.shape[0], SLOTS), tl.int32)
    picked = tl.full((key.shape[0], SLOTS), FILL, tl.float32)
    count = tl.zeros(key.shape, tl.int32)
    for k in range(K):
        best = _first_best(key, id_1E, 1)
        if CHOSEN:
            given = tl.load(chosen_row + k, mask=live, other=-1)
            best = tl.where(given < 0, best, given)
        hit = id_1E == best[:, None]
        key = tl.where(hit, TAKEN, key)
        count += hit.to(tl.int32)
        found = tl.sum(tl.where(hit, value, 0.0), 1)
        ids = tl.where(slot == k, best[:, None], ids)
        picked = tl.where(slot == k, found[:, None], picked)
    return ids, picked, count


@triton.jit
def _weights(value, AFTER_TOPK: tl.constexpr, RENORMALISE: tl.constexpr):
    if AFTER_TOPK:
        value = tl.exp(value - tl.max(value, 1)[:, None])
        value /= tl.sum(value, 1)[:, None]
    elif RENORMALISE:
        value /= (tl.sum(value, 1) + 1e-20)[:, None]
    return value


@triton.jit
def _forward_kernel(
    logits, bias, chosen, weight, expert, partial, S, programs, steps, scale,
    E: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    AFTER_TOPK: tl.constexpr, COUNT_SCORES: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr, TOPK_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Route tokens: a program takes every ``programs``-th tile of a sequence; its sums go to ``partial``."""
    WIDTH: tl.constexpr = PADDED_GROUPS * PADDED_SIZE
    sequence, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    id_E, real = _columns(E // GROUPS, GROUPS, PADDED_GROUPS, PADDED_SIZE)
    slot, real_1E = tl.arange(0, SLOTS)[None, :], real[None, :]
    share_sum = tl.zeros((TOKENS, WIDTH), tl.float32)
    count = tl.zeros((TOKENS, WIDTH), tl.int32)
    z_sum, entropy_sum = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    for step in range(steps):
        position = (step * programs + program) * TOKENS + tl.arange(0, TOKENS)
        token, live = sequence.to(tl.int64) * S + position, position < S
        at, live_T1 = token[:, None] * E + id_E[None, :], live[:, None]
        x = tl.load(logits + at, mask=live_T1 & real_1E, other=0.0)
        x = tl.where(real_1E, x, float("-inf"))
        score, relative, _, share, _, lse, _ = scores_of(x, SIGMOID)
        share_sum += tl.where(live_T1, share, 0.0)
        z_sum += tl.where(live, lse * lse, 0.0)
        entropy_sum -= tl.where(live, tl.sum(share * tl.log(tl.maximum(share, 1e-30)), 1), 0.0)
        choice = score
        if bias is not None:
            choice += tl.load(bias + id_E, mask=real, other=0.0)[None, :]
        key = tl.where(real_1E, _key(choice), TAKEN)
        if GROUPS > 1:
            key = _limit_to_groups(key, GROUPS, PADDED_GROUPS, PADDED_SIZE, TOPK_GROUPS, GROUP_TOP, TOKENS)
        source, FILL = (x, float("-inf")) if AFTER_TOPK else (relative if RENORMALISE else score, 0.0)
        row = token * K if chosen is None else chosen + token * K
        ids, value, times = _pick(key, source, id_E[None, :], row, live, K, SLOTS, FILL, chosen is not None)
        if COUNT_SCORES:
            by_score = tl.where(real_1E, _key(score), TAKEN)
            _, _, times = _pick(by_score, score, id_E[None, :], row, live, K, SLOTS, 0.0, False)
        count += tl.where(live_T1, times, 0)
        at = token[:, None] * K + slot
        tl.store(weight + at, _weights(value, AFTER_TOPK, RENORMALISE) * scale, mask=live_T1 & (slot < K))
        tl.store(expert + at, ids, mask=live_T1 & (slot < K))
    to = partial + tl.program_id(0).to(tl.int64) * (2 * E + 2)
    tl.store(to + id_E, tl.sum(count, 0).to(tl.float32), mask=real)
    tl.store(to + E + id_E, tl.sum(share_sum, 0), mask=real)
    tl.store(to + 2 * E, tl.sum(z_sum, 0))
    tl.store(to + 2 * E + 1, tl.sum(entropy_sum, 0))


@triton.jit
def _sum_rows(partial, first, last, column, COLUMNS_ALL: tl.constexpr, ROWS: tl.constexpr):
    total = tl.zeros((ROWS, column.shape[0]), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        at = row.to(tl.int64) * COLUMNS_ALL + column[None, :]
        total += tl.load(partial + at, mask=(row < last) & (column[None, :] < COLUMNS_ALL), other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _sum_kernel(
    partial, counts, share, z_sum, entropy_sum, programs, all_programs,
    E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum ``partial``: a program sums COLUMNS counts and shares of a sequence, the last one z and entropy."""
    sequence, part = tl.program_id(0), tl.program_id(1)
    if part < tl.num_programs(1) - 1:
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        total = _sum_rows(partial, sequence * programs, (sequence + 1) * programs, column, 2 * E + 2, ROWS)
        at = sequence.to(tl.int64) * E + column
        tl.store(counts + at, total, mask=column < E)
        tl.store(share + at - E, total, mask=(column >= E) & (column < 2 * E))
    elif sequence == 0:
        column = tl.arange(0, 2)
        total = _sum_rows(partial, 0, all_programs, 2 * E + column, 2 * E + 2, ROWS)
        tl.store(z_sum + column, total, mask=column == 0)
        tl.store(entropy_sum + column - 1, total, mask=column == 1)


@triton.jit
def _backward_kernel(
    dweight, dshare_sum, dz_sum, dentropy_sum, logits, expert, dlogits, T, S, scale,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    AFTER_TOPK: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Recompute the scores, and store the gradient of the logits."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)[None, :]
    live, real = token < T, column < E
    mask = live[:, None] & real
    x = tl.load(logits + token[:, None] * E + column, mask=mask, other=0.0)
    x = tl.where(real, x, float("-inf"))
    score, relative, norm, share, softmax, lse, low = scores_of(x, SIGMOID)
    dshare = tl.zeros((TOKENS, WIDTH), tl.float32)
    if dshare_sum is not None:
        dshare += tl.load(dshare_sum + (token // S)[:, None] * E + column, mask=mask, other=0.0)
    if dentropy_sum is not None:
        # (s log s)' without its 1: a term common to all shares cancels below
        dshare -= tl.load(dentropy_sum) * tl.log(tl.maximum(share, 1e-30))
    drelative = (dshare - tl.sum(dshare * share, 1)[:, None]) / norm[:, None]
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
            total = (tl.sum(relative * times, 1) + 1e-20)[:, None]
            drelative += (given - times * tl.sum(given * relative, 1)[:, None] / total) / total
        elif SIGMOID:
            drelative += given * tl.where(low, tl.exp(lse), 1.0)[:, None]  # scores / relative scores
        else:
            drelative += given
    if SIGMOID:
        # A low score is exp(logit) times a factor that cancels in shares and renormalised weights.
        dx += drelative * relative * tl.where(low[:, None], 1.0, 1 - score)
    else:
        dx += score * (drelative - tl.sum(drelative * score, 1)[:, None])
    if dz_sum is not None:
        dx += tl.load(dz_sum) * 2 * lse[:, None] * softmax
    tl.store(dlogits + token[:, None] * E + column, dx, mask=mask)
