"""Section ``model`` of a run's configuration: shape, router and losses."""

from dataclasses import dataclass
from typing import Annotated

from graphmoe.config.choices import (
    ATTENTIONS,
    LAYERS,
    AttentionBackend,
    AuxLoss,
    GroupScore,
    RopeScaling,
    ScoreFunction,
)
from graphmoe.config.ranges import FP32, INT32, MANY_LAYERS, NOT_NEGATIVE, POSITIVE, CountOrZero, Size


@dataclass
class ModelConfig:
    """Shape, router and losses of the model."""

    name: str = "custom"
    """Preset name, and the default run name."""
    vocab_size: Size = 4096
    """Rows of embedding and head, > 0."""
    hidden_size: Size = 256
    """Width of the residual stream, > 0."""
    tie_embeddings: bool = False
    """Share embedding and head weights."""
    num_layers: Annotated[int, POSITIVE, MANY_LAYERS] = 4
    """Dense and MoE layers, without multi-token-prediction layers, > 0."""
    num_dense_layers: CountOrZero = 1
    """Leading layers with a dense MLP, 0 to num_layers."""
    dense_ffn_size: Size = 704
    """Dense MLP's intermediate width, > 0."""
    attention: Annotated[str, ATTENTIONS] = "mla"
    """mla (multi-head latent), gqa (grouped query), or package.module:NAME."""
    layer: Annotated[str, LAYERS] = "standard"
    """Order of a MoE layer's parts: standard, or package.module:NAME."""
    num_heads: Size = 4
    """Query heads, > 0."""
    num_kv_heads: Annotated[int, INT32] = 4
    """gqa: key-value heads, a divisor of num_heads."""
    head_dim: Size = 64
    """gqa: head size, even, > 0."""
    qk_norm: bool = False
    """gqa: RMSNorm on query and key heads (Qwen3)."""
    q_lora_rank: Annotated[int, NOT_NEGATIVE, INT32] = 0
    """mla: query compression rank; 0: none."""
    kv_lora_rank: Size = 128
    """mla: key-value compression rank, > 0."""
    qk_nope_head_dim: Size = 32
    """mla: query and key head size without rotary embedding, > 0."""
    qk_rope_head_dim: Size = 16
    """mla: query and key head size with rotary embedding, even, > 0."""
    v_head_dim: Size = 32
    """mla: value head size, > 0."""
    attention_backend: AttentionBackend = AttentionBackend.auto
    """Kernel: auto, sdpa, padded_flash, turbo (Primus-Turbo), te (Transformer Engine)."""
    rope_theta: Annotated[float, POSITIVE, FP32] = 10000.0
    """Rotary embedding base, > 0."""
    rope_scaling: RopeScaling = RopeScaling.none
    """Rotary context extension: none or yarn."""
    yarn_factor: Annotated[float, FP32] = 40.0
    """YaRN: new over original context, >= 1."""
    yarn_original_context: Size = 4096
    """YaRN: original context in tokens, > 0."""
    yarn_beta_fast: float = 32.0
    """YaRN: rotations above which frequencies are kept, > yarn_beta_slow."""
    yarn_beta_slow: Annotated[float, POSITIVE] = 1.0
    """YaRN: rotations below which frequencies are divided by the factor, > 0."""
    yarn_mscale: Annotated[float, NOT_NEGATIVE, FP32] = 1.0
    """YaRN: magnitude coefficient of rotated parts, >= 0."""
    yarn_mscale_all_dim: Annotated[float, NOT_NEGATIVE, FP32] = 0.0
    """YaRN: softmax scale coefficient, >= 0."""
    context_length: Size = 4096
    """Longest supported sequence in tokens, > 0."""
    norm_eps: Annotated[float, POSITIVE, FP32] = 1e-6
    """RMSNorm epsilon, > 0."""
    init_std: Annotated[float, POSITIVE, FP32] = 0.02
    """Standard deviation of initial weights, > 0."""
    num_experts: Size = 8
    """Routed experts per MoE layer, > 0."""
    top_k: Size = 2
    """Routed experts per token, 1 to num_experts."""
    expert_ffn_size: Size = 176
    """Routed expert's intermediate width, > 0."""
    shared_ffn_size: Annotated[int, NOT_NEGATIVE, INT32] = 176
    """Shared experts' total intermediate width; 0: none."""
    score_function: ScoreFunction = ScoreFunction.softmax
    """Router scores, fp32: softmax or sigmoid of the logits."""
    softmax_after_topk: bool = False
    """Softmax over selected experts only (Mixtral); needs score_function=softmax."""
    renormalise: bool = False
    """Divide selected scores by their sum."""
    routed_scale: Annotated[float, POSITIVE, FP32] = 1.0
    """Factor on selected scores, > 0."""
    num_groups: Size = 1
    """Expert groups, a divisor of num_experts; 1: no limit."""
    topk_groups: Size = 1
    """Groups selected per token, 1 to num_groups."""
    group_score: GroupScore = GroupScore.max
    """max (DeepSeek-V2), topk_sum (best top_k / topk_groups), top2_sum (best two, V3's code)."""
    selection_bias: bool = False
    """Per-expert bias for selection only (aux-loss-free balancing)."""
    bias_update_rate: Annotated[float, NOT_NEGATIVE, FP32] = 0.001
    """Selection bias change per step, >= 0."""
    aux_loss: AuxLoss = AuxLoss.sequence
    """Balance loss over: none, sequence, micro_batch, or global_batch."""
    aux_loss_coef: Annotated[float, NOT_NEGATIVE, FP32] = 0.001
    """Balance loss weight, >= 0."""
    z_loss_coef: Annotated[float, NOT_NEGATIVE, FP32] = 0.0
    """Router z-loss (mean squared logsumexp of logits) weight, >= 0."""
    peak_lr: Annotated[float, POSITIVE] = 3e-4
    """Recommended peak learning rate for optim=adamw, > 0."""
    mtp_depth: Annotated[int, NOT_NEGATIVE, MANY_LAYERS] = 0
    """Multi-token-prediction layers (DeepSeek-V3), >= 0."""
    mtp_loss_weight: Annotated[float, NOT_NEGATIVE, FP32] = 0.3
    """Mean multi-token-prediction loss weight, >= 0."""
