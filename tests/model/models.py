"""A small model of each kind of attention, and a batch."""

import dataclasses

import pytest
import torch

from graphmoe.config.schema import LinearAttention, ModelConfig, ScoreFunction

B, S, V = 2, 12, 60
MLA = ModelConfig(
    vocab_size=V, hidden_size=32, num_layers=3, dense_ffn_size=24, num_heads=2, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, num_experts=6, expert_ffn_size=12,
    shared_ffn_size=12, init_std=0.3,
)  # fmt: skip
GQA = dataclasses.replace(
    MLA, attention="gqa", num_kv_heads=1, head_dim=8, qk_norm=True,
    score_function=ScoreFunction.sigmoid, renormalise=True, selection_bias=True,
)  # fmt: skip
HYBRID = dataclasses.replace(  # layers 0 and 1 have a state, layer 2 attends
    GQA, linear_attention=LinearAttention.delta_net, full_every=3, linear_key_heads=1, linear_value_heads=2,
    linear_key_head_dim=16, linear_value_head_dim=16,
    norm_eps=1e-3,  # or the norm of a result amplifies its rounding, if a query has hardly seen its key
)  # fmt: skip
CONFIGS = {"mla": MLA, "gqa": GQA, "hybrid": HYBRID}
both = pytest.mark.parametrize("name", CONFIGS)


def make_batch(sequences=B, length=S, vocab=V):
    """Tokens and labels; of the first sequence a few labels are ignored."""
    tokens = torch.randint(0, vocab, (sequences, length + 1), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].clone()
    labels[0, 5:8] = -100
    return tokens[:, :-1], labels


def filled(module, std=0.2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std, generator=generator)
    return module
