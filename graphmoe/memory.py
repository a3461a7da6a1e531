"""Bytes of weights, gradients and optimizer state that a rank keeps all the time."""

from __future__ import annotations

from graphmoe.config import AttentionKind, DpShard, ModelConfig
from graphmoe.layout import Layout
from graphmoe.parameters import count_parameters, swiglu_weights


def state_bytes(
    model: ModelConfig, layout: Layout, *, rounded: bool = True, dp_shard: DpShard = DpShard.zero1
) -> dict[str, float]:
    """Bytes on each rank by kind, an average over pipeline stages; without activations.

    ``rounded``: weights are bf16, beside fp32 main weights. With zero1 gradients and weights are held
    whole, as far as tp, ep and etp leave them on a rank; the rest, and a sum of the gradients, is shared out
    to those that hold the same. With fsdp2 all is shared out; what is gathered for a layer is not counted.
    """
    if dp_shard is DpShard.fsdp2:
        owned = count_parameters(model).total.full / layout.size("world")
        return {"main_weights_fp32": 4 * owned, "gradients_fp32": 4 * owned, "moments_fp32": 8 * owned}
    kinds = ("weights_bf16" if rounded else "weights_fp32", "main_weights_fp32", "gradients_fp32")
    found = dict.fromkeys((*kinds, "moments_fp32"), 0.0)
    weight = 2 if rounded else 4
    for held, ranks in _held(model, layout):
        owned = held / ranks
        shared = ranks > 1
        found[kinds[0]] += weight * held + (weight * owned if rounded and shared else 0)
        found["main_weights_fp32"] += 4 * owned if rounded or shared else 0
        found["gradients_fp32"] += 4 * held + (4 * owned if shared else 0)
        found["moments_fp32"] += 8 * owned
    return {kind: size for kind, size in found.items() if size}


def _held(model: ModelConfig, layout: Layout) -> list[tuple[float, int]]:
    """Parameters on a rank, and how many ranks hold the same: experts, what tp cuts, and all else."""
    counts = count_parameters(model).total
    of_mtp = model.mtp_depth * model.num_experts * swiglu_weights(model, model.expert_ffn_size)
    experts = counts.routed_experts + of_mtp
    whole = _whole(model)
    of_experts = experts / (layout.ep * layout.etp * layout.pp), layout.edp
    of_whole = whole / layout.pp, layout.size("stage")
    cut = (counts.full - experts - whole) / (layout.tp * layout.pp), layout.size("dp_cp")
    return [of_experts, cut, of_whole]


def _whole(model: ModelConfig) -> int:
    """Parameters that every rank of tp has: norms, gates, what makes latents, what joins inputs of MTP."""
    counts = count_parameters(model).total
    d, layers = model.hidden_size, model.num_layers + model.mtp_depth
    latents = 0
    if model.attention is AttentionKind.mla:
        latents = d * (model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim)
    norms_of_layer = (counts.norms - d) // model.num_layers
    of_mtp = 2 * d * d + 3 * d + d * model.num_experts + norms_of_layer
    return counts.router + counts.norms + layers * latents + model.mtp_depth * of_mtp
