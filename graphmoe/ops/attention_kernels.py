"""Triton kernels of causal attention in which each query sees an interval of keys that ends at itself.

The first key of query i is the later of ``first_BS[b, i]``, which does not decrease along S, and i - window
+ 1. Blocks outside the intervals are skipped. Algorithm: FlashAttention-2 (arXiv 2307.08691). Sums are fp32
and results deterministic: no kernel has atomics. Shapes as in ``graphmoe.ops.attention``.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphmoe.ops import num_warps

LOG2E = tl.constexpr(1.4426950408889634)
IS_ROCM = torch.version.hip is not None


class Tile(NamedTuple):
    queries: int
    keys: int
    threads: int
    stages: int


def forward_tile(bytes_of_row: int) -> Tile:
    """``bytes_of_row``: of a key and a value. Measured on an H200 at 64/64, 128/128 and 192/128 in bf16."""
    if IS_ROCM:  # larger tiles of fp32 need 64 KiB of LDS, and spill in the backward
        return Tile(32 if bytes_of_row > 1024 else 64, 32, 256, 1)
    small = Tile(64, 64, 128, 3) if bytes_of_row <= 512 else Tile(128, 64, 256, 3)
    return small if bytes_of_row <= 640 else Tile(64, 32, 128, 1 if bytes_of_row > 1024 else 2)


def backward_tile(bytes_of_row: int) -> Tile:
    large, small = ((32, 16, 256, 1), (64, 32, 256, 1)) if IS_ROCM else ((32, 32, 128, 1), (64, 32, 128, 3))
    return Tile(*(large if bytes_of_row > 1024 else small))


@triton.jit
def _load(ptr, row, stride, column, num_rows, SIZE: tl.constexpr, TRANSPOSED: tl.constexpr):
    at, inside = row.to(tl.int64) * stride, row < num_rows
    if TRANSPOSED:
        at, inside, column = at[None, :], inside[None, :], column[:, None]
    else:
        at, inside, column = at[:, None], inside[:, None], column[None, :]
    return tl.load(ptr + at + column, mask=inside & (column < SIZE), other=0.0)


@triton.jit
def _first_keys(first_ptr, query, S, window, HAS_FIRST: tl.constexpr):
    first = tl.maximum(query - window + 1, 0)
    if HAS_FIRST:
        first = tl.maximum(first, tl.load(first_ptr + query, mask=query < S, other=0))
    return first


@triton.jit
def _key_blocks(first_ptr, top, S, window, HAS_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    # Keys [begin, full) need a mask for their first keys, [full, diagonal) none, [diagonal, end) the causal.
    end = tl.minimum(top + BM, S)
    begin, full = tl.maximum(top - window + 1, 0), tl.maximum(end - window, 0)
    if HAS_FIRST:
        begin = tl.maximum(begin, tl.load(first_ptr + top))
        full = tl.maximum(full, tl.load(first_ptr + end - 1))
    begin = begin // BN * BN
    diagonal = tl.maximum(top // BN * BN, begin)
    full = tl.maximum(tl.minimum(tl.cdiv(full, BN) * BN, diagonal), begin)
    return begin, full, diagonal, end


@triton.jit
def _products(
    x, x_tail, ptr, stride, row, num_rows, E: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    other = _load(ptr, row, stride, tl.arange(0, HEAD), num_rows, E, True)
    product, other_tail = tl.dot(x, other, input_precision=PRECISION), other
    if TAIL > 0:
        other_tail = _load(ptr, row, stride, HEAD + tl.arange(0, TAIL), num_rows, E, True)
        product = tl.dot(x_tail, other_tail, product, input_precision=PRECISION)
    return product, other, other_tail


@triton.jit
def _attend(
    total, weight, top, q, q_tail, k_ptr, v_ptr, k_stride, v_stride, query, first, begin, end, S, scale,
    MASK: tl.constexpr, E: tl.constexpr, V: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    VALUE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, BN):
        key = start + tl.arange(0, BN)
        logit, _, _ = _products(q, q_tail, k_ptr, k_stride, key, S, E, HEAD, TAIL, PRECISION)
        logit *= scale
        if MASK:
            seen = (key[None, :] >= first[:, None]) & (key[None, :] <= query[:, None])
            logit = tl.where(seen, logit, float("-inf"))
        highest = tl.maximum(top, tl.max(logit, 1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)  # a query without keys so far
        p, before = tl.exp2(logit - finite[:, None]), tl.exp2(top - finite)
        weight = weight * before + tl.sum(p, 1)
        v = _load(v_ptr, key, v_stride, tl.arange(0, VALUE), S, V, False)
        total = tl.dot(p.to(v.dtype), v, total * before[:, None], input_precision=PRECISION)
        top = highest
    return total, weight, top


@triton.jit(do_not_specialize=["window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, sinks_ptr, out_ptr, lse_ptr,
    q_batch, q_stride, q_head, k_batch, k_stride, k_head, v_batch, v_stride, v_head, S, window, scale,
    H: tl.constexpr, G: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_SINKS: tl.constexpr, E: tl.constexpr,
    V: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, VALUE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # the longest first
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // (H // G)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + group * k_head
    v_ptr += batch * v_batch + group * v_head
    if HAS_FIRST:
        first_ptr += batch * S
    query = start + tl.arange(0, BM)
    first = _first_keys(first_ptr, query, S, window, HAS_FIRST)
    begin, full, diagonal, end = _key_blocks(first_ptr, start, S, window, HAS_FIRST, BM, BN)
    q = _load(q_ptr, query, q_stride, tl.arange(0, HEAD), S, E, False)
    q_tail = q
    if TAIL > 0:
        q_tail = _load(q_ptr, query, q_stride, HEAD + tl.arange(0, TAIL), S, E, False)
    top = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM, VALUE], tl.float32)
    for part in tl.static_range(3):
        lower = begin if part == 0 else (full if part == 1 else diagonal)
        upper = full if part == 0 else (diagonal if part == 1 else end)
        total, weight, top = _attend(
            total, weight, top, q, q_tail, k_ptr, v_ptr, k_stride, v_stride, query, first, lower, upper, S,
            scale, part != 1, E, V, HEAD, TAIL, VALUE, BN, PRECISION,
        )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        highest = tl.maximum(top, sink)
        before = tl.exp2(top - highest)
        weight = weight * before + tl.exp2(sink - highest)
        total, top = total * before[:, None], highest
    some = weight != 0  # of NaN too
    out = total / tl.where(some, weight, 1.0)[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, weight, 1.0))) / LOG2E, float("-inf"))
    column = tl.arange(0, VALUE)
    at = ((batch * S + query) * H + head)[:, None] * V + column[None, :]
    inside = query < S
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (column < V)[None, :])
    tl.store(lse_ptr + (batch * H + head) * S + query, lse, mask=inside)


@triton.jit
def delta_kernel(
    out_ptr, grad_ptr, delta_ptr, batch_stride, grad_stride, head_stride, S,
    H: tl.constexpr, V: tl.constexpr, VALUE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0) * BM + tl.arange(0, BM)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, VALUE)
    out = _load(out_ptr + (batch * S * H + head) * V, query, H * V, column, S, V, False)
    grad_ptr += batch * batch_stride + head * head_stride
    grad = _load(grad_ptr, query, grad_stride, column, S, V, False)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + (batch * H + head) * S + query, delta, mask=query < S)


@triton.jit
def _log2_weight(lse_ptr, query, S):
    # an infinite weight makes the probability of every key 0
    lse = tl.load(lse_ptr + query, mask=query < S, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E


@triton.jit
def _add_dq(
    dq, dq_tail, q, q_tail, grad, lse, delta, k_ptr, v_ptr, k_stride, v_stride, query, first, begin, end, S,
    scale, MASK: tl.constexpr, E: tl.constexpr, V: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    VALUE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, BN):
        key = start + tl.arange(0, BN)
        logit, k, k_tail = _products(q, q_tail, k_ptr, k_stride, key, S, E, HEAD, TAIL, PRECISION)
        p = tl.exp2(logit * scale - lse[:, None])
        if MASK:
            p = tl.where((key[None, :] >= first[:, None]) & (key[None, :] <= query[:, None]), p, 0.0)
        v = _load(v_ptr, key, v_stride, tl.arange(0, VALUE), S, V, True)
        dp = tl.dot(grad, v, input_precision=PRECISION)
        d_logit = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(d_logit, tl.trans(k), dq, input_precision=PRECISION)
        if TAIL > 0:
            dq_tail = tl.dot(d_logit, tl.trans(k_tail), dq_tail, input_precision=PRECISION)
    return dq, dq_tail


@triton.jit(do_not_specialize=["window"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_batch, q_stride, q_head, k_batch, k_stride, k_head, v_batch, v_stride, v_head,
    grad_batch, grad_stride, grad_head, S, window, scale,
    H: tl.constexpr, G: tl.constexpr, HAS_FIRST: tl.constexpr, E: tl.constexpr, V: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, VALUE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // (H // G)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + group * k_head
    v_ptr += batch * v_batch + group * v_head
    grad_ptr += batch * grad_batch + head * grad_head
    if HAS_FIRST:
        first_ptr += batch * S
    query = start + tl.arange(0, BM)
    first = _first_keys(first_ptr, query, S, window, HAS_FIRST)
    begin, full, diagonal, end = _key_blocks(first_ptr, start, S, window, HAS_FIRST, BM, BN)
    q = _load(q_ptr, query, q_stride, tl.arange(0, HEAD), S, E, False)
    q_tail, dq, dq_tail = q, tl.zeros([BM, HEAD], tl.float32), 0.0
    if TAIL > 0:
        q_tail = _load(q_ptr, query, q_stride, HEAD + tl.arange(0, TAIL), S, E, False)
        dq_tail = tl.zeros([BM, TAIL], tl.float32)
    grad = _load(grad_ptr, query, grad_stride, tl.arange(0, VALUE), S, V, False)
    lse = _log2_weight(lse_ptr + (batch * H + head) * S, query, S)
    delta = tl.load(delta_ptr + (batch * H + head) * S + query, mask=query < S, other=0.0)
    for part in tl.static_range(3):
        lower = begin if part == 0 else (full if part == 1 else diagonal)
        upper = full if part == 0 else (diagonal if part == 1 else end)
        dq, dq_tail = _add_dq(
            dq, dq_tail, q, q_tail, grad, lse, delta, k_ptr, v_ptr, k_stride, v_stride, query, first, lower,
            upper, S, scale * LOG2E, part != 1, E, V, HEAD, TAIL, VALUE, BN, PRECISION,
        )  # fmt: skip
    _store_rows(dq_ptr, (batch * S + query) * H + head, query < S, dq, dq_tail, scale, E, HEAD, TAIL)


@triton.jit
def _store_rows(ptr, row, inside, x, tail, factor, E: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):
    column, at = tl.arange(0, HEAD), (row * E)[:, None]
    known = inside[:, None] & (column < E)[None, :]
    tl.store(ptr + at + column[None, :], (x * factor).to(ptr.dtype.element_ty), mask=known)
    if TAIL > 0:
        column = HEAD + tl.arange(0, TAIL)
        known = inside[:, None] & (column < E)[None, :]
        tl.store(ptr + at + column[None, :], (tail * factor).to(ptr.dtype.element_ty), mask=known)


@triton.jit
def _add_dkv(
    dk, dk_tail, dv, k, k_tail, v, key, q_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, q_stride, grad_stride,
    begin, end, S, window, scale, MASK: tl.constexpr, HAS_FIRST: tl.constexpr, E: tl.constexpr,
    V: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, VALUE: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, BM):
        query = start + tl.arange(0, BM)
        logit, q, q_tail = _products(k, k_tail, q_ptr, q_stride, query, S, E, HEAD, TAIL, PRECISION)
        p = tl.exp2(logit * scale - _log2_weight(lse_ptr, query, S)[None, :])
        if MASK:
            first = _first_keys(first_ptr, query, S, window, HAS_FIRST)
            seen = (key[:, None] >= first[None, :]) & (key[:, None] <= query[None, :])
            p = tl.where(seen, p, 0.0)
        grad = _load(grad_ptr, query, grad_stride, tl.arange(0, VALUE), S, V, False)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        delta = tl.load(delta_ptr + query, mask=query < S, other=0.0)
        d_logit = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(d_logit, tl.trans(q), dk, input_precision=PRECISION)
        if TAIL > 0:
            dk_tail = tl.dot(d_logit, tl.trans(q_tail), dk_tail, input_precision=PRECISION)
    return dk, dk_tail, dv


@triton.jit(do_not_specialize=["window"])
def dkv_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, stop_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_batch, q_stride, q_head, k_batch, k_stride, k_head, v_batch, v_stride, v_head,
    grad_batch, grad_stride, grad_head, S, window, scale,
    H: tl.constexpr, G: tl.constexpr, HAS_FIRST: tl.constexpr, E: tl.constexpr, V: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, VALUE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BN
    group, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key, end = start + tl.arange(0, BN), tl.minimum(start + BN, S)
    q_ptr += batch * q_batch
    grad_ptr += batch * grad_batch
    k_ptr += batch * k_batch + group * k_head
    k = _load(k_ptr, key, k_stride, tl.arange(0, HEAD), S, E, False)
    v_ptr += batch * v_batch + group * v_head
    v = _load(v_ptr, key, v_stride, tl.arange(0, VALUE), S, V, False)
    k_tail, dk_tail = k, 0.0
    if TAIL > 0:
        k_tail = _load(k_ptr, key, k_stride, HEAD + tl.arange(0, TAIL), S, E, False)
        dk_tail = tl.zeros([BN, TAIL], tl.float32)
    dk, dv = tl.zeros([BN, HEAD], tl.float32), tl.zeros([BN, VALUE], tl.float32)
    # Queries [start, full) need the causal mask, [full, partial) none, [partial, last) that of first keys.
    last, partial = tl.minimum(end - 1 + window, S), tl.minimum(start + window, S)
    if HAS_FIRST:
        last = tl.minimum(last, tl.load(stop_ptr + batch * S + end - 1))
        partial = tl.minimum(partial, tl.load(stop_ptr + batch * S + start))
        first_ptr += batch * S
    full = tl.minimum(tl.cdiv(end - 1, BM), tl.cdiv(last, BM)) * BM
    partial = tl.maximum(partial // BM * BM, full)
    begin = start // BM * BM
    for number in range(H // G):
        head = group * (H // G) + number
        of_head, grad_of_head = q_ptr + head * q_head, grad_ptr + head * grad_head
        row = (batch * H + head) * S
        for part in tl.static_range(3):
            lower = begin if part == 0 else (full if part == 1 else partial)
            upper = full if part == 0 else (partial if part == 1 else last)
            dk, dk_tail, dv = _add_dkv(
                dk, dk_tail, dv, k, k_tail, v, key, of_head, grad_of_head, lse_ptr + row, delta_ptr + row,
                first_ptr, q_stride, grad_stride, lower, upper, S, window, scale * LOG2E, part != 1,
                HAS_FIRST, E, V, HEAD, TAIL, VALUE, BM, PRECISION,
            )  # fmt: skip
    row = (batch * S + key) * G + group
    _store_rows(dk_ptr, row, key < S, dk, dk_tail, scale, E, HEAD, TAIL)
    _store_rows(dv_ptr, row, key < S, dv, dv, 1.0, V, VALUE, 0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return out [B, S, H, V] in the dtype of q, and the fp32 log-sum-exp [B, H, S], of a sink too."""
    (B, S, H, _), V = q.shape, v.shape[-1]
    out, lse = q.new_empty(B, S, H, V), q.new_empty(B, H, S, dtype=torch.float32)
    tile = forward_tile(_bytes_of_row(q, v))
    forward_kernel[(triton.cdiv(S, tile.queries), H, B)](
        q, k, v, first, sinks, out, lse, *_strides(q, k, v), S, window or S, scale * LOG2E.value,
        HAS_SINKS=sinks is not None, **_constants(q, v, first, tile),
    )  # fmt: skip
    return out, lse


