"""The attn segment with the gated delta rule (Gated Delta Networks, arXiv 2412.06464), as in Qwen3-Next.

Suffixes: B batch, S sequence, D hidden, H key heads, V value heads, K size of a key head, W of a value head,
T taps of the convolution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphmoe.config.schema import DeltaNetBackend, ModelConfig
from graphmoe.model.blocks import RMSNorm, column_parallel, cut_along_tp, row_parallel
from graphmoe.ops import accumulator
from graphmoe.ops.collectives import all_gather, reduce_scatter
from graphmoe.ops.delta_net import delta_net, fla
from graphmoe.ops.short_conv import gated_norm, short_conv, unit_norm
from graphmoe.plan.layout import ALONE, Layout
from graphmoe.segments import part


class GatedDeltaNet(nn.Module):
    """Attention that reads a state in place of keys; it has no rotary embedding.

    ``convs`` are taps [channels, T] of queries, keys and values. ``log_rate_V`` is the logarithm of a head's
    largest decay per unit of softplus, and ``dt_bias_V`` is added before that (A_log and dt_bias in Mamba-2).
    """

    def __init__(self, config: ModelConfig, layout: Layout = ALONE) -> None:
        super().__init__()
        width, tp, taps = config.hidden_size, layout.tp, config.linear_conv_taps
        keys = config.linear_key_heads * config.linear_key_head_dim
        values = config.linear_value_heads * config.linear_value_head_dim
        self.tp, self.key, self.value = tp, config.linear_key_head_dim, config.linear_value_head_dim
        self.backend = config.delta_net_backend
        self.norm = RMSNorm(width, config.norm_eps)
        self.q_proj, self.k_proj = (column_parallel(width, keys, tp) for _ in range(2))
        self.v_proj, self.gate_proj = (column_parallel(width, values, tp) for _ in range(2))
        self.beta_proj, self.decay_proj = (
            column_parallel(width, config.linear_value_heads, tp) for _ in range(2)
        )
        sizes = {"q": keys, "k": keys, "v": values}
        self.convs = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(size // tp, taps)) for name, size in sizes.items()}
        )
        self.log_rate_V, self.dt_bias_V = (
            nn.Parameter(torch.empty(config.linear_value_heads // tp)) for _ in range(2)
        )
        for parameter in (*self.convs.values(), self.log_rate_V, self.dt_bias_V):
            cut_along_tp(parameter, tp, dim=0)
        self.out_norm = nn.RMSNorm(self.value, config.norm_eps)
        self.out_proj = row_parallel(values, width, tp)

    def forward(
        self, x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor, first_BS: Tensor | None = None
    ) -> Tensor:
        """x + attention(norm(x)), shape [B, S / tp, D]; the rotary tables are not read."""
        h_BSD = all_gather(self.norm(x_BSD), "tp", self.tp, dim=1)
        q, k, v = (
            short_conv(linear(h_BSD), self.convs[name], first_BS)
            for name, linear in (("q", self.q_proj), ("k", self.k_proj), ("v", self.v_proj))
        )
        q_BSHK, k_BSHK = (unit_norm(x.unflatten(-1, (-1, self.key))) for x in (q, k))
        v_BSVW = v.unflatten(-1, (-1, self.value))
        # errors of decays accumulate over the sequence, so they are fp32 in a bf16 model
        wide = accumulator(h_BSD)
        beta_BSV = self.beta_proj(h_BSD).to(wide).sigmoid()
        step_BSV = F.softplus(self.decay_proj(h_BSD).to(wide) + self.dt_bias_V.to(wide))
        decay_BSV = -self.log_rate_V.to(wide).exp() * step_BSV
        with part("core_attn"):
            run = fla.delta_net if self.backend is DeltaNetBackend.fla else delta_net
            out_BSVW = run(q_BSHK, k_BSHK, v_BSVW, decay_BSV, beta_BSV, first_BS)
        gate_BSVW = self.gate_proj(h_BSD).unflatten(-1, (-1, self.value))
        assert self.out_norm.eps is not None
        out_BSVW = gated_norm(out_BSVW, self.out_norm.weight, gate_BSVW, self.out_norm.eps)
        return x_BSD + reduce_scatter(self.out_proj(out_BSVW.flatten(2)), "tp", self.tp, dim=1)
