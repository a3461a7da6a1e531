"""Kernels that give log-sum-exps, and two GPUs that share sequences."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from graphmoe.ops.ring_attention import _join, attend_to_block, choose_kernel, gradients_of_block
from graphmoe.plan.layout import Layout
from graphmoe.runtime.ranks import Ranks
from tests.distributed.parallel_steps import Step, whole_gradient
from tests.distributed.ranks import Job
from tests.distributed.shared_sequences import SCALE, Ring
from tests.gpu.parallel_ranks import CapturedStep
from tests.gpu.tiny import GPU
from tests.tolerances import assert_forward_close, assert_gradient_close, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

ALONE = Layout(cp=2, ring=True)  # which the reference reads nothing of
BLOCKS = {
    "cudnn": Ring(ALONE, (4, 4), (64, 64), torch.bfloat16, 256),
    "cudnn, grouped": Ring(ALONE, (8, 2), (128, 128), torch.bfloat16, 256),
    "cudnn, unequal": Ring(ALONE, (4, 4), (192, 128), torch.bfloat16, 256),
    "flash": Ring(ALONE, (4, 4), (64, 64), torch.bfloat16, 256),
    "flash, grouped": Ring(ALONE, (8, 2), (128, 128), torch.bfloat16, 256),
    "flash, unequal": Ring(ALONE, (4, 4), (192, 128), torch.bfloat16, 256),
    "flash, odd": Ring(ALONE, (4, 2), (36, 20), torch.bfloat16, 72),
    "efficient": Ring(ALONE, (4, 4), (64, 64), torch.float32, 256),
    "efficient, grouped": Ring(ALONE, (4, 2), (48, 32), torch.float32, 72),
}


def by_blocks(case: Ring) -> list[Tensor]:
    """Attention of the first half to itself, of the second half to both, joined; then the gradients."""
    q, k, v, d_out = (x.cuda() for x in case.whole())
    half = case.seq_len // 2
    first, second = slice(0, half), slice(half, case.seq_len)
    steps = [(first, first, True), (second, second, True), (second, first, False)]
    out = torch.zeros(*q.shape[:3], v.shape[-1], device="cuda")
    lse = torch.zeros(q.shape[0], q.shape[2], case.seq_len, device="cuda")
    for rows, columns, causal in steps:
        results = attend_to_block(q[:, rows], k[:, columns], v[:, columns], SCALE, causal)
        if causal:
            out[:, rows], lse[:, :, rows] = results
        else:
            _join(out[:, rows], lse[:, :, rows], *results)
    out, gradients = out.to(q.dtype), [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for rows, columns, causal in steps:
        added = gradients_of_block(
            *(d_out[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows]),
            *(SCALE, causal),
        )
        for gradient, where, part in zip(gradients, (rows, columns, columns), added, strict=True):
            gradient[:, where] += part
    return [out, *(gradient.to(q.dtype) for gradient in gradients)]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_that_a_kernel_attends_to_join_to_attention_to_all(name):
    case, kernel = BLOCKS[name], name.split(",")[0]
    torch.use_deterministic_algorithms(kernel == "flash")
    try:
        q, k, v, _ = (x.cuda() for x in case.whole())
        found = choose_kernel(q, k, v, causal=True)
        if kernel == "cudnn" and found != "cudnn":
            pytest.skip("cuDNN does not take these heads here")
        assert found == kernel
        out, *gradients = by_blocks(case)
    finally:
        torch.use_deterministic_algorithms(False)
    of_out, *of_gradients = case.expected()
    if case.dtype == torch.float32:
        for result, expected in zip((out, *gradients), (of_out, *of_gradients), strict=True):
            assert relative_error(result.cpu(), expected) < 1e-3  # products of tensor cores, if allowed
    else:
        assert_forward_close(out.cpu(), of_out)
        for gradient, expected in zip(gradients, of_gradients, strict=True):
            assert_gradient_close(gradient.cpu(), expected)


WORDS = ("model.num_layers=2", "model.mtp_depth=1", "model.aux_loss_coef=0.1", "model.z_loss_coef=0.01")
GQA = (*WORDS, "model.attention=gqa", "model.head_dim=32", "model.num_kv_heads=2", "model.qk_norm=true")
HEADS, RING = Layout(cp=2), Layout(cp=2, ring=True)
CAPTURED = {
    "alltoall, eager": CapturedStep(WORDS, compiled=False, layout=HEADS),
    "alltoall, compiled": CapturedStep(GQA, compiled=True, layout=HEADS),
    "ring, eager": CapturedStep(GQA, compiled=False, layout=RING),
    "ring, compiled": CapturedStep(WORDS, compiled=True, layout=RING),
}
RINGS = {
    "bf16": Ring(RING, (8, 2), (64, 64), torch.bfloat16, 512, device="cuda"),
    "bf16, unequal heads": Ring(RING, (4, 4), (192, 128), torch.bfloat16, 512, device="cuda"),
}
STEPS = {
    "step, alltoall, mla": Step((*GPU, *WORDS, "model.q_lora_rank=32"), HEADS, device="cuda"),
    "step, alltoall, gqa": Step((*GPU, *GQA), HEADS, device="cuda"),
    "step, ring, mla": Step((*GPU, *WORDS, "model.q_lora_rank=32"), RING, device="cuda"),
    "step, ring, gqa": Step((*GPU, *GQA), RING, device="cuda"),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Results of each case on two ranks."""
    cases = {**RINGS, **STEPS, **CAPTURED}
    return Job(tmp_path_factory.mktemp("ranks"), cases, device="cuda").results(seconds=500)


@two_gpus
@pytest.mark.parametrize("name", RINGS)
def test_ring_attention_and_its_gradients_are_those_of_the_definition(two, name):
    out, *gradients = RINGS[name].joined(two[name])
    of_out, *of_gradients = RINGS[name].expected()
    assert_forward_close(out, of_out)
    for gradient, expected in zip(gradients, of_gradients, strict=True):
        assert_gradient_close(gradient, expected)


@two_gpus
@pytest.mark.parametrize("name", CAPTURED)
def test_replay_of_what_two_ranks_captured_is_that_of_the_uncaptured_run(two, name):
    """Compare to bf16 rounding: runs differ where a kernel adds with atomics, as cuDNN's backward does."""
    for outcome in two[name]:
        assert len(outcome.captured) > 5
        for captured, plain in zip(outcome.captured, outcome.plain, strict=True):
            assert relative_error(captured, plain) < 2e-2


@two_gpus
@pytest.mark.parametrize("name", STEPS)
def test_losses_and_gradients_are_those_of_one_gpu(two, name, tmp_path):
    step = STEPS[name]
    alone = dataclasses.replace(step, layout=Layout())(Ranks(), tmp_path)
    for number in (0, 1):
        for outcome in two[name]:
            assert_forward_close(outcome.outputs[number].total, alone.outputs[number].total)
    for parameter, gradient in alone.gradients.items():
        found = whole_gradient(parameter, two[name], step.layout, gradient)
        assert relative_error(found, gradient) < 1e-4, parameter  # fp32 products on a GPU, in other tiles
