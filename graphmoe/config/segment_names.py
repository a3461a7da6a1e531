"""The names of segments, in their order in the model."""

from __future__ import annotations

SEGMENT_NAMES = (
    "embed",
    "attn",
    "mlp",
    "moe_router",
    "moe_preprocess",
    "moe_dispatch",
    "shared_experts",
    "moe_experts",
    "moe_combine",
    "loss",
    "optimizer",
)
