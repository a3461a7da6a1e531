"""Causal attention and the choice of its kernel (docs/model.md).

Shapes: B batch, S sequence, H query heads, G key-value heads, E size of a query or key head, V of a value
head.
"""

import contextlib
import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphmoe.config.packages import VENDORS, is_installed, require_package
from graphmoe.config.schema import AttentionBackend, ConfigError
from graphmoe.ops import HALF_DTYPES

log = logging.getLogger(__name__)
KEY = "model.attention_backend"
# their backward is deterministic if torch asks for that; the last takes any input
FLASH_FIRST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_OF_NVIDIA = {AttentionBackend.flash4: "FlashAttention-4", AttentionBackend.te: "cuDNN by Transformer Engine"}
FLASH_MAX_HEAD_DIM = 256  # largest head of torch's flash kernels
# query and value heads; with (48, 32) version 4.0.0b36 returns wrong values on Hopper
FLASH4_HEADS = (64, 64), (96, 96), (128, 128), (192, 128)


def causal_attention(
    q_BSHE: Tensor, k_BSGE: Tensor, v_BSGV: Tensor, *, scale: float, backend: AttentionBackend
) -> Tensor:
    """Return softmax(scale * q k^T, causal) v as [B, S, H, V] in the dtype of the inputs.

    No dropout, no device sync. ``backend`` is one of torch.
    """
    assert q_BSHE.dtype == k_BSGE.dtype == v_BSGV.dtype, (q_BSHE.dtype, k_BSGE.dtype, v_BSGV.dtype)
    assert q_BSHE.shape[:2] == k_BSGE.shape[:2] and q_BSHE.shape[3] == k_BSGE.shape[3]
    assert k_BSGE.shape[:3] == v_BSGV.shape[:3] and q_BSHE.shape[2] % k_BSGE.shape[2] == 0
    run = {AttentionBackend.sdpa: _sdpa, AttentionBackend.padded_flash: _padded_flash}[backend]
    return run(q_BSHE, k_BSGE, v_BSGV, scale)


def choose_backend(
    requested: AttentionBackend, device_type: str, head_dim: int, v_head_dim: int, *,
    groups: bool = False, is_half: bool = True, is_rocm: bool = torch.version.hip is not None,
) -> AttentionBackend:  # fmt: skip
    """Return the backend to run; ``groups``: query heads share key-value heads. Raises ConfigError."""
    sizes, where = (head_dim, v_head_dim), (device_type, is_rocm)
    if requested is AttentionBackend.auto:
        # flash on ROCm needs equal head sizes, and ROCm has no cuDNN for others
        pads = device_type == "cuda" and is_rocm and head_dim != v_head_dim
        fits = max(sizes) <= FLASH_MAX_HEAD_DIM
        against = _reason_against(AttentionBackend.flash4, *where, sizes, groups)
        if is_half and _has_flash4() and not against:
            return AttentionBackend.flash4
        return AttentionBackend.padded_flash if pads and fits else AttentionBackend.sdpa
    reason = _reason_against(requested, *where, sizes, groups)
    if reason:
        valid = [b.value for b in AttentionBackend if not _reason_against(b, *where, sizes, groups)]
        raise ConfigError(f"{KEY}={requested.value} {reason}; use one of: {', '.join(valid)}")
    require_package(KEY, requested.value)
    return requested


@functools.cache
def _has_flash4() -> bool:
    # measured on H200s only (docs/model.md)
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return on_hopper and torch.version.hip is None and is_installed(VENDORS["flash4"].module)


@functools.cache
def warn_of_slow_heads(backend: AttentionBackend, device_type: str, size: int) -> None:
    limit = FLASH_MAX_HEAD_DIM
    if backend is AttentionBackend.sdpa and device_type == "cuda" and size > limit:
        log.warning("attention heads of %d run slower kernels: flash attention takes %d at most", size, limit)


