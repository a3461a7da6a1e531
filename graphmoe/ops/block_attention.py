"""Attention of some queries to some keys, with what is needed to join it with attention to other keys.

Shapes as in ``graphmoe.ops.attention``, and T keys, whose number may differ from that of the queries. The
kernels are those of torch's scaled_dot_product_attention; called by name, they give the log-sum-exp of each
query's scores, and their backward takes the log-sum-exp over all keys in place of its own block's.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from graphmoe.ops.attention import FLASH_MAX_HEAD_DIM
from graphmoe.ops.vendors import HALF_DTYPES

aten = torch.ops.aten
Kernel = Literal["cpu", "flash", "cudnn", "efficient"]
CUDNN_MAX_HEAD_DIM = 192
"""Beyond it the backward of cuDNN depends on its version and on the GPU."""
_LSE_ALIGNMENT = 32
"""The memory-efficient kernel pads the log-sum-exps of a head to a multiple of this many queries."""


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which blocks are joined: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def attend_to_block(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [B, S, H, V] and natural log-sum-exp of the scores, [B, H, S] in the dtype of `accumulated`.

    q [B, S, H, E], k [B, T, G, E], v [B, T, G, V]; ``causal`` needs S = T. No gradient of its own.
    """
    kernel, V = choose_kernel(q, k, v, causal), v.shape[-1]
    q, k, v = _prepared(kernel, q, k, v)
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    elif kernel == "flash":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    elif kernel == "cudnn":
        out, lse = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )[:2]
    else:
        out, lse = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )[:2]
    batch, heads, seq = q.shape[:3]
    lse = lse[:, :, :seq].reshape(
        batch, heads, seq
    )  # cuDNN's has one more dimension, efficient's more queries
    return out.transpose(1, 2)[..., :V], lse


def gradients_of_block(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention to this block adds to the gradients of q, k and v, each of its tensor's shape.

    ``out`` [B, S, H, V] and ``lse`` [B, H, S] are those of attention to all blocks.
    """
    kernel, (E, V), groups = choose_kernel(q, k, v, causal), (q.shape[-1], v.shape[-1]), k.shape[2]
    seq, keys = q.shape[1], k.shape[1]
    q, k, v = _prepared(kernel, q, k, v)
    out, d_out = (_padded(x.transpose(1, 2), v.shape[-1]) for x in (out, d_out))
    lse = lse.contiguous()
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # seeds of a dropout that is 0
    if kernel == "cpu":
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    elif kernel == "flash":
        gradients = aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, lse, None, None, seq, keys, 0.0, causal, unused, unused, scale=scale
        )
    elif kernel == "cudnn":
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            *(d_out, q, k, v, out, lse.unsqueeze(-1), unused, unused),
            *(None, None, None, seq, keys, 0.0, causal),
            scale=scale,
        )
    else:
        lse = F.pad(lse, (0, -seq % _LSE_ALIGNMENT), value=torch.inf)
        wanted = [True, True, True, False]
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            d_out, q, k, v, None, out, lse, unused, unused, 0.0, wanted, causal, scale=scale
        )[:3]
    dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
    return dq[..., :E], _of_groups(dk[..., :E], groups), _of_groups(dv[..., :V], groups)


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Kernel:
    """The kernel for these tensors, by the rules of ``graphmoe.ops.attention.kernel_order``."""
    if q.device.type == "cpu":
        return "cpu"
    largest = max(q.shape[-1], v.shape[-1])
    if q.dtype not in HALF_DTYPES or largest > FLASH_MAX_HEAD_DIM:
        return "efficient"
    if largest > CUDNN_MAX_HEAD_DIM or torch.are_deterministic_algorithms_enabled():
        return "flash"
    cuda = torch.backends.cuda
    grouped = q.shape[2] != k.shape[2]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    parameters = cuda.SDPAParams(*heads_first, None, 0.0, causal, grouped)  # type: ignore[arg-type,call-arg]
    return "cudnn" if cuda.can_use_cudnn_attention(parameters) else "flash"


def _prepared(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as [B, heads, positions, size], with heads and sizes that the kernel takes.

    Padding with zeros changes neither scores nor the columns that are kept.
    """
    if kernel in ("cpu", "efficient") and q.shape[2] != k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if kernel == "cudnn":
        return q, k, v
    sizes = (q.shape[-1], v.shape[-1])
    of_heads, of_values = sizes if kernel == "efficient" else (max(sizes), max(sizes))
    return _padded(q, of_heads), _padded(k, of_heads), _padded(v, of_values)


def _padded(x: Tensor, size: int) -> Tensor:
    """x with zeros behind its last dimension, up to the next multiple of 8 from ``size``."""
    missing = -(-size // 8) * 8 - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _of_groups(d_BTHE: Tensor, groups: int) -> Tensor:
    """Gradients of key-value heads from those of repeated ones, summed as `accumulated` says."""
    if d_BTHE.shape[2] == groups:
        return d_BTHE
    return d_BTHE.unflatten(2, (groups, -1)).to(accumulated(d_BTHE.dtype)).sum(dim=3)
