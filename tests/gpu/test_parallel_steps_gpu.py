"""Two GPUs that share matrices, sequences or experts: captured graphs of NCCL, and the numbers of one GPU."""

import pytest
import torch

from graphmoe.plan.layout import Layout
from tests.distributed.ranks import Job
from tests.distributed.steps import Ring, Step, whole
from tests.distributed.test_parallel_steps import EXPERTS, ROUTINGS
from tests.gpu.parallel_ranks import CapturedStep, all_collectives
from tests.gpu.tiny import GPU
from tests.tolerances import assert_forward_close, assert_gradient_close, relative_error

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
WORDS = ("model.num_layers=2", "model.mtp_depth=1", "model.aux_loss_coef=0.1", "model.z_loss_coef=0.01")
GQA = (*WORDS, "model.attention=gqa", "model.head_dim=32", "model.num_kv_heads=2", "model.qk_norm=true")
MLA = (*WORDS, "model.q_lora_rank=32")
ONE = ("model.num_layers=1", "model.num_dense_layers=0", "model.mtp_depth=0")
TP, HEADS, RING = Layout(tp=2), Layout(cp=2), Layout(cp=2, ring=True)
BITWISE = {
    "collectives": all_collectives,
    "tp, eager": CapturedStep(WORDS, compiled=False, layout=TP),
    "tp, compiled": CapturedStep((*GQA, *ONE), compiled=True, layout=TP),
}
CAPTURED = {
    "alltoall, eager": CapturedStep(WORDS, compiled=False, layout=HEADS),
    "alltoall, compiled": CapturedStep((*GQA, *ONE), compiled=True, layout=HEADS),
    "ring, eager": CapturedStep(GQA, compiled=False, layout=RING),
    "ring, compiled": CapturedStep((*WORDS, *ONE), compiled=True, layout=RING),
}
RINGS = {
    "bf16": Ring(RING, (8, 2), (64, 64), torch.bfloat16, 512, device="cuda"),
    "bf16, unequal heads": Ring(RING, (4, 4), (192, 128), torch.bfloat16, 512, device="cuda"),
}
STEPS = {
    "step, tp": Step((*GPU, *MLA), TP, device="cuda"),
    "step, alltoall, mla": Step((*GPU, *MLA), HEADS, device="cuda"),
    "step, alltoall, gqa": Step((*GPU, *GQA), HEADS, device="cuda"),
    "step, ring, mla": Step((*GPU, *MLA), RING, device="cuda"),
    "step, ring, gqa": Step((*GPU, *GQA), RING, device="cuda"),
}
SHARED = {
    f"{name} {routing} {mode}": Step(
        (*EXPERTS, "model.num_layers=2"), layout, mode=mode, dtype=torch.bfloat16,
        bias=ROUTINGS[routing], device="cuda",
    )
    for mode in ("eager", "inductor")
    for name, layout in {"ep": Layout(dp=2, ep=2), "etp": Layout(dp=2, etp=2)}.items()
    for routing in ("natural", "all on two experts of one rank")
}  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Results of each case on two ranks."""
    cases = {**RINGS, **STEPS, **SHARED, **CAPTURED, **BITWISE}
    return Job(tmp_path_factory.mktemp("ranks"), cases, device="cuda").results(seconds=500)


@pytest.mark.parametrize("name", RINGS)
def test_ring_attention_and_its_gradients_are_those_of_the_definition(two, name):
    out, *gradients = RINGS[name].joined(two[name])
    of_out, *of_gradients = RINGS[name].expected()
    assert_forward_close(out, of_out)
    for gradient, expected in zip(gradients, of_gradients, strict=True):
        assert_gradient_close(gradient, expected)


@pytest.mark.parametrize("name", [*BITWISE, *CAPTURED])
def test_replay_of_what_two_ranks_captured_is_that_of_the_uncaptured_run(two, name):
    """Compare attention along cp to bf16 rounding: cuDNN's backward adds with atomics."""
    for outcome in two[name]:
        assert len(outcome.captured) > 5
        for captured, plain in zip(outcome.captured, outcome.plain, strict=True):
            assert torch.equal(captured, plain) if name in BITWISE else relative_error(captured, plain) < 2e-2


@pytest.mark.parametrize("name", STEPS)
def test_losses_and_gradients_are_those_of_one_gpu(two, name):
    step = STEPS[name]
    for number, output in step.expected.outputs.items():
        for outcome in two[name]:
            assert_forward_close(outcome.outputs[number].total, output.total)
    for parameter, gradient in step.expected.gradients.items():
        found = whole(parameter, two[name], step.layout, gradient)
        assert relative_error(found, gradient) < 1e-4, parameter  # fp32 products on a GPU, in other tiles


@pytest.mark.parametrize("name", SHARED)
def test_gradients_of_shared_experts_are_as_near_to_fp32_as_those_of_one_gpu(two, name):
    step = SHARED[name]
    near, exact = step.alone(torch.bfloat16), step.expected
    for outcome in two[name]:
        for number, output in outcome.outputs.items():
            assert relative_error(output.total, exact.outputs[number].total) < 1e-2
    for parameter, gradient in exact.gradients.items():
        limit = 2 * relative_error(near.gradients[parameter].float(), gradient) + 1e-3
        error = relative_error(whole(parameter, two[name], step.layout, gradient), gradient)
        assert error < limit, (parameter, error, limit)
