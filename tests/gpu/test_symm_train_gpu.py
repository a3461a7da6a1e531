"""GPUs that read each other's tokens: training is that of alltoall, captured and overlapped too.

Two ranks share the GPU where there is one; whole steps are captured where each has its own.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks import Job, share_gpus
from tests.distributed.training import Outcome, Training
from tests.gpu.test_data_parallel_gpu import BASE, assert_same_tensors
from tests.tolerances import assert_forward_close

RANKS = 4 if torch.cuda.device_count() >= 4 else 2
COMMON = (
    *BASE, "compile.enabled=true", f"parallel.ep={RANKS}", "train.steps=5", "train.global_batch_size=16",
    "train.micro_batch_size=1", "graph.warmup_steps=2",
)  # fmt: skip
SYMM = (*COMMON, "moe.dispatcher=symm", "moe.receive_budget=worst_case")
ALL_RUNS = {
    "alltoall": COMMON,
    "symm": SYMM,
    "symm layer": (*SYMM, "graph.scope=layer"),
    "symm dispatch": (*SYMM, "graph.scope=[moe_dispatch]"),
    "symm combine": (*SYMM, "graph.scope=[moe_combine]"),
    "symm experts": (*SYMM, "graph.scope=[shared_experts,moe_experts]"),
    # `partial` would cut the dense layer's unit in two, whose results in bf16 are rounded in between
    "symm router": (*SYMM, "graph.scope=[attn,mlp,moe_router,moe_preprocess]"),
    "symm full_iteration": (*SYMM, "graph.scope=full_iteration"),
    "symm overlap": (*SYMM, "moe.transport=pull", "pipeline.ep_overlap=true"),
    "symm overlap full_iteration": (
        *SYMM, "moe.transport=pull", "pipeline.ep_overlap=true", "graph.scope=full_iteration",
    ),
    "copies": (*SYMM, "moe.transport=copy_engine"),
    "copies overlap": (*SYMM, "moe.transport=copy_engine", "pipeline.ep_overlap=true"),
    "copies full_iteration": (*SYMM, "moe.transport=copy_engine", "graph.scope=full_iteration"),
    "copies overlap full_iteration": (*SYMM, "pipeline.ep_overlap=true", "graph.scope=full_iteration"),
}  # fmt: skip
RUNS = {
    name: words
    for name, words in ALL_RUNS.items()
    if not (share_gpus(RANKS) and "graph.scope=full_iteration" in words)
}
PLAIN = {
    "symm layer": "symm",
    "symm dispatch": "symm",
    "symm combine": "symm",
    "symm experts": "symm",
    "symm router": "symm",
    "symm full_iteration": "symm",
    "symm overlap": "symm",
    "symm overlap full_iteration": "symm",
    "copies overlap": "copies",
    "copies full_iteration": "copies",
    "copies overlap full_iteration": "copies",
}
"""Runs that must be bitwise another."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[Outcome]]:
    cases = {name: Training(words) for name, words in RUNS.items()}
    return Job(tmp_path_factory.mktemp("ranks"), cases, RANKS, device="cuda").results(seconds=580)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "alltoall"])
def test_losses_are_those_of_alltoall(outcomes, name):
    losses = [
        torch.tensor([row["loss"] for row in outcomes[run][0].written if "loss" in row])
        for run in (name, "alltoall")
    ]
    for one, other in zip(*losses, strict=True):
        assert_forward_close(one.bfloat16(), other)  # products in bf16
    assert torch.equal(outcomes[name][0].rows, outcomes[name][1].rows)


@pytest.mark.parametrize("name", [name for name in PLAIN if name in RUNS])
def test_capture_and_overlap_change_no_bit(outcomes, name):
    for found, plain in zip(outcomes[name], outcomes[PLAIN[name]], strict=True):
        differ = (found.rows != plain.rows).nonzero().tolist()
        assert not differ, differ  # (step, place in a row)
        assert_same_tensors(found.weights, plain.weights)
