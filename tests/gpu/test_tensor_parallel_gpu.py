"""Two GPUs: collectives of NCCL inside captured graphs, and the numbers of one GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphmoe.plan.layout import Layout
from graphmoe.runtime.ranks import Ranks
from tests.distributed.parallel_steps import Step, whole_gradient
from tests.distributed.ranks import Job
from tests.gpu.parallel_ranks import CapturedStep, all_collectives
from tests.gpu.tiny import GPU
from tests.tolerances import assert_forward_close, relative_error

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
WORDS = ("model.num_layers=2", "model.mtp_depth=1", "model.aux_loss_coef=0.1", "model.z_loss_coef=0.01")
GQA = (*WORDS, "model.attention=gqa", "model.head_dim=32", "model.num_kv_heads=2", "model.qk_norm=true")
CAPTURED = {
    "collectives": all_collectives,
    "eager step": CapturedStep(WORDS, compiled=False),
    "compiled step": CapturedStep(GQA, compiled=True),
}
STEP = Step((*GPU, *WORDS, "model.q_lora_rank=32"), Layout(tp=2), device="cuda")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Results of each case on two ranks."""
    cases = {**CAPTURED, "step": STEP}
    return Job(tmp_path_factory.mktemp("ranks"), cases, device="cuda").results(seconds=500)


@pytest.mark.parametrize("name", CAPTURED)
def test_replay_of_what_two_ranks_captured_is_bitwise_the_uncaptured_run(two, name):
    for outcome in two[name]:
        assert len(outcome.captured) > 5
        for captured, plain in zip(outcome.captured, outcome.plain, strict=True):
            assert torch.equal(captured, plain)


def test_losses_and_gradients_are_those_of_one_gpu(two, tmp_path):
    alone = dataclasses.replace(STEP, layout=Layout())(Ranks(), tmp_path)
    for number in (0, 1):
        for outcome in two["step"]:
            assert_forward_close(outcome.outputs[number].total, alone.outputs[number].total)
    for name, gradient in alone.gradients.items():
        found = whole_gradient(name, two["step"], STEP.layout, gradient)
        assert relative_error(found, gradient) < 1e-4, name  # fp32 products on a GPU, in other tiles
