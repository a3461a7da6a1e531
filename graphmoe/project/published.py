"""Memory and bubble under the assumptions of a published chart of a model of 10^12 parameters.

The chart counts bf16 gradients, 2 bytes of a main weight and 8 of moments, shared by the ranks that hold the
same experts, an attention of H^2 weights and no shared expert; each virtual stage has one layer, whatever the
schedule. So the chart is something to compare with; a run of this project needs other bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphmoe.config.schema import AttentionKind, ConfigError, ModelConfig, RunConfig
from graphmoe.plan.layout import Layout

BF16 = 2


def published_memory_gb(config: RunConfig, layout: Layout) -> dict[str, float]:
    """Decimal GB of a rank by kind, rounded to 0.1 as in the chart, whose totals add the rounded cells.

    *Raises* ConfigError for a configuration that the chart's assumptions do not describe.
    """
    if problems := [f"assumptions=published {problem}" for problem in _published_rules(config, layout)]:
        raise ConfigError("; ".join([*problems, "use assumptions=exact, which does"]))
    weights = _weights(config.model, layout)
    sizes = {
        "params": BF16 * weights,
        "grads": BF16 * weights,
        "main_params": 2 * weights / layout.edp,
        "moments": 8 * weights / layout.edp,
        "activations": _activation_bytes(config, layout),
        "buffers": 0.0,
    }
    cells = {kind: round(size / 1e9, 1) for kind, size in sizes.items()}
    return {**cells, "total": round(sum(cells.values()), 1)}


def published_bubble(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> float:
    """Share of a step in which a rank waits: (p - 1) / (p - 1 + m v)."""
    return (num_ranks - 1) / (num_ranks - 1 + num_micro_batches * virtual_stages)


def _weights(model: ModelConfig, layout: Layout) -> float:
    """Parameters of a rank: its layers and one matrix of the vocabulary."""
    d = model.hidden_size
    of_layer = model.num_experts / layout.ep * 3 * d * model.expert_ffn_size + d * d
    return model.num_layers / layout.pp * of_layer + model.vocab_size * d


def _activation_bytes(config: RunConfig, layout: Layout) -> float:
    """Bytes that the first rank of an interleaved pipeline keeps at most, and of logits in bf16 and fp32."""
    model, d = config.model, config.model.hidden_size
    assert config.data.seq_len is not None
    tokens = config.train.micro_batch_size * config.data.seq_len
    in_flight = (model.num_layers / layout.pp + 1) * layout.pp - 1
    # queries, attention's result, the residual stream; keys and values
    attention = 2 * model.num_heads * model.head_dim + d + 2 * model.num_kv_heads * model.head_dim
    experts = model.top_k * (3 * model.expert_ffn_size + d) + 2 * d
    logits = (BF16 + 4) * (model.vocab_size + d)
    return tokens * (in_flight * BF16 * (attention + experts) + logits) / layout.cp


def _published_rules(config: RunConfig, layout: Layout) -> Iterator[str]:
    model, recompute = config.model, config.recompute
    if model.attention is not AttentionKind.gqa:
        yield f"has no model.attention={model.attention.value}"
    yield from (
        f"has no model.{key}={n}" for key in ("num_dense_layers", "mtp_depth") if (n := getattr(model, key))
    )
    yield from (f"has no parallel.{key}={n}" for key in ("tp", "etp") if (n := getattr(layout, key)) > 1)
    if model.num_layers % layout.pp:
        yield f"shares model.num_layers={model.num_layers} equally, not by parallel.pp={layout.pp}"
    if recompute.all or recompute.segments or recompute.ops or recompute.layer_ids:
        yield "keeps all activations, and recompute.* is given"
    if config.pipeline.layout is not None:
        yield f"knows no pipeline.layout={config.pipeline.layout}"
