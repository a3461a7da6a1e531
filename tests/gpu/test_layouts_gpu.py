"""Two GPUs in every layout, compiled and captured as far as each goes: the losses of one GPU, and an end."""

from __future__ import annotations

import pytest
import torch

from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Job
from tests.distributed.training import Outcome, Training
from tests.gpu.test_data_parallel_gpu import BASE, EAGER, assert_same_tensors
from tests.tolerances import assert_forward_close

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
TP, EP, CP = ((*BASE, "compile.enabled=true", f"parallel.{axis}=2") for axis in ("tp", "ep", "cp"))
RUNS = {
    "tp": TP,
    "tp layer": (*TP, "graph.scope=layer"),
    "ep": EP,
    "ep segments": (*EP, "graph.scope=[attn,mlp,moe_router,moe_preprocess,shared_experts]"),
    "cp": CP,
    "cp full_iteration": (*CP, "graph.scope=full_iteration"),
    "ring": (*CP, "parallel.cp_method=ring"),
    "ring layer": (*CP, "parallel.cp_method=ring", "graph.scope=layer"),
}
CAPTURED = {name: name.split()[0] for name in RUNS if " " in name}
"""Captured runs, each with the name of the same run uncaptured."""


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, list[Outcome]]:
    """The outcomes of two ranks; that they end at all shows that captured collectives let them."""
    cases = {name: Training(words) for name, words in RUNS.items()}
    return Job(tmp_path_factory.mktemp("ranks"), cases, device="cuda").results(seconds=600)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Outcome:
    return Training(EAGER)(Ranks(), tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_one_gpu_on_the_same_global_batches(two, alone, name):
    losses = [
        torch.tensor([row["loss"] for row in run.written if "loss" in row]) for run in (two[name][0], alone)
    ]
    for one, other in zip(*losses, strict=True):
        assert_forward_close(one.bfloat16(), other)  # products in bf16
    assert torch.equal(two[name][0].rows, two[name][1].rows)


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_are_bitwise_the_uncaptured_ones(two, name):
    for captured, plain in zip(two[name], two[CAPTURED[name]], strict=True):
        assert torch.equal(captured.rows, plain.rows)
        assert_same_tensors(captured.weights, plain.weights)
