"""SwiGLU of routed rows: values and gradients against fp64, dead rows, fakes, and its kernels."""

import pytest
import torch
from torch.library import opcheck

from graphmoe.ops import swiglu as _registers_the_ops  # noqa: F401
from graphmoe.ops import swiglu_kernels as kernels
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import BACKENDS, INTERPRETING, device_of
from tests.ops.row_cases import NAN, fresh_memory_is_nan, values
from tests.tolerances import assert_forward_close, assert_gradient_close

ops = torch.ops.graphmoe
forward = kernels.forward if INTERPRETING else ops.swiglu
backward = kernels.backward if INTERPRETING else ops.swiglu_backward
DTYPES = (torch.float32, torch.bfloat16)


def swiglu_in_fp64(h_RH, weight_R):
    gate_RF, up_RF = h_RH.chunk(2, dim=-1)
    a_RF = gate_RF / (1 + torch.exp(-gate_RF)) * up_RF
    return a_RF if weight_R is None else a_RF * weight_R.reshape(-1, 1)


SIZES = [(21, 30, 1), (21, 30, 13), (21, 30, 64), (21, 30, 600), (0, 9, 20), (150, 150, 20), (1, 140, 20)]
CASES = [
    (*size, DTYPES[of_dtype], (number + of_dtype) % 2 == 0)
    for number, size in enumerate([*SIZES, (0, 0, 20)])
    for of_dtype in range(2)
]
"""Live rows, rows and width, all in both dtypes, with weights in one of them."""


@pytest.mark.parametrize(("live", "rows", "width", "dtype", "weighted"), CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients_match_fp64_and_dead_rows_stay(backend, live, rows, width, dtype, weighted):
    """The dead rows of the results must be NaN: as NaN stays NaN, or, where they are numbers, untouched."""
    for dead in (NAN,) if backend == "plain" else (NAN, 1.0):
        assert_matches_fp64(backend, live, rows, width, dtype, weighted, dead)


def assert_matches_fp64(backend, live, rows, width, dtype, weighted, dead):
    device = device_of(backend)
    h_RH = 3 * values(rows, 2 * width, dtype=dtype, device=device)  # beyond the near-linear part of silu
    da_RF = values(rows, width, dtype=dtype, device=device, seed=1)
    weight_R = values(rows, device=device, seed=2) if weighted else None
    given = [t for t in (h_RH, weight_R) if t is not None]
    for tensor in (*given, da_RF):
        tensor[live:] = dead
    ends_E = torch.tensor([0, live // 3, live // 3, live], dtype=torch.int32, device=device)
    with fresh_memory_is_nan():
        a_RF = forward(h_RH, weight_R, ends_E)
        dh_RH, dweight_R = backward(da_RF, h_RH, weight_R, ends_E)
    assert a_RF.dtype == dh_RH.dtype == dtype and dweight_R.dtype == torch.float32
    assert a_RF.is_contiguous() and dh_RH.is_contiguous()
    assert a_RF.shape == (rows, width) and dh_RH.shape == h_RH.shape
    assert dweight_R.shape == ((rows,) if weighted else (0,))
    assert all(bool(tensor[live:].isnan().all()) for tensor in (a_RF, dh_RH, dweight_R))
    if live:
        assert_live_rows_match_fp64(live, given, da_RF, a_RF, dh_RH, dweight_R)


def assert_live_rows_match_fp64(live, given, da_RF, a_RF, *gradients):
    exact = [t.detach()[:live].double().requires_grad_() for t in given]
    expected = swiglu_in_fp64(*exact, *[None] * (2 - len(exact)))
    assert_forward_close(a_RF[:live], expected)
    wanted = torch.autograd.grad(expected, exact, da_RF[:live].double())
    for actual, each in zip(gradients, wanted, strict=False):
        assert_gradient_close(actual[:live], each)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_gates_keep_values_and_gradients_finite(backend):
    h = torch.tensor([[-200.0, 200.0, 1.0, 2.0]], device=device_of(backend))
    ends = torch.tensor([1], dtype=torch.int32, device=h.device)
    assert forward(h, None, ends).tolist() == [[0.0, 400.0]]
    dh, _ = backward(torch.ones(1, 2, device=h.device), h, None, ends)
    assert dh.tolist() == [[0.0, 2.0, 0.0, 200.0]]


@pytest.mark.parametrize("shape", [(10,), (10, 1)], ids=["R", "R1"])
def test_autograd_gives_the_gradients_in_the_shapes_of_the_inputs(shape):
    given, da = [values(10, 12), values(*shape, seed=1)], values(10, 6, seed=2)
    for tensor in (*given, da):
        tensor[7:] = NAN
    leaves, ends_E = [t.requires_grad_() for t in given], torch.tensor([2, 2, 7], dtype=torch.int32)
    a = ops.swiglu(*leaves, ends_E)
    gradients = torch.autograd.grad(a, leaves, da)
    assert gradients[1].shape == shape
    assert_live_rows_match_fp64(7, given, da, a, *gradients)


@pytest.mark.parametrize(("dtype", "weighted"), [(torch.bfloat16, True), (torch.float64, False)], ids=str)
def test_torch_accepts_the_ops(dtype, weighted):
    h, weight, da = values(7, 14, dtype=dtype), values(7, 1) if weighted else None, values(7, 7, dtype=dtype)
    ends_E = torch.tensor([2, 2, 7], dtype=torch.int32)
    opcheck(ops.swiglu_backward.default, (da, h, weight, ends_E))
    opcheck(ops.swiglu.default, (h.requires_grad_(), weight, ends_E))


def ahead_of_time_cases():
    """bf16 rows whose width is a multiple of 16."""
    with torch.device("meta"):
        h, da = torch.empty(1000, 2816).bfloat16(), torch.empty(1000, 1408).bfloat16()
        weight, ends = torch.empty(1000), torch.empty(64, dtype=torch.int32)
    forward = launches_of("", lambda: kernels.forward(h, weight, ends))
    return forward + launches_of("", lambda: kernels.backward(da, h, weight, ends))
