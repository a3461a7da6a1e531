"""Two GPUs: NCCL sums inside captured steps, and both ranks keep the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphmoe.runtime.ranks import Ranks
from tests.distributed.ranks import Job
from tests.distributed.training import Outcome, Training
from tests.gpu.tiny import GPU
from tests.tolerances import assert_forward_close

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
BASE = (
    *GPU, "model.num_layers=2", "train.steps=8", "train.val_interval=4", "train.log_interval=4",
    "train.global_batch_size=8", "optim.schedule=constant", "precision.deterministic=true",
)  # fmt: skip
COMPILED, EAGER = (*BASE, "compile.enabled=true"), (*BASE, "compile.enabled=false")
PLAIN = {"compiled": COMPILED, "eager": EAGER}
CAPTURED = {
    ("compiled", "full_iteration"): (*COMPILED, "graph.scope=full_iteration"),
    ("compiled", "layer"): (*COMPILED, "graph.scope=layer"),
    ("eager", "full_iteration"): (*EAGER, "graph.scope=full_iteration"),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, list[Outcome]]:
    """The outcomes of two ranks; that they end at all shows that captured collectives let them."""
    runs = {**PLAIN, **{" ".join(name): words for name, words in CAPTURED.items()}}
    cases = {name: Training(words) for name, words in runs.items()}
    return Job(tmp_path_factory.mktemp("ranks"), cases, device="cuda").results(seconds=400)


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    differ = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not differ, differ


@pytest.mark.parametrize("name", [*PLAIN, *map(" ".join, CAPTURED)])
def test_both_ranks_keep_the_same_bits(two, name):
    first, second = two[name]
    assert torch.equal(first.rows, second.rows)
    assert_same_tensors(first.weights, second.weights)
    assert_same_tensors(first.gradients, second.gradients)


@pytest.mark.parametrize("name", CAPTURED, ids=" ".join)
def test_captured_steps_of_two_ranks_are_bitwise_the_uncaptured_ones(two, name):
    captured, plain = two[" ".join(name)][0], two[name[0]][0]
    assert torch.equal(captured.rows, plain.rows)
    assert_same_tensors(captured.weights, plain.weights)


def test_losses_are_those_of_one_gpu_on_the_same_global_batches(two, tmp_path):
    alone = Training(EAGER)(Ranks(), tmp_path)
    losses = [
        torch.tensor([row["loss"] for row in run.written if "loss" in row])
        for run in (two["eager"][0], alone)
    ]
    for one, other in zip(*losses, strict=True):
        assert_forward_close(one.bfloat16(), other)  # products in bf16
