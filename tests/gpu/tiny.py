"""A tiny model on a GPU."""

import pytest

GPU = (
    "run.device=cuda",
    "precision.compute=bf16",
    "graph.scope=none",
    "pipeline.ep_overlap=false",
    "model.vocab_size=512",
    "model.hidden_size=128",
    "model.dense_ffn_size=256",
    "model.num_heads=4",
    "model.kv_lora_rank=64",
    "model.qk_nope_head_dim=32",
    "model.qk_rope_head_dim=16",
    "model.v_head_dim=32",
    "model.num_experts=8",
    "model.expert_ffn_size=64",
    "model.shared_ffn_size=64",
    "model.context_length=256",
    "optim.lr=1e-3",
)
COMPILED = pytest.mark.parametrize(
    "compiled", ["compile.enabled=true", "compile.enabled=false"], ids=["compiled", "eager"]
)
DOCUMENTS = ("data.document_mask=true", "data.document_length=60")
UNREAD = ("train.steps=1000", "train.log_interval=1000", "train.val_batches=0", "checkpoint.interval=0")
