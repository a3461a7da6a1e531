"""Head and cross-entropy on a GPU: library GEMMs around one Triton kernel per chunk.

Suffixes as in `ops.linear_cross_entropy`. Logits are one buffer in the dtype of h; the kernel turns them into
their gradient in place.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import functools
import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphmoe.ops import num_warps
from graphmoe.ops.collectives import Part, over_ranks, part_of

log = logging.getLogger(__name__)
DTYPES = (torch.bfloat16, torch.float32)
THREADS, BLOCK, STAGES = 512, 8192, 3  # threads, logits in flight, pipeline stages
TOTAL_BLOCK = 1024
ALIGNMENT = 64  # elements of row padding: GEMMs need rows aligned to 16 bytes or more
BOTH, SUMS, GRADIENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # steps of `_rows_kernel`
LOWEST = tl.constexpr(-1e30)  # finite: -inf - -inf would be NaN for lanes that only saw padding


def forward(
    h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, ignore_index: int, rows: int, trains_w: bool = True,
    part: Part | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return loss [], count [], dh_TD and dw_VD (fp32), computed ``rows`` tokens at a time."""
    h_TD, w_VD, labels_T = h_TD.contiguous(), w_VD.contiguous(), labels_T.contiguous()
    T, V, part = len(h_TD), len(w_VD), part or part_of("", len(w_VD))
    f32, device = torch.float32, h_TD.device
    dh_TD = torch.empty_like(h_TD)
    dw_VD = torch.empty(w_VD.shape if trains_w else (0,), dtype=f32, device=device)
    if T == 0:
        dw_VD.zero_()
    stride = triton.cdiv(V, ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(min(rows, T), stride, dtype=h_TD.dtype, device=device)
    loss_T = torch.empty(T, dtype=f32, device=device)
    lse_T = torch.empty(T, dtype=f32, device=device) if part.group else loss_T
    block, group = min(BLOCK, triton.next_power_of_2(max(V, 256))), 16 // h_TD.element_size()
    for start in range(0, T, rows):
        h_CD = h_TD[start : start + rows]
        logits_CV = buffer[: len(h_CD), :V]
        torch.mm(h_CD, w_VD.T, out=logits_CV)
        for step in (SUMS, GRADIENT) if part.group else (BOTH,):
            _rows_kernel[(len(h_CD),)](
                logits_CV, loss_T, lse_T, labels_T, start, part.first, V, part.whole, stride, ignore_index,
                STEP=step.value, BLOCK=block, GROUP=group, STAGES=STAGES,
                num_warps=num_warps(min(THREADS, block // group)),
            )  # fmt: skip
            if step == SUMS:  # the label's logit is in place of the loss
                of_chunk = (sums_T[start : start + rows] for sums_T in (lse_T, loss_T))
                lse_C, at_label_C = over_ranks(part, *of_chunk)
                lse_T[start : start + rows] = lse_C
                loss_T[start : start + rows] = lse_C - at_label_C
        torch.mm(logits_CV, w_VD, out=dh_TD[start : start + rows])
        if trains_w:
            _add_product(dw_VD, logits_CV.T, h_CD, first=start == 0)
    loss, count = (torch.empty((), dtype=dtype, device=device) for dtype in (f32, torch.int64))
    _total_kernel[(1,)](loss_T, labels_T, loss, count, T, ignore_index, BLOCK=TOTAL_BLOCK)
    return loss, count, dh_TD, dw_VD


def _add_product(sum_VD: Tensor, d_VC: Tensor, h_CD: Tensor, *, first: bool) -> None:
    if h_CD.dtype == torch.float32:
        torch.addmm(sum_VD, d_VC, h_CD, beta=0 if first else 1, out=sum_VD)
    elif not _has_fp32_products(h_CD.device.type, h_CD.dtype):
        product = torch.mm(d_VC, h_CD)  # rounded to bf16 once for each chunk
        sum_VD.copy_(product) if first else sum_VD.add_(product)
    elif first:
        torch.mm(d_VC, h_CD, out_dtype=torch.float32, out=sum_VD)
    else:
        torch.addmm(sum_VD, d_VC, h_CD, out_dtype=torch.float32, out=sum_VD)


@functools.cache
def _has_fp32_products(device_type: str, dtype: torch.dtype) -> bool:
    # ROCm builds may not add bf16 products to an fp32 matrix
    a, total = (torch.zeros(16, 16, dtype=d, device=device_type) for d in (dtype, torch.float32))
    try:
        torch.mm(a, a, out_dtype=torch.float32, out=total)
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        log.warning("the head's weight gradient is rounded to %s once per chunk, because %s", dtype, error)
        return False
    return True


@triton.jit
def _add_block(x, highest, total):
    """Update maxima and sums of an online logsumexp by a block of x: one exp per logit and one per group."""
    new = tl.maximum(highest, tl.max(x, 1))
    return new, total * tl.exp(highest - new) + tl.sum(tl.exp(x - new[:, None]), 1)


@triton.jit
def _gradient(x, column, label, lse):
    return tl.exp(x - lse) - tl.where(column == label, 1.0, 0.0)


@triton.jit
def _rows_kernel(
    logits, losses, lses, labels, start, first, V, whole, stride, ignore_index,
    STEP: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the loss of one token, and replace its logits by softmax - one-hot.

    If ranks share the vocabulary these are two steps, between which they join their sums: SUMS stores the
    log-sum-exp of this rank's logits, and its label's logit in place of the loss.
    """
    token, base = start + tl.program_id(0), logits + tl.program_id(0).to(tl.int64) * stride
    LANES: tl.constexpr = BLOCK // GROUP
    column = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    blocks = V // BLOCK  # whole blocks: their loads need no mask, so they are wide
    tail = blocks * BLOCK + column
    label = tl.load(labels + token)
    if label != ignore_index:
        own = label - first
        if STEP == GRADIENT:
            lse = tl.load(lses + token)
        else:
            # before any barrier: other warps overwrite it in the second pass; an invalid label gives NaN
            at_label = tl.load(base + own, mask=(own >= 0) & (own < V), other=0.0).to(tl.float32)
            at_label = tl.where((label >= 0) & (label < whole), at_label, float("nan"))
            highest, total = tl.full((LANES,), LOWEST, tl.float32), tl.zeros((LANES,), tl.float32)
            for i in tl.range(blocks, num_stages=STAGES):
                x = tl.load(base + i * BLOCK + column).to(tl.float32)
                highest, total = _add_block(x, highest, total)
            if blocks * BLOCK < V:
                x = tl.load(base + tail, mask=tail < V, other=float("-inf")).to(tl.float32)
                highest, total = _add_block(x, highest, total)
            top = tl.max(highest, 0)
            lse = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
            if STEP == SUMS:
                tl.store(lses + token, lse)
            tl.store(losses + token, at_label if STEP == SUMS else lse - at_label)
        if STEP != SUMS:
            if blocks * BLOCK < V:
                x = tl.load(base + tail, mask=tail < V, other=float("-inf")).to(tl.float32)
                tl.store(base + tail, _gradient(x, tail, own, lse), mask=tail < V)
            for i in tl.range(blocks, num_stages=STAGES):
                # backwards, so that the second pass starts with what is still in the cache
                here = (blocks - 1 - i) * BLOCK + column
                x = tl.load(base + here).to(tl.float32)
                tl.store(base + here, _gradient(x, here, own, lse))
    else:
        tl.store(losses + token, 0.0)
        if STEP == SUMS:
            tl.store(lses + token, 0.0)
        else:
            for i in range(blocks):
                tl.store(base + i * BLOCK + column, tl.zeros((LANES, GROUP), tl.float32))
            if blocks * BLOCK < V:
                tl.store(base + tail, tl.zeros((LANES, GROUP), tl.float32), mask=tail < V)


@triton.jit
def _total_kernel(losses, labels, total, count, T, ignore_index, BLOCK: tl.constexpr):
    # a single program, so the summation order depends on T only
    loss, kept = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int64)
    for start in range(0, T, BLOCK):
        token = start + tl.arange(0, BLOCK)
        loss += tl.load(losses + token, mask=token < T, other=0.0)
        label = tl.load(labels + token, mask=token < T, other=ignore_index)
        kept += (label != ignore_index).to(tl.int64)
    tl.store(total, tl.sum(loss, 0))
    tl.store(count, tl.sum(kept, 0))
