"""The products with dense weights that a rank computes, by the sides of its part of each weight."""

from __future__ import annotations

from graphmoe.config.schema import AttentionKind, ModelConfig

Sides = tuple[float, float]


def attention_products(model: ModelConfig, tp: int) -> list[Sides]:
    """Those of a layer's attention, of which a rank of tp has its heads.

    Latents are made of a rank's own tokens by the whole weight: the same work as all tokens by a part of it.
    """
    d, heads = model.hidden_size, model.num_heads
    if model.attention is AttentionKind.gqa:
        queries, keys = heads * model.head_dim, model.num_kv_heads * model.head_dim
        return [(d, queries / tp), (d, keys / tp), (d, keys / tp), (queries / tp, d)]
    queries = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    rank, latent = model.q_lora_rank, model.kv_lora_rank
    of_queries: list[Sides] = [(d, rank / tp), (rank, queries / tp)] if rank else [(d, queries / tp)]
    of_keys: list[Sides] = [
        (d, (latent + model.qk_rope_head_dim) / tp),
        (latent, heads * (model.qk_nope_head_dim + model.v_head_dim) / tp),
    ]
    return [*of_queries, *of_keys, (heads * model.v_head_dim / tp, d)]


def mla_up_products(model: ModelConfig, tp: int) -> list[Sides]:
    """Of `attention_products` of latent attention, those that make heads of what was compressed."""
    *_, up_of_keys, _ = products = attention_products(model, tp)
    return [products[1 if model.q_lora_rank else 0], up_of_keys]


def swiglu_products(model: ModelConfig, inner: int, tp: int) -> list[Sides]:
    """Gate and up in one, and down, of a dense MLP or the shared experts."""
    return [(model.hidden_size, 2 * inner / tp), (inner / tp, model.hidden_size)]
