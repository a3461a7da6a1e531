"""Calls of FlashAttention-4, Transformer Engine and Primus-Turbo for `graphmoe.ops.masked_attention`.

Suffixes: B batch, S sequence, H query heads.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.config.schema import AttentionBackend
from graphmoe.ops import row_major, transformer_engine

CACHE_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


class Saved(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    d_out: Tensor
    lse: Tensor
    seeds: Tensor
    """Of dropout, int64 [2]: unused, but part of the libraries' calls."""


class Library(NamedTuple):
    forward: Callable[..., Sequence[Tensor]]
    """(q, k, v, scale, window) -> out, fp32 log-sum-exp [B, H, S], and seeds if there are any."""
    backward: Callable[[Saved, float, int, bool], Sequence[Tensor]]
    """(saved, scale, window, deterministic) -> dq, dk, dv."""
    num_seeds: int = 0


@functools.cache
def _flash4() -> Any:
    if CACHE_FOLDER in os.environ:  # without a folder it would load code from one in /tmp
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    return interface


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Sequence[Tensor]:
    given = row_major(q, k, v)
    return _flash4()._flash_attn_fwd(*given, softmax_scale=scale, causal=True, return_lse=True)[:2]


def _flash4_backward(saved: Saved, scale: float, window: int, deterministic: bool) -> Sequence[Tensor]:
    q, k, v, out, d_out = row_major(*saved[:5])
    how = {"softmax_scale": scale, "causal": True, "deterministic": deterministic}
    return _flash4()._flash_attn_bwd(q, k, v, out, d_out, saved.lse, **how)[:3]


def _te() -> Any:
    return transformer_engine(".cpp_extensions.fused_attn")


def _te_settings(q: Tensor, scale: float, window: int) -> dict[str, Any]:
    batch, seq = q.shape[:2]
    ends = torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=q.device)
    return {
        "max_seqlen_q": seq, "max_seqlen_kv": seq, "cu_seqlens_q": ends, "cu_seqlens_kv": ends,
        "fake_dtype": q.dtype, "fused_attention_backend": _te().FusedAttnBackend["F16_arbitrary_seqlen"],
        "attn_scale": scale, "attn_mask_type": "causal", "window_size": (window - 1, 0),
        "cuda_graph": q.is_cuda and torch.cuda.is_current_stream_capturing(),
        "qkv_layout": "bshd_bshd_bshd", "o_format": "bshd",
    }  # fmt: skip


def _te_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Sequence[Tensor]:
    given = dict(zip("qkv", (x.contiguous() for x in (q, k, v)), strict=True))
    how = _te_settings(q, scale, window)
    out, (lse_BHS1, seeds) = _te().fused_attn_fwd(is_training=True, **given, **how)[:2]
    return out, lse_BHS1.squeeze(-1), seeds


def _te_backward(saved: Saved, scale: float, window: int, deterministic: bool) -> Sequence[Tensor]:
    given = zip(("q", "k", "v", "o", "d_o"), saved[:5], strict=True)
    tensors = {name: x.contiguous() for name, x in given}
    return _te().fused_attn_bwd(
        **tensors, **_te_settings(saved.q, scale, window), do_format="bshd", dqkv_layout="bshd_bshd_bshd",
        aux_ctx_tensors=[saved.lse.unsqueeze(-1), saved.seeds], deterministic=deterministic,
    )[:3]  # fmt: skip


def _turbo() -> Any:
    from primus_turbo.pytorch.kernels.attention import attention_aiter_impl  # type: ignore[import-not-found]

    return attention_aiter_impl


def _turbo_settings(scale: float, window: int) -> dict[str, Any]:
    return {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": True, "window_size_left": window - 1,
        "window_size_right": 0 if window else -1, "bias": None, "alibi_slopes": None, "qkv_format": "bshd",
    }  # fmt: skip


def _turbo_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Sequence[Tensor]:
    how = _turbo_settings(scale, window) | {"return_lse": True, "return_softmax": False}
    given = dict(zip("qkv", (_bshd(x) for x in (q, k, v)), strict=True))
    out, lse, _, seeds = _turbo().attention_aiter_forward_impl(**given, **how)
    return out, lse, seeds


def _turbo_backward(saved: Saved, scale: float, window: int, deterministic: bool) -> Sequence[Tensor]:
    given = zip(("q", "k", "v", "out", "dout"), saved[:5], strict=True)
    tensors = {name: _bshd(x) for name, x in given}
    gradients = {f"d{name}": torch.zeros_like(tensors[name]) for name in "qkv"}
    # as Primus-Turbo chooses them: sums of dq in fp32, and CDNA4 rounds to bf16 in hardware
    rounds = 0 if saved.q.is_cuda and torch.cuda.get_device_capability(saved.q.device) >= (9, 5) else 1
    how = _turbo_settings(scale, window) | {"softmax_lse": saved.lse, "rng_state": saved.seeds}
    _turbo().attention_aiter_backward_impl(
        **tensors, **gradients, **how,
        deterministic=deterministic, is_v3_atomic_fp32=True, how_v3_bf16_cvt=rounds,
    )  # fmt: skip
    return [*gradients.values()]


def _bshd(x: Tensor) -> Tensor:
    # q, k and v need the same memory layout; AITER reads their strides
    batch, seq, head, element = x.stride()
    return x if element == 1 and batch >= seq >= head else x.contiguous()


LIBRARIES = {
    AttentionBackend.flash4: Library(_flash4_forward, _flash4_backward),
    AttentionBackend.te: Library(_te_forward, _te_backward, num_seeds=2),
    AttentionBackend.turbo: Library(_turbo_forward, _turbo_backward, num_seeds=2),
}
