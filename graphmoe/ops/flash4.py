"""Causal attention by FlashAttention-4, the package flash-attn-4, as an operation with a gradient.

Suffixes: B batch, S sequence, H query heads, G key-value heads, E query or key head, V value head.
"""

import functools
import os
from typing import Any

import torch
from torch import Tensor

from graphmoe.ops import register_gradient, require_half

CACHE_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@functools.cache
def _interface() -> Any:
    if CACHE_FOLDER in os.environ:  # without a folder it would load code from one in /tmp
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    return interface


@torch.library.custom_op("graphmoe::flash4", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, deterministic: bool) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q k^T, causal) v [B, S, H, V], and its fp32 log-sum-exp [B, H, S].

    q [B, S, H, E], k [B, S, G, E], v [B, S, G, V] in bf16 or fp16. ``deterministic`` is of the backward.
    """
    out, lse, *_ = _interface()._flash_attn_fwd(
        *_rows(q, k, v), softmax_scale=scale, causal=True, return_lse=True
    )
    return out, lse


@torch.library.custom_op("graphmoe::flash4_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, d_out = _rows(q, k, v, out, d_out)
    dq, dk, dv, *_ = _interface()._flash_attn_bwd(
        q, k, v, out, d_out, lse, softmax_scale=scale, causal=True, deterministic=deterministic
    )
    return dq, dk, dv


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, deterministic: bool) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    return q.new_empty(batch, seq, heads, v.shape[-1]), q.new_empty(batch, heads, seq, dtype=torch.float32)


_backward.register_fake(
    lambda d_out, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
)
register_gradient(_forward, _backward, lambda inputs, output: (*inputs[:3], *output, *inputs[3:]))


def flash4(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    require_half("model.attention_backend", "flash4", q.dtype)
    return _forward(q, k, v, scale, torch.are_deterministic_algorithms_enabled())[0]
