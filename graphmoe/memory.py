"""Bytes of weights, gradients and optimizer state that a rank keeps all the time."""

from __future__ import annotations

from collections.abc import Sequence

from graphmoe.config import AttentionKind, DpShard, ModelConfig
from graphmoe.layout import Layout
from graphmoe.parameters import attention_weights, count_parameters, swiglu_weights
from graphmoe.pipeline_layout import StagePieces, all_pieces, any_of, needs_embedding, normalises


def state_bytes(
    model: ModelConfig,
    layout: Layout,
    stages: Sequence[StagePieces] = (),
    *,
    rounded: bool = True,
    dp_shard: DpShard = DpShard.zero1,
) -> dict[str, float]:
    """Bytes on each rank that has these stages, by kind; without activations. Without stages it has all.

    Where layers are shared out the layout says which places hold the embedding. ``rounded``: weights are
    bf16, beside fp32 main weights. With zero1 gradients and weights are held whole, as far as tp, ep and etp
    leave them on a rank; the rest, and a sum of the gradients, is shared out to those that hold the same.
    With fsdp2 all is shared out; what is gathered for a layer is not counted.
    """
    assert stages or layout.pp == 1
    if dp_shard is DpShard.fsdp2:
        owned = count_parameters(model).total.full / layout.size("world")
        return {"main_weights_fp32": 4 * owned, "gradients_fp32": 4 * owned, "moments_fp32": 8 * owned}
    kinds = ("weights_bf16" if rounded else "weights_fp32", "main_weights_fp32", "gradients_fp32")
    found = dict.fromkeys((*kinds, "moments_fp32"), 0.0)
    weight = 2 if rounded else 4
    for held, ranks in _held(model, layout, stages or [all_pieces(model.num_layers, model.mtp_depth)]):
        owned = held / ranks
        shared = ranks > 1
        found[kinds[0]] += weight * held + (weight * owned if rounded and shared else 0)
        found["main_weights_fp32"] += 4 * owned if rounded or shared else 0
        found["gradients_fp32"] += 4 * held + (4 * owned if shared else 0)
        found["moments_fp32"] += 8 * owned
    return {kind: size for kind, size in found.items() if size}


def _held(model: ModelConfig, layout: Layout, stages: Sequence[StagePieces]) -> list[tuple[float, int]]:
    """Parameters of the stages on a rank, and how many ranks hold the same: by how they are shared out."""
    d, vocabulary = model.hidden_size, model.vocab_size * model.hidden_size
    layers = [number for stage in stages for number in stage.layers]
    mtp = sum(len(stage.mtp) for stage in stages)
    dense = sum(number < model.num_dense_layers for number in layers)
    moe = len(layers) - dense + mtp
    every = len(layers) + mtp
    embeds = any_of(stages, lambda stage: needs_embedding(stage, tied=model.tie_embeddings))
    has_norm = any_of(stages, lambda stage: normalises(stage, model.mtp_depth))
    has_head = any_of(stages, lambda stage: stage.loss) and not model.tie_embeddings
    latents, norms = _latents(model), (count_parameters(model).total.norms - d) // model.num_layers

    experts = moe * model.num_experts * swiglu_weights(model, model.expert_ffn_size)
    cut = every * (attention_weights(model) - latents) + has_head * vocabulary
    cut += dense * swiglu_weights(model, model.dense_ffn_size)
    cut += moe * swiglu_weights(model, model.shared_ffn_size)
    whole = every * (norms + latents) + moe * d * model.num_experts + has_norm * d
    whole += mtp * (2 * d * d + 3 * d)  # what joins the inputs, and the norms around it
    return [
        (experts / (layout.ep * layout.etp), layout.edp),
        (cut / layout.tp, layout.size("dp_cp")),
        (embeds * vocabulary / layout.tp, layout.size("embed")),
        (whole, layout.size("stage")),
    ]


def _latents(model: ModelConfig) -> int:
    """Weights of a layer that make latents, which every rank of tp has."""
    if model.attention is not AttentionKind.mla:
        return 0
    return model.hidden_size * (model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim)