def _reason_against(
    backend: AttentionBackend, device_type: str, is_rocm: bool, sizes: tuple[int, int], groups: bool
) -> str | None:
    if backend in (AttentionBackend.auto, AttentionBackend.sdpa):
        return None
    if device_type != "cuda":
        return f"needs a GPU and the device is {device_type}"
    if backend is AttentionBackend.turbo and not is_rocm:
        return "is Primus-Turbo, which needs a ROCm build of torch"
    if backend in _OF_NVIDIA and is_rocm:
        return f"is {_OF_NVIDIA[backend]}, which needs an NVIDIA GPU"
    if backend is AttentionBackend.flash4 and sizes not in FLASH4_HEADS:
        known = ", ".join(f"{head}/{value}" for head, value in FLASH4_HEADS)
        return f"is tested for query/value heads of {known}, not {sizes[0]}/{sizes[1]}"
    if backend is AttentionBackend.flash4 and groups and sizes[0] != sizes[1]:
        return "has no backward for value heads of another size that several query heads share"
    if backend is AttentionBackend.padded_flash and max(sizes) > FLASH_MAX_HEAD_DIM:
        return f"has no kernel for heads of {max(sizes)} (at most {FLASH_MAX_HEAD_DIM})"
    return None


def kernel_order(*, deterministic: bool) -> list[SDPBackend]:
    """Return the kernels that torch's SDPA may use on a GPU, fastest first; the last supports any input."""
    # cuDNN takes unequal head sizes, and equal ones in 0.57 of flash's time (docs/model.md). Its backward is
    # not deterministic, and torch has no switch for it (checked: 2.11).
    return FLASH_FIRST if deterministic else [SDPBackend.CUDNN_ATTENTION, *FLASH_FIRST]


def _sdpa(q_BSHE: Tensor, k_BSGE: Tensor, v_BSGV: Tensor, scale: float) -> Tensor:
    deterministic = torch.are_deterministic_algorithms_enabled()
    if q_BSHE.shape[-1] != v_BSGV.shape[-1]:
        on_cpu = q_BSHE.device.type == "cpu"  # unfused for unequal heads: 2-4x slower from 512 tokens
        if on_cpu or (deterministic and q_BSHE.dtype in HALF_DTYPES):
            return _padded_flash(q_BSHE, k_BSGE, v_BSGV, scale)
    return _torch_attention(q_BSHE, k_BSGE, v_BSGV, scale, kernel_order(deterministic=deterministic))


def _padded_flash(q_BSHE: Tensor, k_BSGE: Tensor, v_BSGV: Tensor, scale: float) -> Tensor:
    # Zero padding adds nothing to q k^T, and padded output columns are dropped. fp32 has no flash kernel and
    # runs the memory-efficient one.
    size = max(q_BSHE.shape[-1], v_BSGV.shape[-1])
    q_BSHE, k_BSGE, padded_v_BSGE = (pad_heads(x, size) for x in (q_BSHE, k_BSGE, v_BSGV))
    out_BSHE = _torch_attention(q_BSHE, k_BSGE, padded_v_BSGE, scale, FLASH_FIRST)
    return out_BSHE[..., : v_BSGV.shape[-1]]


def pad_heads(x: Tensor, size: int) -> Tensor:
    """Zero-pad the last axis to ``size`` rounded up to a multiple of 8."""
    missing = -(-size // 8) * 8 - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _torch_attention(
    q_BSHE: Tensor, k_BSGE: Tensor, v_BSGV: Tensor, scale: float, order: list[SDPBackend]
) -> Tensor:
    on_gpu = q_BSHE.device.type == "cuda"
    grouped = False  # set by a branch: the comparison itself is a SymBool under compile, which sdpa refuses
    if q_BSHE.shape[2] != k_BSGE.shape[2]:
        if on_gpu and not _groups_natively(q_BSHE, v_BSGV):
            groups = q_BSHE.shape[2] // k_BSGE.shape[2]
            k_BSGE, v_BSGV = (x.repeat_interleave(groups, dim=2) for x in (k_BSGE, v_BSGV))
        else:
            grouped = True
    with sdpa_kernel(order, set_priority=True) if on_gpu else contextlib.nullcontext():
        out_BHSV = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BSGE.transpose(1, 2),
            v_BSGV.transpose(1, 2),
            is_causal=True,
            scale=scale,
            enable_gqa=grouped,
        )
    return out_BHSV.transpose(1, 2)


def _groups_natively(q_BSHE: Tensor, v_BSGV: Tensor) -> bool:
    # the memory-efficient kernel has no grouped heads; torch would choose the unfused one
    head_dim = q_BSHE.shape[-1]
    return q_BSHE.dtype in HALF_DTYPES and head_dim == v_BSGV.shape[-1] <= FLASH_MAX_HEAD_DIM
