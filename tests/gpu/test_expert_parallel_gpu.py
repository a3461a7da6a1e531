"""Two GPUs share the experts through NCCL: losses and gradients of one GPU that holds all of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphmoe.plan.layout import Layout
from tests.distributed.expert_steps import ROUTINGS, CompiledStep, Step
from tests.distributed.ranks import Job
from tests.tolerances import relative_error

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CASES = {
    f"{kind.__name__} {name} {routing}": kind(
        layout, ROUTINGS[routing], ("model.num_layers=2",), torch.bfloat16, device="cuda"
    )
    for kind in (Step, CompiledStep)
    for name, layout in {"ep": Layout(dp=2, ep=2), "etp": Layout(dp=2, etp=2)}.items()
    for routing in ("natural", "all on two experts of one rank")
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("ranks"), CASES, device="cuda").results(seconds=400)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_near_to_fp32_as_those_of_one_gpu(results, name):
    step = CASES[name]
    near, exact = step.alone(), dataclasses.replace(step, dtype=torch.float32).alone()
    outcomes = [found[0] if type(step) is Step else found.outcomes[0] for found in results[name]]
    for own, wanted in zip(outcomes, exact, strict=True):
        assert relative_error(own.total, wanted.total) < 1e-2
    for parameter in near[0].gradients:
        whole, rounded = (
            torch.stack([each.gradients[parameter].float() for each in of]).sum(0) for of in (exact, near)
        )
        for rank in range(2):
            part = step.expected(parameter, whole, rank)
            limit = 2 * relative_error(step.expected(parameter, rounded, rank), part) + 1e-3
            error = relative_error(
                step.summed(outcomes, parameter, rank).float(), part, terms=float(whole.norm())
            )
            assert error < limit, (parameter, error, limit)
