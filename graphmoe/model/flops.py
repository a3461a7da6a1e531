"""Model FLOPs per token, and the peak of the device that they are measured against.

Convention: two FLOPs per multiply-add; the backward of a matrix product costs twice its forward, so a
weight that a token meets costs 6 FLOPs in a training step; causal attention is counted by half, S/2 keys
for each query; the embedding (a lookup), router and norms are not counted, nor is recomputation.
Every multi-token-prediction layer adds its projection, its MoE layer and one more pass through the head.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from graphmoe.config.schema import AttentionKind, ModelConfig
from graphmoe.model.sizes import attention_weights


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one token's forward in each part of the model."""

    attention_projections: int
    attention_scores: int
    dense_mlp: int
    routed_experts: int
    shared_experts: int
    head: int
    mtp: int


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token in training, forward by component, and backward as twice that."""

    components: ForwardFlops

    @property
    def forward(self) -> int:
        """FLOPs of the forward."""
        return sum(dataclasses.astuple(self.components))

    @property
    def backward(self) -> int:
        """FLOPs of the backward."""
        return 2 * self.forward

    @property
    def total(self) -> int:
        """FLOPs of forward and backward."""
        return 3 * self.forward


def swiglu_weights(model: ModelConfig, ffn_size: int) -> int:
    """Weights of one SwiGLU MLP: gate, up and down."""
    return 3 * model.hidden_size * ffn_size


def flops_per_token(model: ModelConfig, seq_len: int) -> TokenFlops:
    """FLOPs of one token, averaged over the positions of a sequence of ``seq_len`` tokens."""
    num_moe_layers = model.num_layers - model.num_dense_layers
    projections = 2 * attention_weights(model)
    scores = attention_scores(model, seq_len)
    routed = 2 * model.top_k * swiglu_weights(model, model.expert_ffn_size)
    shared = 2 * swiglu_weights(model, model.shared_ffn_size)
    head = 2 * model.vocab_size * model.hidden_size
    mtp_projection = 2 * 2 * model.hidden_size**2
    return TokenFlops(
        ForwardFlops(
            attention_projections=model.num_layers * projections,
            attention_scores=model.num_layers * scores,
            dense_mlp=2 * model.num_dense_layers * swiglu_weights(model, model.dense_ffn_size),
            routed_experts=num_moe_layers * routed,
            shared_experts=num_moe_layers * shared,
            head=head,
            mtp=model.mtp_depth * (mtp_projection + projections + scores + routed + shared + head),
        )
    )


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak in TFLOP/s of the device of that name; None where it is not known.

    ``device_name`` is what ``torch.cuda.get_device_name`` says. A MIG slice has no entry.
    """
    words = device_words(device_name)
    if "MIG" in words:
        return None
    for required, peak in _PEAKS:
        if words.issuperset(required.split()):
            return peak
    return None


def device_words(device_name: str) -> set[str]:
    """The words of a device's name in capitals: H100 is one of "NVIDIA H100 PCIe", H200 none of "GH200"."""
    return set(re.split(r"[^A-Z0-9]+", device_name.upper()))


# (words that the name holds, dense bf16 TFLOP/s), the more specific names of a family first. NVIDIA's data
# sheets state sparse figures for Hopper and newer; halved here.
_PEAKS: tuple[tuple[str, float], ...] = (
    # AMD Instinct data sheets, "Peak bfloat16": amd.com/en/products/accelerators/instinct.html
    ("MI355X", 2516.6),
    ("MI350X", 2309.6),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI300A", 980.6),
    ("MI250X", 383.0),
    ("MI250", 362.1),
    ("MI210", 181.0),
    # NVIDIA Blackwell: HGX B200 (8 GPUs) and GB200 NVL72 data sheets, per GPU
    ("GB200", 2500.0),
    ("B200", 2250.0),
    # NVIDIA H200, GH200 and H100 data sheets; the PCIe and NVL forms have lower clocks
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H100 PCIE", 756.5),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800 PCIE", 756.5),
    ("H800", 989.4),
    ("H20", 148.0),
    # NVIDIA Ampere and Ada data sheets
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.1),
    ("L4", 121.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    # NVIDIA Ada architecture white paper, appendix A: bf16 with fp32 accumulation
    ("4090", 165.2),
)


def attention_scores(model: ModelConfig, seq_len: int) -> int:
    """Forward FLOPs of one token's scores and weighted values in one layer, causal."""
    if model.attention is AttentionKind.gqa:
        per_key = 2 * model.num_heads * 2 * model.head_dim
    else:
        qk_head_dim = model.qk_nope_head_dim + model.qk_rope_head_dim
        per_key = 2 * model.num_heads * (qk_head_dim + model.v_head_dim)
    return per_key * seq_len // 2
