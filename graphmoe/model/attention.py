"""The attn segment: norm, attention (MLA or GQA) and the residual add.

Suffixes: B batch, S sequence, D hidden, H query heads, G key-value heads, N head part without and
R with rotary embedding, Q = N + R, V value head, P = R / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphmoe.config import AttentionBackend, AttentionKind, ModelConfig
from graphmoe.model.norm import RMSNorm
from graphmoe.model.rope import attention_scale, rotate_halves, rotate_pairs
from graphmoe.ops.attention import causal_attention, choose_backend, warn_of_slow_heads
from graphmoe.segments import part

LATENT_NORM_EPS = 1e-6  # norms of the compressed states: fixed in DeepSeek-V2/V3, whatever norm_eps is


def build_attention(config: ModelConfig) -> nn.Module:
    """The attention module that the configuration names."""
    if config.attention is AttentionKind.mla:
        return LatentAttention(config)
    return GroupedQueryAttention(config)


def rotary_dim(config: ModelConfig) -> int:
    """Head elements that the rotary embedding turns."""
    return config.qk_rope_head_dim if config.attention is AttentionKind.mla else config.head_dim


def check_backend(config: ModelConfig, device_type: str) -> None:
    """Raise ConfigError where the requested attention backend cannot run the model's heads on the device."""
    if config.attention is AttentionKind.mla:
        head_dim, v_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    else:
        head_dim = v_head_dim = config.head_dim
    _backend(config.attention_backend, device_type, head_dim, v_head_dim)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, requested: AttentionBackend) -> Tensor:
    """Causal attention by the requested backend, or the one that suits device and head sizes."""
    backend = _backend(requested, q.device.type, q.shape[-1], v.shape[-1])
    warn_of_slow_heads(backend, q.device.type, max(q.shape[-1], v.shape[-1]))
    with part("core_attn"):
        return causal_attention(q, k, v, scale=scale, backend=backend)


def _backend(
    requested: AttentionBackend, device_type: str, head_dim: int, v_head_dim: int
) -> AttentionBackend:
    return choose_backend(
        requested,
        device_type=device_type,
        is_rocm=torch.version.hip is not None,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
    )


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, width = config.num_heads, config.hidden_size
        self.sizes = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        nope, rope, value = self.sizes
        self.num_heads, self.latent = heads, config.kv_lora_rank
        self.scale = attention_scale(config, nope + rope)
        self.backend = config.attention_backend
        self.norm = RMSNorm(width, config.norm_eps)
        if config.q_lora_rank:
            self.q_down = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_up = nn.Linear(config.q_lora_rank, heads * (nope + rope), bias=False)
        else:
            self.q_proj = nn.Linear(width, heads * (nope + rope), bias=False)
        self.kv_down = nn.Linear(width, self.latent + rope, bias=False)
        self.kv_norm = RMSNorm(self.latent, LATENT_NORM_EPS)
        self.kv_up = nn.Linear(self.latent, heads * (nope + value), bias=False)
        self.out_proj = nn.Linear(heads * value, width, bias=False)

    def forward(self, x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        """x + attention(norm(x)), shape [B, S, D]."""
        h_BSD = self.norm(x_BSD)
        compresses_q = hasattr(self, "q_down")
        q_latent = self.q_norm(self.q_down(h_BSD)) if compresses_q else h_BSD
        kv_latent, k_BSR = self.kv_down(h_BSD).split([self.latent, self.sizes[1]], dim=-1)
        kv_latent = self.kv_norm(kv_latent)
        with part("mla_up_proj"):
            q = self.q_up(q_latent) if compresses_q else self.q_proj(q_latent)
            q_BSHQ, k_BSHQ, v_BSHV = self._heads(q, self.kv_up(kv_latent), k_BSR, cos_SP, sin_SP)
        out_BSHV = attend(q_BSHQ, k_BSHQ, v_BSHV, self.scale, self.backend)
        return x_BSD + self.out_proj(out_BSHV.flatten(2))

    def _heads(
        self, q: Tensor, kv: Tensor, k_BSR: Tensor, cos_SP: Tensor, sin_SP: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, S, H, Q], k [B, S, H, Q] and v [B, S, H, V] from the projections, rotated."""
        nope, rope, value = self.sizes
        q_BSHN, q_BSHR = q.unflatten(-1, (self.num_heads, nope + rope)).split([nope, rope], dim=-1)
        k_BSHN, v_BSHV = kv.unflatten(-1, (self.num_heads, nope + value)).split([nope, value], dim=-1)
        k_BS1R = rotate_pairs(k_BSR.unsqueeze(2), cos_SP, sin_SP)
        q_BSHQ = torch.cat([q_BSHN, rotate_pairs(q_BSHR, cos_SP, sin_SP)], dim=-1)
        k_BSHQ = torch.cat([k_BSHN, k_BS1R.expand(-1, -1, self.num_heads, -1)], dim=-1)
        return q_BSHQ, k_BSHQ, v_BSHV


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245), with Qwen3's norm of query and key heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
        self.head_dim = size
        self.scale = attention_scale(config, size)
        self.backend = config.attention_backend
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, groups * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, groups * size, bias=False)
        self.q_norm = RMSNorm(size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.out_proj = nn.Linear(heads * size, config.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        """x + attention(norm(x)), shape [B, S, D]."""
        h_BSD = self.norm(x_BSD)
        q_BSHR = self.q_norm(self.q_proj(h_BSD).unflatten(-1, (-1, self.head_dim)))
        k_BSGR = self.k_norm(self.k_proj(h_BSD).unflatten(-1, (-1, self.head_dim)))
        v_BSGV = self.v_proj(h_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSHR = rotate_halves(q_BSHR, cos_SP, sin_SP)
        k_BSGR = rotate_halves(k_BSGR, cos_SP, sin_SP)
        out_BSHV = attend(q_BSHR, k_BSGR, v_BSGV, self.scale, self.backend)
        return x_BSD + self.out_proj(out_BSHV.flatten(2))
