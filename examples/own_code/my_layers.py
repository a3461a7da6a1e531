"""Layers: other orders of norms, attention, experts and sums than the standard one's."""

from torch import nn

from graphmoe.model.blocks import RMSNorm
from graphmoe.model.layer import MoELayer


class NormedAfter(nn.Module):
    """Attention whose result is normed before it is added to x, as in OLMo 2 (arXiv 2501.00656)."""

    def __init__(self, attn, config):
        super().__init__()
        self.attn, self.norm = attn, RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_BSD, *tables):  # cos_SP, sin_SP, and first_BS with data.document_mask
        return x_BSD + self.norm(self.attn(x_BSD, *tables) - x_BSD)


class Sandwich(MoELayer):
    """A MoE layer with a norm before its attention and one after it."""

    documents = True

    def __init__(self, config, *others):
        super().__init__(config, *others)
        self.attn = NormedAfter(self.attn, config)
