"""Seconds of the products, scores and exchange in a layer's segments, for one micro-batch."""

from dataclasses import dataclass

from graphmoe.config.schema import AttentionKind, ModelConfig
from graphmoe.plan.costs.hardware import GPUS_PER_NODE
from graphmoe.plan.costs.rates import FP32, Product, Sides, Speeds
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.experts import balanced_load


@dataclass(frozen=True)
class AttentionParts:
    """Seconds of the parts of attn.

    Exchange counts as far as ranks wait for it; one number stands for the forward and for the backward.
    """

    before: Product
    """Products that make queries, keys and values."""
    up: Product
    """Products among those of ``before`` that are ``mla_up_proj``."""
    scores: Product
    """Attention's own products."""
    after: Product
    """The last product."""
    gather: float
    """Exchange before the products: along tp, and of latents along cp where heads are exchanged."""
    scatter: float
    """Exchange after the last product, along tp."""
    heads: float
    """Exchange of positions for heads along cp, and back."""
    ring: tuple[float, float]
    """Exchange round the ring, forward and backward, that the products of blocks do not cover."""

    @property
    def exchange(self) -> tuple[float, float]:
        """Seconds of all exchange, forward and backward."""
        both = self.gather + self.scatter + self.heads
        return both + self.ring[0], both + self.ring[1]


def attention_parts(sizes: Sizes, speeds: Speeds) -> AttentionParts:
    """Compute the parts of attn."""
    model, layout, rates = sizes.model, sizes.layout, speeds.rates
    *before, last = attention_products(model, layout.tp)
    is_latent = model.attention is AttentionKind.mla
    head = model.qk_nope_head_dim + model.qk_rope_head_dim if is_latent else model.head_dim
    flops = sizes.tokens * attention_scores(model, sizes.seq_len)
    scores = Product(
        speeds.seconds(flops, rates.attention_forward, head, sizes.seq_len),
        speeds.seconds(2 * flops, rates.attention_backward, head, sizes.seq_len),
    )
    return AttentionParts(
        speeds.dense(sizes.gathered, before),
        speeds.dense(sizes.gathered, mla_up_products(model, layout.tp) if is_latent else []),
        scores,
        speeds.dense(sizes.gathered, [last]),
        _latents_gathered(sizes, speeds) if is_latent else along_tp(sizes, speeds),
        along_tp(sizes, speeds),
        _heads_exchanged(sizes, speeds),
        _ring(sizes, speeds, scores),
    )


def along_tp(sizes: Sizes, speeds: Speeds) -> float:
    """Seconds to gather the residual stream along tp, or to sum and scatter it."""
    return speeds.gather(sizes.state * sizes.layout.tp, sizes.layout.tp)


def swiglu(sizes: Sizes, speeds: Speeds, inner: int) -> tuple[Product, Product]:
    """Time gate and up, and down, of a dense MLP or the shared experts."""
    first, second = swiglu_products(sizes.model, inner, sizes.layout.tp)
    return speeds.dense(sizes.gathered, [first]), speeds.dense(sizes.gathered, [second])


def gate(sizes: Sizes, speeds: Speeds) -> Product:
    """Time the router's product, in fp32."""
    model = sizes.model
    flops = 2 * sizes.tokens * model.hidden_size * model.num_experts
    seconds = speeds.seconds(flops, speeds.rates.router, model.num_experts, sizes.tokens)
    return Product(seconds, seconds, seconds)


def experts(sizes: Sizes, speeds: Speeds) -> Product:
    """Time the products of a rank's experts under balanced routing; gate and up take two thirds."""
    model, rates = sizes.model, speeds.rates
    flops = 2 * sizes.tokens * model.top_k * swiglu_weights(model, model.expert_ffn_size)
    inner = model.expert_ffn_size / sizes.layout.etp
    of_expert = sizes.tokens * model.top_k * sizes.layout.size("ep_etp") / model.num_experts
    forward = speeds.seconds(flops, rates.grouped, inner, of_expert)
    weights = speeds.weights_seconds(flops, "grouped_weights", inner, of_expert)
    return Product(forward, forward, weights)