def deltas(d_out: Tensor, out: Tensor) -> Tensor:
    """Return the sums over V of out * d_out, fp32 [B, H, S]; ``out`` is contiguous."""
    B, S, H, V = out.shape
    delta, grid = out.new_empty(B, H, S, dtype=torch.float32), (triton.cdiv(S, 64), H, B)
    delta_kernel[grid](out, d_out, delta, *_strides(d_out), S, H=H, V=V, VALUE=_power_of_2(V), BM=64)
    return delta


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, lse: Tensor, delta: Tensor,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv; ``delta`` by `deltas`."""
    (B, S, H, _), G = q.shape, k.shape[2]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    # query i sees key j <= i if first[i] <= j: queries before stop[j], as first does not decrease
    stop = None
    if first is not None:
        keys = torch.arange(S, dtype=first.dtype, device=first.device).expand(B, S).contiguous()
        stop = torch.searchsorted(first, keys, right=True, out_int32=True)
    sizes = (*_strides(q, k, v, d_out), S, window or S, scale)
    tile = backward_tile(_bytes_of_row(q, v))  # of dq: dk and dv exchange queries and keys
    dq_kernel[(triton.cdiv(S, tile.queries), H, B)](
        q, k, v, first, d_out, lse, delta, dq, *sizes, **_constants(q, v, first, tile)
    )
    tile = tile._replace(queries=tile.keys, keys=tile.queries)
    dkv_kernel[(triton.cdiv(S, tile.keys), G, B)](
        q, k, v, first, stop, d_out, lse, delta, dk, dv, *sizes, **_constants(q, v, first, tile)
    )
    return dq, dk, dv


def _bytes_of_row(q: Tensor, v: Tensor) -> int:
    return (sum(_parts(q.shape[-1])) + _power_of_2(v.shape[-1])) * q.element_size()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _constants(q: Tensor, v: Tensor, first: Tensor | None, tile: Tile) -> dict[str, Any]:
    (_, _, H, E), (G, V) = q.shape, v.shape[2:]
    head, tail = _parts(E)
    sizes = {"H": H, "G": G, "E": E, "V": V, "HEAD": head, "TAIL": tail, "VALUE": _power_of_2(V)}
    # of fp32 inputs: three products of tensor cores have nearly all bits of fp32
    precision = "ieee" if IS_ROCM else "tf32x3"
    how = {"PRECISION": precision, "num_warps": num_warps(tile.threads), "num_stages": tile.stages}
    return {"HAS_FIRST": first is not None, "BM": tile.queries, "BN": tile.keys} | sizes | how


def _parts(size: int) -> tuple[int, int]:
    # two powers of 2, so that heads of 192 need 192 columns of a product and not 256
    whole, half = _power_of_2(size), _power_of_2(size) // 2
    return (whole, 0) if whole in (size, 16) else (half, _power_of_2(size - half))


def _power_of_2(size: int) -> int:
    return max(triton.next_power_of_2(size), 16)
