"""The attn segment: norm, attention (MLA or GQA) with rotary embedding, and residual add.

cp: attention exchanges positions for heads (DeepSpeed-Ulysses, arXiv 2309.14509, section 3) or circulates
keys and values (``ops.ring_attention``). Rotary embedding: RoFormer (arXiv 2104.09864, section 3.4); YaRN
(arXiv 2309.00071, sections 3.2 and 3.4) with mscale of DeepSeek-V2 (arXiv 2405.04434, section 3.1.4); llama3
as Llama 3.1 is published (``_compute_llama3_parameters`` in transformers' modeling_rope_utils.py).

Suffixes: B batch, S sequence, D hidden, H query heads, G key-value heads, N head part without and R with
rotary embedding, Q = N + R, V value head, P = R / 2. ``cos`` and ``sin``: [S, P] or [B, S, P].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.config.choices import look_up
from graphmoe.config.schema import AttentionBackend, AttentionBias, ModelConfig, RopeScaling
from graphmoe.model.blocks import (
    RMSNorm,
    column_parallel,
    cut_along_tp,
    own_positions,
    row_parallel,
    within_chunks,
)
from graphmoe.model.delta_net import GatedDeltaNet
from graphmoe.ops import HALF_DTYPES
from graphmoe.ops.attention import choose_backend, warn_of_slow_heads
from graphmoe.ops.collectives import all_gather, all_to_all, index_along, reduce_scatter
from graphmoe.ops.delta_net.fla import check_delta_net
from graphmoe.ops.masked_attention import attention, attention_with_lse, logit_bound
from graphmoe.ops.ring_attention import ring_attention
from graphmoe.plan.attention import attention_facts, is_hybrid
from graphmoe.plan.layout import ALONE, Layout
from graphmoe.segments import part

LATENT_NORM_EPS = 1e-6  # norms of the compressed states: fixed in DeepSeek-V2/V3, whatever norm_eps is


def build_attention(config: ModelConfig, layout: Layout = ALONE) -> nn.Module:
    return look_up(KINDS, config.attention, "model.attention")(config, layout)


def check_backend(config: ModelConfig, device_type: str, *, ring: bool = False) -> None:
    """Raise ConfigError if the backend cannot run the head sizes; warn if it is slow."""
    if is_hybrid(config):
        check_delta_net(config.delta_net_backend, device_type)
    facts = attention_facts(config)
    groups = facts.kv_heads not in (None, config.num_heads)
    backend = choose_backend(config.attention_backend, device_type, facts.head, facts.value, groups=groups)
    largest = max(facts.head, facts.value)
    warn_of_slow_heads(AttentionBackend.sdpa if ring else backend, device_type, largest)


@dataclass(frozen=True)
class CoreAttention:
    """Causal attention over sequences that are split over cp."""

    # plain values only, so that equal layers share compiled code
    scale: float
    backend: AttentionBackend
    cp: int
    ring: bool
    window: int = 0
    chunk: int = 0
    bounds: bool = False

    @classmethod
    def from_config(cls, config: ModelConfig, layout: Layout, head_dim: int) -> CoreAttention:
        how = config.attention_backend, layout.cp, layout.ring, config.window, config.attention_chunk
        return cls(attention_scale(config, head_dim), *how)

    @property
    def exchanging(self) -> int:
        return 1 if self.ring else self.cp

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, first_BS: Tensor | None = None, sinks_H: Tensor | None = None
    ) -> Tensor:
        """Return the attention output [B, S / cp, H, V]; inputs come from `whole_sequence`.

        ``first_BS``: the first key of each query of whole sequences (`ops.masked_attention.attention`).
        """
        return self.with_bound(q, k, v, first_BS, sinks_H)[0]

    def with_bound(
        self, q: Tensor, k: Tensor, v: Tensor, first_BS: Tensor | None = None, sinks_H: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the output; if ``bounds``, also `logit_bound` [H], -inf for heads of other ranks of cp."""
        with part("core_attn"):
            if self.ring:
                assert first_BS is None and sinks_H is None and not self.window
                out, lse = ring_attention(q, k, v, scale=self.scale, axis="cp", size=self.cp)
                return (out, logit_bound(lse)) if self.bounds else (out,)
            how = {"groups": q.shape[2] != v.shape[2], "is_half": q.dtype in HALF_DTYPES}
            backend = choose_backend(self.backend, q.device.type, q.shape[-1], v.shape[-1], **how)
            if sinks_H is not None and self.exchanging > 1:
                own = sinks_H.unflatten(0, (self.exchanging, -1))
                sinks_H = own.index_select(0, index_along("cp", own)[None])[0]
            if 0 < self.chunk < q.shape[1]:
                whole = q.new_zeros(q.shape[:2], dtype=torch.int32) if first_BS is None else first_BS
                first_BS = within_chunks(whole, self.chunk)
            attend = attention_with_lse if self.bounds else attention
            found = attend(
                *(q, k, v), scale=self.scale, backend=backend, first_BS=first_BS, window=self.window,
                sinks_H=sinks_H,
            )  # fmt: skip
            out, *lses = found if isinstance(found, tuple) else (found,)
            bounds = [self._of_all_heads(logit_bound(lse, sinks_H)) for lse in lses]
        # [B, S, H / cp, V] of this rank's heads -> [B, S / cp, H, V] of its positions
        return all_to_all(out, "cp", self.exchanging, split=1, join=2), *bounds

    def _of_all_heads(self, bound_H: Tensor) -> Tensor:
        if self.exchanging == 1:
            return bound_H
        bounds = bound_H.new_full((self.exchanging, len(bound_H)), -torch.inf)
        return bounds.index_copy(0, index_along("cp", bound_H)[None], bound_H[None]).flatten()

    def whole_sequence(self, x_BSHE: Tensor) -> Tensor:
        """All-to-all over cp, [B, S / cp, H, E] -> [B, S, H / cp, E]; the identity for ring attention."""
        return all_to_all(x_BSHE, "cp", self.exchanging, split=2, join=1)