def travelling_bytes(sizes: Sizes) -> float:
    """Bytes of the tokens that arrive at a rank under balanced routing, its own among them.

    The sums that go back are as large. Blocks of copy engines travel whole.
    """
    ranks = sizes.layout.size("ep_etp")
    rows = balanced_load(sizes.model, sizes.layout, sizes.tokens).rows
    return sizes.element_bytes * sizes.model.hidden_size * (ranks * sizes.block if sizes.block else rows)


def _latents_gathered(sizes: Sizes, speeds: Speeds) -> float:
    model, tp = sizes.model, sizes.layout.tp
    of_queries, of_keys = (
        model.q_lora_rank or model.hidden_size,
        model.kv_lora_rank + model.qk_rope_head_dim,
    )
    if sizes.exchanging == 1:
        return speeds.gather(sizes.element_bytes * sizes.gathered * (of_queries + of_keys), tp)
    return speeds.gather(sizes.element_bytes * sizes.gathered * of_queries, tp) + speeds.gather(
        sizes.element_bytes * sizes.attended * of_keys, tp * sizes.exchanging
    )


def _key_sizes(sizes: Sizes) -> tuple[int, int]:
    model = sizes.model
    if model.attention is AttentionKind.gqa:
        return model.head_dim, model.head_dim
    return model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim


def _heads_exchanged(sizes: Sizes, speeds: Speeds) -> float:
    """Seconds to send queries and get results back; keys and values go too where no latents were gathered."""
    model, layout = sizes.model, sizes.layout
    head, value = _key_sizes(sizes)
    of_keys = model.num_kv_heads * (head + value) if model.attention is AttentionKind.gqa else 0
    here = sizes.element_bytes * sizes.gathered / layout.tp
    return speeds.exchange(here * (model.num_heads * (head + value) + of_keys), sizes.exchanging, layout.tp)


def _ring(sizes: Sizes, speeds: Speeds, scores: Product) -> tuple[float, float]:
    """Seconds of a ring, forward and backward, that its products do not cover.

    Each block goes on to the next rank while the products with it run; backward, its fp32 gradients go too.
    The last gradients go home when all products are done (`graphmoe.ops.ring_attention`).
    """
    model, layout, e = sizes.model, sizes.layout, sizes.element_bytes
    if not layout.ring:
        return 0.0, 0.0
    groups = model.num_kv_heads if model.attention is AttentionKind.gqa else model.num_heads
    block = e * sizes.gathered / layout.tp * groups * sum(_key_sizes(sizes))
    passing = speeds.pass_on(block, in_node=layout.cp * layout.tp <= GPUS_PER_NODE)
    gradients, steps = passing * FP32 / e, layout.cp - 1
    forward = steps * max(passing - scores.forward / layout.cp, 0.0)
    backward = steps * max(passing + gradients - scores.inputs / layout.cp, 0.0) + gradients
    return forward, backward


def swiglu_weights(model: ModelConfig, ffn_size: int) -> int:
    """Weights of one SwiGLU MLP: gate, up and down."""
    return 3 * model.hidden_size * ffn_size


def attention_scores(model: ModelConfig, seq_len: int) -> int:
    """Forward FLOPs of one token's scores and weighted values in one layer, causal."""
    if model.attention is AttentionKind.gqa:
        per_key = 2 * model.num_heads * 2 * model.head_dim
    else:
        qk_head_dim = model.qk_nope_head_dim + model.qk_rope_head_dim
        per_key = 2 * model.num_heads * (qk_head_dim + model.v_head_dim)
    return per_key * seq_len // 2


def attention_products(model: ModelConfig, tp: int) -> list[Sides]:
    """Return the weights of a layer's attention, with a rank's share of the heads along tp.

    A rank multiplies its own tokens by the whole weight of latents; here all tokens are multiplied by a part
    of that weight, which is the same work.
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
    """Return the weights among `attention_products` that make heads from latents."""
    *_, up_of_keys, _ = products = attention_products(model, tp)
    return [products[1 if model.q_lora_rank else 0], up_of_keys]


def swiglu_products(model: ModelConfig, inner: int, tp: int) -> list[Sides]:
    """Return the weights of a dense MLP or the shared experts: gate and up in one, and down."""
    return [(model.hidden_size, 2 * inner / tp), (inner / tp, model.hidden_size)]
