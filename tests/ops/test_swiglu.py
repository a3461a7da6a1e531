"""SwiGLU of routed rows: values and gradients against fp64, dead rows, fakes, and its kernels."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from graphmoe.ops import swiglu as _registers_the_ops  # noqa: F401
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import BACKENDS, device_of
from tests.ops.row_cases import NAN, fresh_memory_is_nan, values
from tests.tolerances import assert_forward_close, assert_gradient_close

ops = torch.ops.graphmoe
DTYPES = (torch.float32, torch.bfloat16)
ENDS_E = torch.tensor([2, 2, 7], dtype=torch.int32)
LIVE, ROWS = 7, 10


def swiglu(backend):
    if backend != "interpreted":
        return ops.swiglu, ops.swiglu_backward
    from graphmoe.ops import swiglu_kernels

    return swiglu_kernels.forward, swiglu_kernels.backward


def with_dead_rows(x):
    return torch.cat([x, x.new_full((ROWS - LIVE, *x.shape[1:]), NAN)])


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
    (forward, backward), device = swiglu(backend), device_of(backend)
    h_RH = 3 * values(rows, 2 * width, dtype=dtype, device=device)  # beyond the near-linear part of silu
    da_RF = values(rows, width, dtype=dtype, device=device, seed=1)
    weight_R = values(rows, device=device, seed=2) if weighted else None
    for tensor in (h_RH, da_RF, weight_R):
        if tensor is not None:
            tensor[live:] = dead
    ends_E = torch.tensor([0, live // 3, live // 3, live], dtype=torch.int32, device=device)
    with fresh_memory_is_nan():
        a_RF = forward(h_RH, weight_R, ends_E)
        dh_RH, dweight_R = backward(da_RF, h_RH, weight_R, ends_E)
    assert a_RF.dtype == dh_RH.dtype == dtype and dweight_R.dtype == torch.float32
    assert a_RF.is_contiguous() and dh_RH.is_contiguous()
    assert a_RF.shape == (rows, width) and dh_RH.shape == h_RH.shape
    assert dweight_R.shape == ((rows,) if weighted else (0,))
    for tensor in (a_RF, dh_RH, dweight_R):
        assert bool(tensor[live:].isnan().all())
    if live == 0:
        return
    exact = [t[:live].double().requires_grad_() for t in (h_RH, weight_R) if t is not None]
    expected = swiglu_in_fp64(exact[0], exact[1] if weighted else None)
    assert_forward_close(a_RF[:live], expected)
    gradients = torch.autograd.grad(expected, exact, da_RF[:live].double())
    for actual, wanted in zip((dh_RH, dweight_R), gradients, strict=False):
        assert_gradient_close(actual[:live], wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_gates_keep_values_and_gradients_finite(backend):
    forward, backward = swiglu(backend)
    h = torch.tensor([[-200.0, 200.0, 1.0, 2.0]], device=device_of(backend))
    ends = torch.tensor([1], dtype=torch.int32, device=h.device)
    assert forward(h, None, ends).tolist() == [[0.0, 400.0]]
    dh, _ = backward(torch.ones(1, 2, device=h.device), h, None, ends)
    assert dh.tolist() == [[0.0, 2.0, 0.0, 200.0]]


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)], ids=["R", "R1"])
def test_autograd_gives_the_gradients_in_the_shapes_of_the_inputs(shape):
    h = with_dead_rows(values(LIVE, 12)).requires_grad_()
    weight = with_dead_rows(values(LIVE, seed=1)).view(shape).requires_grad_()
    da = with_dead_rows(values(LIVE, 6, seed=2))
    dh, dweight = torch.autograd.grad(ops.swiglu(h, weight, ENDS_E), (h, weight), da)
    assert dweight.shape == weight.shape
    exact = [t.detach()[:LIVE].double().requires_grad_() for t in (h, weight)]
    expected = torch.autograd.grad(swiglu_in_fp64(*exact), exact, da[:LIVE].double())
    for actual, wanted in zip((dh, dweight), expected, strict=True):
        assert_gradient_close(actual[:LIVE], wanted)


@pytest.mark.parametrize(("dtype", "weighted"), [(torch.bfloat16, True), (torch.float64, False)], ids=str)
def test_torch_accepts_the_ops_and_fakes_are_like_real_tensors(dtype, weighted):
    def results(h, weight, ends, da):
        return ops.swiglu(h, weight, ends), *ops.swiglu_backward(da, h, weight, ends)

    h, weight, da = values(LIVE, 14, dtype=dtype), values(LIVE, 1) if weighted else None, values(LIVE, 7)
    inputs = (h, weight, ENDS_E, da.to(dtype))
    with FakeTensorMode() as mode:
        fakes = results(*[None if t is None else mode.from_tensor(t) for t in inputs])
    for fake, real in zip(fakes, results(*inputs), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    opcheck(ops.swiglu_backward.default, (inputs[3], *inputs[:3]))
    opcheck(ops.swiglu.default, (h.requires_grad_(), weight, ENDS_E))


def ahead_of_time_cases():
    """bf16 rows whose width is a multiple of 16."""
    from graphmoe.ops import swiglu_kernels as kernels

    with torch.device("meta"):
        h, da = torch.empty(1000, 2816).bfloat16(), torch.empty(1000, 1408).bfloat16()
        weight, ends = torch.empty(1000), torch.empty(64, dtype=torch.int32)
    forward = launches_of("", lambda: kernels.forward(h, weight, ends))
    return forward + launches_of("", lambda: kernels.backward(da, h, weight, ends))