def in_documents(table_SP: Tensor, first_BS: Tensor | None) -> Tensor:
    """Return a rotary table whose positions restart at ``first_BS``, [B, S, P]; the table itself for None."""
    if first_BS is None:
        return table_SP
    return table_SP[positions(first_BS.shape[1], first_BS, first_BS.device)]


def positions(seq_len: int, first_BS: Tensor | None, device: torch.device) -> Tensor:
    """Return positions that restart at ``first_BS``: int64 [S], or [B, S] with it."""
    position_S = torch.arange(seq_len, device=device)
    return position_S if first_BS is None else position_S - first_BS


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    def __init__(self, config: ModelConfig, layout: Layout = ALONE) -> None:
        super().__init__()
        tp = layout.tp
        heads, width = config.num_heads, config.hidden_size
        self.sizes = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        nope, rope, value = self.sizes
        self.tp, self.num_heads, self.latent = tp, heads // tp, config.kv_lora_rank
        self.attend = CoreAttention.from_config(config, layout, nope + rope)
        self.norm = RMSNorm(width, config.norm_eps)
        if config.q_lora_rank:
            self.q_down = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_up = column_parallel(config.q_lora_rank, heads * (nope + rope), tp)
        else:
            self.q_proj = column_parallel(width, heads * (nope + rope), tp)
        self.kv_down = nn.Linear(width, self.latent + rope, bias=False)
        self.kv_norm = RMSNorm(self.latent, LATENT_NORM_EPS)
        self.kv_up = column_parallel(self.latent, heads * (nope + value), tp)
        self.out_proj = row_parallel(heads * value, width, tp)

    def forward(
        self, x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor, first_BS: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """x + attention(norm(x)), shape [B, S / (cp * tp), D]; with ``attend.bounds`` the bounds too."""
        h_BSD = self.norm(x_BSD)
        cos, sin = in_documents(cos_SP, first_BS), in_documents(sin_SP, first_BS)
        compresses_q = hasattr(self, "q_down")
        q_latent = self.q_norm(self.q_down(h_BSD)) if compresses_q else h_BSD
        kv_latent, k_BSR = self.kv_down(h_BSD).split([self.latent, self.sizes[1]], dim=-1)
        q_latent, kv_latent, k_BSR = self._gathered(q_latent, self.kv_norm(kv_latent), k_BSR)
        with part("mla_up_proj"):
            q = self.q_up(q_latent) if compresses_q else self.q_proj(q_latent)
            q_BSHQ, kv = q.unflatten(-1, (self.num_heads, -1)), self._up(kv_latent)
        q_BSHQ = self.attend.whole_sequence(q_BSHQ)
        with part("mla_up_proj"):
            q_BSHQ, k_BSHQ, v_BSHV = self._heads(q_BSHQ, kv, k_BSR, cos, sin)
        out_BSHV, *bounds = self.attend.with_bound(q_BSHQ, k_BSHQ, v_BSHV, first_BS)
        x_BSD = x_BSD + reduce_scatter(self.out_proj(out_BSHV.flatten(2)), "tp", self.tp, dim=1)
        return (x_BSD, *bounds) if bounds else x_BSD

    def _gathered(self, q_latent: Tensor, *of_keys: Tensor) -> tuple[Tensor, ...]:
        # latents are smaller than keys and values, so they are gathered
        # keys and values need the latents of all positions of cp, queries only those of tp
        if self.attend.exchanging > 1:
            ranks = self.attend.exchanging * self.tp
            whole = all_gather(torch.cat(of_keys, dim=-1), "cp_tp", ranks, dim=1)
            q_latent = all_gather(q_latent, "tp", self.tp, dim=1)
            return q_latent, *whole.split([latent.shape[-1] for latent in of_keys], dim=-1)
        latents = (q_latent, *of_keys)
        if self.tp == 1:
            return latents
        # one collective for both: they need the same positions
        whole = all_gather(torch.cat(latents, dim=-1), "tp", self.tp, dim=1)
        return whole.split([latent.shape[-1] for latent in latents], dim=-1)

    def _up(self, kv_latent: Tensor) -> Tensor:
        if self.attend.exchanging == 1:
            return self.kv_up(kv_latent)
        # each cp rank computes keys and values only for its own heads, from its rows of a replicated matrix
        rows = self.kv_up.weight.unflatten(0, (self.attend.exchanging, -1))
        return F.linear(kv_latent, rows.index_select(0, index_along("cp", rows).unsqueeze(0)).squeeze(0))

    def _heads(
        self, q_BSHQ: Tensor, kv: Tensor, k_BSR: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        nope, rope, value = self.sizes
        heads = self.num_heads // self.attend.exchanging
        q_BSHN, q_BSHR = q_BSHQ.split([nope, rope], dim=-1)
        k_BSHN, v_BSHV = kv.unflatten(-1, (heads, nope + value)).split([nope, value], dim=-1)
        k_BS1R = rotate_pairs(k_BSR.unsqueeze(2), cos, sin)
        q_BSHQ = torch.cat([q_BSHN, rotate_pairs(q_BSHR, cos, sin)], dim=-1)
        k_BSHQ = torch.cat([k_BSHN, k_BS1R.expand(-1, -1, heads, -1)], dim=-1)
        return q_BSHQ, k_BSHQ, v_BSHV


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245), with Qwen3's norm of query and key heads."""

    def __init__(self, config: ModelConfig, layout: Layout = ALONE) -> None:
        super().__init__()
        heads, groups, size, tp = config.num_heads, config.num_kv_heads, config.head_dim, layout.tp
        assert groups % tp == 0, (groups, tp)
        self.tp, self.head_dim = tp, size
        self.attend = CoreAttention.from_config(config, layout, size)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gated, self.rotates = config.attention_gate, config.rotary_fraction > 0
        self.temperature = config.attention_temperature_floor, config.attention_temperature_scale
        self.ring = layout if layout.ring else ALONE
        self.q_proj = column_parallel(config.hidden_size, heads * size * (2 if self.gated else 1), tp)
        self.k_proj = column_parallel(config.hidden_size, groups * size, tp)
        self.v_proj = column_parallel(config.hidden_size, groups * size, tp)
        self.q_norm = _norm_of(heads, config, tp)
        self.k_norm = _norm_of(groups, config, tp)
        self.out_proj = row_parallel(heads * size, config.hidden_size, tp)
        self.sinks_H = nn.Parameter(torch.empty(heads // tp)) if config.attention_sinks else None
        if self.sinks_H is not None:
            cut_along_tp(self.sinks_H, tp, dim=0)
        self.biases = nn.ParameterDict()  # by the first letter of the projection
        for name in "" if config.attention_bias is AttentionBias.none else config.attention_bias:
            linear = self.out_proj if name == "o" else getattr(self, f"{name}_proj")
            self.biases[name] = nn.Parameter(torch.empty(linear.out_features))
            if name != "o":
                cut_along_tp(self.biases[name], tp, dim=0)

    def forward(
        self, x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor, first_BS: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """x + attention(norm(x)), shape [B, S / (cp * tp), D]; with ``attend.bounds`` the bounds too."""
        h_BSD, gate_BSHV = all_gather(self.norm(x_BSD), "tp", self.tp, dim=1), None
        q_BSHR = self._heads("q", self.q_proj(h_BSD))
        if self.gated:  # a head's rows of q_proj: query, then gate
            q_BSHR, gate_BSHV = q_BSHR.unflatten(2, (-1, 2)).unbind(3)
        q_BSHR = self.q_norm(q_BSHR)
        k_BSGR = self.k_norm(self._heads("k", self.k_proj(h_BSD)))
        v_BSGV = self._heads("v", self.v_proj(h_BSD))
        if self.attend.exchanging > 1:
            q_BSHR, k_BSGR, v_BSGV = self._whole_sequence(q_BSHR, k_BSGR, v_BSGV)
        if self.rotates:
            cos, sin = in_documents(cos_SP, first_BS), in_documents(sin_SP, first_BS)
            q_BSHR, k_BSGR = rotate_halves(q_BSHR, cos, sin), rotate_halves(k_BSGR, cos, sin)
        elif 0 < self.temperature[0] <= (seq_len := q_BSHR.shape[1] * self.ring.cp):  # below it a factor of 1
            own = own_positions(positions(seq_len, first_BS, q_BSHR.device), self.ring, dim=0)
            q_BSHR = (q_BSHR * temperature(own, *self.temperature)[..., None, None]).to(q_BSHR.dtype)
        out_BSHV, *bounds = self.attend.with_bound(q_BSHR, k_BSGR, v_BSGV, first_BS, self.sinks_H)
        if gate_BSHV is not None:
            out_BSHV = out_BSHV * torch.sigmoid(gate_BSHV)
        out_BSD = reduce_scatter(self.out_proj(out_BSHV.flatten(2)), "tp", self.tp, dim=1)
        x_BSD = x_BSD + (out_BSD + self.biases["o"] if "o" in self.biases else out_BSD)
        return (x_BSD, *bounds) if bounds else x_BSD

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return (x + self.biases[name] if name in self.biases else x).unflatten(-1, (-1, self.head_dim))

    def _whole_sequence(self, *heads: Tensor) -> tuple[Tensor, ...]:
        of_ranks = [x.unflatten(2, (self.attend.exchanging, -1)) for x in heads]
        counts = [x.shape[3] for x in of_ranks]
        return self.attend.whole_sequence(torch.cat(of_ranks, dim=3).flatten(2, 3)).split(counts, dim=2)


class ProjectionNorm(RMSNorm):
    """RMSNorm over all heads together (MiniMax-M2); ranks of tp have some of the heads each."""

    def __init__(self, heads: int, config: ModelConfig, tp: int) -> None:
        super().__init__(heads * config.head_dim // tp, config.norm_eps)
        self.tp = tp
        cut_along_tp(self.weight, tp, dim=0)

    def forward(self, x_BSHR: Tensor) -> Tensor:
        x = x_BSHR.flatten(2)
        assert self.eps is not None
        if self.tp == 1:
            return super().forward(x).view(x_BSHR.shape)
        with part("layernorm"):
            mean = x.float().square().mean(-1, keepdim=True)
        # gathered, not reduced: ranks use the mean for different heads, and the backward adds their gradients
        mean = all_gather(mean, "tp", self.tp, dim=2).mean(-1, keepdim=True)
        with part("layernorm"):
            normed = x.float() * torch.rsqrt(mean + self.eps)
            return (normed * self.weight).to(x.dtype).view(x_BSHR.shape)


def _norm_of(heads: int, config: ModelConfig, tp: int) -> nn.Module:
    if not config.qk_norm:
        return nn.Identity()
    if config.qk_norm_whole:
        return ProjectionNorm(heads, config, tp)
    return RMSNorm(config.head_dim, config.norm_eps, elementwise_affine=config.qk_norm_weight)


def temperature(position: Tensor, floor: int, scale: float) -> Tensor:
    """Return the factor on queries at each position, fp32: Llama 4's (arXiv 2501.19399)."""
    return 1.0 + scale * torch.log1p((position + 1) // floor)


# attention modules; their facts are in `graphmoe.plan.attention.FACTS`
KINDS: dict[str, Callable[[ModelConfig, Layout], nn.Module]] = {
    "mla": LatentAttention,
    "gqa": GroupedQueryAttention,
    "delta_net": GatedDeltaNet,
}


def rope_tables(config: ModelConfig, dim: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, scaled by `yarn_magnitude`: two fp32 [S, P]."""
    position_S = torch.arange(seq_len, device=device, dtype=torch.float32)
    angle_SP = torch.outer(position_S, inverse_frequencies(config, dim).to(device))
    magnitude = 1.0
    if config.rope_scaling is RopeScaling.yarn:
        magnitude = yarn_magnitude(config.yarn_factor, config.yarn_mscale)
        magnitude /= yarn_magnitude(config.yarn_factor, config.yarn_mscale_all_dim)
    return angle_SP.cos() * magnitude, angle_SP.sin() * magnitude


def inverse_frequencies(config: ModelConfig, dim: int) -> Tensor:
    """Return radians per position of each rotation pair, fp32 [dim / 2], on the CPU."""
    exponent_P = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    kept_P = 1.0 / config.rope_theta**exponent_P
    if config.rope_scaling is RopeScaling.none:
        return kept_P
    if config.rope_scaling is RopeScaling.llama3:
        least, most = config.llama3_low_freq_factor, config.llama3_high_freq_factor
        turns_P = config.llama3_original_context * kept_P / (2 * math.pi)
        share_P = ((turns_P - least) / (most - least)).clamp(0, 1)
        return kept_P * share_P + kept_P / config.llama3_factor * (1 - share_P)
    low, high = (_pair_of_rotations(config, dim, n) for n in (config.yarn_beta_fast, config.yarn_beta_slow))
    if config.yarn_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pair_P = torch.arange(dim // 2, dtype=torch.float32)
    # if high < low no full rotation fits: the published codes keep every frequency then
    ramp_P = ((pair_P - low) / (high - low or 0.001)).clamp(0, 1)
    return kept_P * (1 - ramp_P) + kept_P / config.yarn_factor * ramp_P


def yarn_magnitude(factor: float, coefficient: float) -> float:
    """YaRN's attention scaling (mscale); 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def attention_scale(config: ModelConfig, head_dim: int) -> float:
    """1 / sqrt(head size), times YaRN's squared magnitude."""
    scale = head_dim**-0.5
    if config.rope_scaling is RopeScaling.yarn:
        scale *= yarn_magnitude(config.yarn_factor, config.yarn_mscale_all_dim) ** 2
    return scale


def rotate_pairs(x_BSHR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring elements (0, 1), (2, 3), ... as DeepSeek checkpoints store them."""
    a, b = x_BSHR.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack(_rotate(a, b, cos, sin), dim=-1).flatten(-2).to(x_BSHR.dtype)


def rotate_halves(x_BSHR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate element i with element i + P, as Qwen3 and Mixtral checkpoints store them; the rest passes."""
    width = 2 * cos.shape[-1]
    if width < x_BSHR.shape[-1]:
        return torch.cat([rotate_halves(x_BSHR[..., :width], cos, sin), x_BSHR[..., width:]], dim=-1)
    a, b = x_BSHR.float().chunk(2, dim=-1)
    return torch.cat(_rotate(a, b, cos, sin), dim=-1).to(x_BSHR.dtype)


def _rotate(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return a * cos - b * sin, a * sin + b * cos


def _pair_of_rotations(config: ModelConfig, dim: int, rotations: float) -> float:
    turns = config.yarn_original_context / (rotations * 2 * math.pi)
    return dim * math.log(turns) / (2 * math.log(config.rope_theta))
