"""Launches of the kernels of `delta_net`; no call waits for the device."""

from typing import Any

import torch
import triton
from torch import Tensor

from graphmoe.ops import num_warps
from graphmoe.ops.delta_net import kernels
from graphmoe.plan.attention import LINEAR_CHUNK

STATE_COLUMNS = 32  # of a value head in a program that loops over chunks: such programs are few
IS_ROCM = torch.version.hip is not None


def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None) -> Tensor:
    q, k, v, g, beta, first = _laid_out(q, k, v, g, beta, first)
    inverse, scores = _chunks(q, k, g, beta, first, v.shape[2])
    out = v.new_empty(v.shape)
    _states(q, k, v, g, beta, first, inverse, scores, out, None, None)
    return out


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_out, q, k, v, g, beta, first = _laid_out(d_out, q, k, v, g, beta, first)
    (B, S, H, K), (V, W) = q.shape, v.shape[2:]
    chunks = triton.cdiv(S, LINEAR_CHUNK)
    inverse, scores = _chunks(q, k, g, beta, first, V)
    state, step = v.new_empty(B, V, chunks, K, W), v.new_empty(v.shape)
    _states(q, k, v, g, beta, first, inverse, scores, None, state, step)
    d_state, d_error = torch.empty_like(state), torch.empty_like(step)
    constants, scale = _constants(q, v, first), K**-0.5
    columns = min(W, STATE_COLUMNS)
    kernels.d_states_kernel[(W // columns, V, B)](
        d_out, q, k, g, beta, first, inverse, scores, d_state, d_error,
        *_strides(d_out, q, k), S, scale, W=W, BW=columns, **constants,
        num_warps=num_warps(128), num_stages=1 if IS_ROCM else 2,
    )  # fmt: skip
    dq, dk = (q.new_empty(B, S, V, K) for _ in range(2))
    dv, dg, d_beta = v.new_empty(v.shape), g.new_empty(g.shape), beta.new_empty(beta.shape)
    # of columns; fp32 ones of 64 exceed the tensor memory of sm_100, and of 32 the registers of gfx942
    block = (64 if IS_ROCM and q.dtype == torch.float32 else 128) // q.element_size()
    kernels.gradients_kernel[(V, chunks, B)](
        d_out, q, k, v, g, beta, first, scores, state, step, d_state, d_error, dq, dk, dv, dg, d_beta,
        *_strides(d_out, q, k, v), S, scale, W=W, BK=min(K, block), BW=min(W, block), **constants,
        num_warps=num_warps(256 if min(K, W) > 16 else 128), num_stages=1,  # 256 fault in fp32 on sm_90
    )  # fmt: skip
    if V > H:
        dq, dk = (x.unflatten(2, (H, -1)).sum(3) for x in (dq, dk))
    return dq, dk, dv, dg, d_beta


def _chunks(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, first: Tensor | None, V: int
) -> tuple[Tensor, Tensor]:
    B, S, _, K = q.shape
    chunks = triton.cdiv(S, LINEAR_CHUNK)
    inverse, scores = (q.new_empty(B, V, chunks, LINEAR_CHUNK, LINEAR_CHUNK) for _ in range(2))
    precision = _precision() if q.dtype == torch.float32 or IS_ROCM else "tf32"
    kernels.chunks_kernel[(V, chunks, B)](
        q, k, g, beta, first, inverse, scores, *_strides(q, k), S, K**-0.5,
        LEVELS=LINEAR_CHUNK.bit_length() - 1, OF_INVERSE=precision, **_constants(q, g, first),
        num_warps=num_warps(128), num_stages=1,
    )  # fmt: skip
    return inverse, scores


def _states(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None, inverse: Tensor,
    scores: Tensor, out: Tensor | None, state: Tensor | None, step: Tensor | None,
) -> None:  # fmt: skip
    (B, S, V, W), K = v.shape, q.shape[-1]
    columns = min(W, STATE_COLUMNS)
    kernels.states_kernel[(W // columns, V, B)](
        q, k, v, g, beta, first, inverse, scores, out, state, step, *_strides(q, k, v), S, K**-0.5,
        W=W, BW=columns, KEEPS=out is None, **_constants(q, v, first),
        num_warps=num_warps(128), num_stages=1 if IS_ROCM else 2,
    )  # fmt: skip


def _constants(q: Tensor, of_values: Tensor, first: Tensor | None) -> dict[str, Any]:
    sizes = {"H": q.shape[2], "V": of_values.shape[2], "K": q.shape[3], "C": LINEAR_CHUNK}
    return sizes | {"HAS_FIRST": first is not None, "PRECISION": _precision()}


def _precision() -> str:
    # of fp32 inputs: three products of tensor cores have nearly all bits of fp32
    return "ieee" if IS_ROCM else "tf32x3"


def _laid_out(*tensors: Tensor | None) -> Any:
    # heads may be views of one projection; g, beta and first are small
    whole = len(tensors) - 3
    return [
        x if x is None or (i < whole and x.stride(-1) == 1) else x.contiguous() for i, x in enumerate(tensors)
    ]


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])
