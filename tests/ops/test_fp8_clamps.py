"""The grouped MLP in 8 bits with biases and clamps: against fp64, and its kernels against its plain form."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from graphmoe.ops import formats
from graphmoe.ops.fp8_mlp.reference import Activation
from graphmoe.ops.swiglu_kernels import expert_sums
from tests.ops.interpreted import BACKENDS, KERNELS
from tests.ops.row_cases import NAN
from tests.ops.test_fp8_mlp import (
    EMPTY,
    WITH_EXPERTS,
    case_of,
    decibels,
    every,
    layer,
    results_of,
    small_layer,
)


def biases(shape: Sequence[int], like: Tensor, extra: int = 0) -> Tensor:
    """Of experts, of which the ``extra`` last are as the first."""
    b_EH = torch.randn(shape[2], 2 * shape[4], generator=torch.Generator().manual_seed(2))
    return torch.cat([b_EH, b_EH[:extra]]).to(like.device, like.dtype)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("recipe", WITH_EXPERTS)
def test_kernels_clamp_and_add_biases_as_the_plain_form_does(backend, recipe):
    shape, by = (48, 2, 5, 96, 160) if recipe == "mxfp8" else (48, 2, 5, 48, 80), formats.KERNELS[recipe]
    case, plain = case_of(recipe, backend, shape), by.experts(False)
    b_gate_up = biases(shape, case.rows[0][0].float(), EMPTY)
    case = case._replace(act=Activation(b_gate_up, 1.5))
    found = every(by.experts(True), case, of=(wanted := every(plain, case)))
    for ones, others in zip((found[0], found[2]), (wanted[0], wanted[2]), strict=True):
        for one, other in zip(ones, others, strict=True):
            assert decibels(one, other) > 35
    sums_EH, dh = expert_sums(wanted.dgrad[2], case.plan.ends_E, wanted.dgrad[3]), wanted.dgrad[2:4]
    exact_EH = torch.ops.graphmoe.expert_sums(by.values(tuple(dh)).double(), case.plan.ends_E)
    assert decibels(sums_EH, exact_EH) > 100 and not sums_EH[1].any() and not sums_EH[-EMPTY:].any()


@pytest.mark.parametrize(
    ("recipe", "dtype"), [("rowwise", torch.bfloat16), ("mxfp8", torch.float32)], ids=str
)
def test_biases_and_gradients_match_fp64_within_8_bits(recipe, dtype):
    shape = (48, 2, 5, 128, 96)
    tensors, plan, dy = layer(shape, dtype)
    x = torch.nn.functional.rms_norm(tensors[0], (128,))  # of one size, or many large h are near the limit
    tensors = (x, *tensors[1:], biases(shape, x))
    for limit, floors in ((0.0, (22, 19)), (2.0, (22, 14))):  # rounding moves some h over a limit
        exact, stored = (
            [each.clone().to(d).requires_grad_() for each in tensors] for d in (torch.float64, None)
        )
        clamps, wide = ({"b_gate_up": each[4], "limit": limit} for each in (stored, exact))
        expected, _ = torch.ops.graphmoe.grouped_mlp(*exact[:4], *plan, "torch", **wide)
        expected.backward(dy.double())
        y = torch.ops.graphmoe.fp8_mlp(*stored[:4], *plan, recipe, **clamps)
        y.backward(dy)
        assert decibels(y.detach(), expected.detach()) > floors[0]
        for found, given in zip(stored, exact, strict=True):
            assert found.grad.dtype == found.dtype and decibels(found.grad, given.grad) > floors[1]
        assert not stored[4].grad[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", WITH_EXPERTS)
def test_nan_in_a_bias_is_not_clamped_away(recipe, backend):
    plan, tensors = small_layer(recipe, backend)
    b_gate_up = torch.zeros_like(tensors[1][:, :, 0])
    b_gate_up[0, 5] = NAN
    y, dx, *_ = results_of(recipe, backend, plan, *tensors, b_gate_up=b_gate_up, limit=7.0)
    is_of_0 = ((plan.row_TK >= 0) & (plan.row_TK < plan.ends_E[0])).any(1)
    assert is_of_0.any() and y.isnan().any(1).equal(is_of_0) and dx.isnan().any(1).equal(is_of_0)
