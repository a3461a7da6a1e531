"""Experts shared out to ranks: the losses and gradients of one process that holds all of them."""

from __future__ import annotations

import functools

import pytest
import torch

from graphmoe.plan.layout import Layout
from tests.distributed.expert_steps import (
    EXPERTS,
    ROUTINGS,
    CompiledStep,
    Outcome,
    RoundTrip,
    Step,
)
from tests.distributed.ranks import run_ranks
from tests.tolerances import TOLERANCES, assert_forward_close, assert_gradient_close, relative_error

LAYOUTS = {
    "ep=2": Layout(dp=2, ep=2),
    "etp=2": Layout(dp=2, etp=2),
    "ep=4": Layout(dp=4, ep=4),
    "ep=2 etp=2": Layout(dp=4, ep=2, etp=2),
    "ep=2 edp=2": Layout(dp=4, ep=2),
    "etp=2 edp=2": Layout(dp=4, etp=2),
}
BF16 = torch.bfloat16
STEPS = {
    f"{name}, {routing}": Step(LAYOUTS[name], ROUTINGS[routing]) for name in LAYOUTS for routing in ROUTINGS
}
STEPS["ep=4, no shared experts"] = Step(LAYOUTS["ep=4"], words=("model.shared_ffn_size=0",))
OTHERS = {
    "ep=2, swapped": Step(LAYOUTS["ep=2"], swapped=True),
    "ep=4, swapped": Step(LAYOUTS["ep=4"], swapped=True),
    "ep=2, bf16": Step(LAYOUTS["ep=2"], words=("model.num_layers=2",), dtype=BF16),
    "ep=2, compiled without fuse_experts": CompiledStep(
        LAYOUTS["ep=2"], words=("passes.disabled=[fuse_experts]",), traced=True
    ),
    "ep=2, compiled, computed again": CompiledStep(
        LAYOUTS["ep=2"],
        words=("recompute.segments=[moe_router,moe_preprocess,moe_dispatch,moe_experts,moe_combine]",),
        traced=True,
    ),
}
TRIPS = {f"trip {name}": RoundTrip(layout) for name, layout in LAYOUTS.items()}
TRIPS["trip bf16"] = RoundTrip(LAYOUTS["ep=2 etp=2"], BF16)
CASES = STEPS | OTHERS | TRIPS
pytestmark = pytest.mark.slow
COMPILED = [name for name in OTHERS if "compiled" in name]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each case, by rank."""
    found = {}
    for size in (2, 4):
        cases = {name: case for name, case in CASES.items() if case.layout.size("world") == size}
        found |= run_ranks(tmp_path_factory.mktemp(f"ranks_{size}"), cases, size)
    return found


@functools.cache
def alone(name: str) -> list[Outcome]:
    return CASES[name].alone()


def assert_as_alone(step: Step, outcomes: list[Outcome], expected: list[Outcome]) -> None:
    """Each rank's loss and loads are those of its micro-batch, each gradient is their sum."""
    for own, wanted in zip(outcomes, expected, strict=True):
        assert_forward_close(own.total, wanted.total)
        assert own.counts_LE.equal(wanted.counts_LE)
    for parameter in expected[0].gradients:
        whole = torch.stack([wanted.gradients[parameter] for wanted in expected]).sum(0)
        for rank in range(len(outcomes)):
            part, terms = step.expected(parameter, whole, rank), float(whole.norm())
            assert_gradient_close(step.summed(outcomes, parameter, rank), part, terms=terms)


@pytest.mark.parametrize("name", STEPS)
def test_losses_and_every_gradient_are_those_of_one_process(results, name):
    assert_as_alone(STEPS[name], [first for first, _ in results[name]], alone(name))


@pytest.mark.parametrize("name", STEPS)
def test_a_repeated_step_is_bitwise_the_same(results, name):
    for first, again in results[name]:
        assert first.total.equal(again.total)
        assert all(gradient.equal(again.gradients[key]) for key, gradient in first.gradients.items())


@pytest.mark.parametrize("name", ["ep=2, swapped", "ep=4, swapped"])
def test_ranks_in_another_order_than_their_experts_give_another_loss(results, name):
    for (swapped, _), expected in zip(results[name], alone(name), strict=True):
        error = relative_error(swapped.total, expected.total)
        assert error > 100 * TOLERANCES[torch.float32].forward


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_segments_give_the_losses_and_gradients_of_one_process(results, name):
    assert_as_alone(CASES[name], [found.outcomes[0] for found in results[name]], alone(name))


@pytest.mark.parametrize("name", COMPILED)
def test_other_loads_compile_nothing_again_and_what_knows_no_size_is_not_compiled(results, name):
    for found in results[name]:
        first, second = found.outcomes
        assert not first.counts_LE.equal(second.counts_LE)
        assert found.recompiled == 0
        assert sorted(found.units) == ["attn..mlp", "attn..moe_preprocess", "embed", "loss", "shared_experts"]


def test_recompute_sends_no_token_again(results):
    layers, steps = 2, 2
    found = results["ep=2, compiled, computed again"]
    assert [each.dispatched for each in found] == [layers * steps] * 2


def test_in_bf16_gradients_are_as_near_to_fp32_as_those_of_one_process(results):
    step = OTHERS["ep=2, bf16"]
    exact = Step(step.layout, words=step.words).alone()
    near = alone("ep=2, bf16")
    outcomes = [first for first, _ in results["ep=2, bf16"]]
    for parameter in near[0].gradients:
        whole, rounded = (
            torch.stack([each.gradients[parameter].float() for each in of]).sum(0) for of in (exact, near)
        )
        for rank in range(2):
            part = step.expected(parameter, whole, rank)
            error = relative_error(step.summed(outcomes, parameter, rank).float(), part)
            assert 0 < error < 1.5 * relative_error(step.expected(parameter, rounded, rank), part), parameter


@pytest.mark.parametrize("name", TRIPS)
def test_a_trip_around_identities_gives_each_token_times_its_weights(results, name):
    trip = TRIPS[name]
    for rank, found in enumerate(results[name]):
        h, weight, _, dy = trip.inputs(rank)
        total = weight.detach().sum(1, keepdim=True)
        h, dy = h.detach().float(), dy.float()
        wanted = {"out": total * h, "dh": total * dy, "dweight": (h * dy).sum(1, keepdim=True).expand(-1, 3)}
        for key, value in wanted.items():
            actual = found[key].float()
            if trip.dtype is BF16:  # a sum over ranks of rounded numbers
                assert relative_error(actual, value) < 1e-2, key
            else:
                assert_gradient_close(actual, value)


@pytest.mark.parametrize("name", TRIPS)
def test_a_token_goes_once_to_each_rank_that_holds_one_of_its_experts(results, name):
    trip = TRIPS[name]
    layout, local = trip.layout, EXPERTS // trip.layout.ep
    for rank, found in enumerate(results[name]):
        group = layout.group("ep_etp", rank)
        blocks = [set((chosen // local).tolist()) for chosen in trip.inputs(rank)[2]]
        expected = [sum(i // layout.etp in block for block in blocks) for i in range(len(group))]
        assert found["sent"].tolist() == expected
        assert found["arrived"].tolist() == [
            int(results[name][other]["sent"][layout.index("ep_etp", rank)]) for other in group
        ]
        assert len(found["numbers"]) == int(found["arrived"].sum())
        assert found["numbers"].max() < local and found["numbers"].min() >= -1
