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
expert_sums = kernels.expert_sums if INTERPRETING else ops.expert_sums
DTYPES = (torch.float32, torch.bfloat16)


def swiglu_in_fp64(h_RH, weight_R, bias_RH=0.0, limit=0.0):
    gate_RF, up_RF = (h_RH + bias_RH).chunk(2, dim=-1)
    steep = 1.702 if limit else 1.0
    if limit:
        gate_RF, up_RF = gate_RF.clamp(max=limit), up_RF.clamp(-limit, limit) + 1
    a_RF = gate_RF / (1 + torch.exp(-steep * gate_RF)) * up_RF
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


@pytest.mark.parametrize(("limit", "biased"), [(2.5, True), (2.5, False), (0.0, True)], ids=str)
@pytest.mark.parametrize(
    ("width", "dtype"), [(80, torch.float32), (13, torch.bfloat16), (600, torch.float32)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_clamps_and_biases_match_fp64_with_nan_in_dead_rows(backend, width, dtype, limit, biased):
    """About a third of gates and half of ups are beyond the limit; the third expert has no rows."""
    ends, counts, live = [0, 9, 9, 23, 24], [0, 9, 0, 14, 1], 24
    given = [
        3 * values(31, 2 * width, dtype=dtype),
        values(31, seed=2),
        values(31, width, dtype=dtype, seed=1),
    ]
    h_RH, weight_R, da_RF = (t.to(device_of(backend)) for t in given)
    for tensor in (h_RH, weight_R, da_RF):
        tensor[live:] = NAN
    bias_EH = values(5, 2 * width, dtype=dtype, seed=3).to(h_RH.device) if biased else None
    ends_E = torch.tensor(ends, dtype=torch.int32, device=h_RH.device)
    exact = [t[:live].double().requires_grad_() for t in (h_RH, weight_R)]
    exact += [bias_EH.double().requires_grad_()] if biased else []
    bias_RH = exact[2].repeat_interleave(torch.tensor(counts, device=h_RH.device), 0) if biased else 0.0
    expected = swiglu_in_fp64(*exact[:2], bias_RH, limit)
    wanted = torch.autograd.grad(expected, exact, da_RF[:live].double())
    with fresh_memory_is_nan():
        assert_forward_close(forward(h_RH, weight_R, ends_E, bias_EH, limit)[:live], expected)
        dh_RH, dweight_R = backward(da_RF, h_RH, weight_R, ends_E, bias_EH, limit)
        sums_EH = expert_sums(dh_RH, ends_E)
    assert_gradient_close(dh_RH[:live], wanted[0])
    assert_gradient_close(dweight_R[:live], wanted[1])
    assert sums_EH.dtype == torch.float32 and not sums_EH[[0, 2]].any()
    if biased:
        assert_gradient_close(sums_EH.to(dtype), wanted[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bound_passes_its_gradient_and_nan_and_values_beyond_do_not_get_lost(backend):
    h = torch.tensor([[7.0, 8.0, NAN, 1.0, 1.0, 1.0] + [7.0, -7.0, 1.0, NAN, 7.5, -7.5]])
    h, ends = h.to(device_of(backend)), torch.tensor([1], dtype=torch.int32, device=device_of(backend))
    a = forward(h, None, ends, None, 7.0)
    assert a.isnan().tolist() == [[False, False, True, True, False, False]]
    dh, _ = backward(torch.ones_like(a), h, None, ends, None, 7.0)
    is_zero = [[False, True, False, False, False, False] + [False, False, False, False, True, True]]
    assert (dh == 0).tolist() == is_zero and dh[0, [2, 3, 8]].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_experts_read_each_live_row_once(backend):
    x = values(300, 130, dtype=torch.bfloat16, device=device_of(backend))
    x[290:] = NAN
    counts = torch.tensor([0, 200, 0, 1, 64, 25], device=x.device)
    with fresh_memory_is_nan():
        found, again = (expert_sums(x, counts.cumsum(0).int()) for _ in range(2))
    each = x[:290].double().split(counts.tolist())
    torch.testing.assert_close(found.double(), torch.stack([e.sum(0) for e in each]), atol=1e-4, rtol=1e-5)
    assert torch.equal(found, again) and not expert_sums(x[:0], torch.zeros_like(counts).int()).any()


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


def test_autograd_sums_the_gradient_of_the_biases():
    h, bias, da = values(10, 12), values(3, 12, seed=3), values(10, 6, seed=1)
    h[7:] = da[7:] = NAN
    ends_E, leaves = torch.tensor([2, 2, 7], dtype=torch.int32), [h.requires_grad_(), bias.requires_grad_()]
    dh, dbias = torch.autograd.grad(ops.swiglu(h, None, ends_E, bias, 1.0), leaves, da)
    torch.testing.assert_close(dbias, torch.stack([dh[:2].sum(0), dh[2:2].sum(0), dh[2:7].sum(0)]))
    assert dbias.any() and not dbias[1].any()


@pytest.mark.parametrize(("dtype", "weighted"), [(torch.bfloat16, True), (torch.float64, False)], ids=str)
def test_torch_accepts_the_ops(dtype, weighted):
    h, weight, da = values(7, 14, dtype=dtype), values(7, 1) if weighted else None, values(7, 7, dtype=dtype)
    ends_E = torch.tensor([2, 2, 7], dtype=torch.int32)
    opcheck(ops.swiglu_backward.default, (da, h, weight, ends_E))
    opcheck(ops.swiglu.default, (h.requires_grad_(), weight, ends_E))
    bias = values(3, 14, dtype=dtype).requires_grad_()
    opcheck(ops.swiglu.default, (h.detach().requires_grad_(), weight, ends_E, bias, 1.5))
    opcheck(ops.expert_sums.default, (da, ends_E))


def ahead_of_time_cases():
    """bf16 rows whose width is a multiple of 16: without biases, and with biases and clamps as in gpt-oss."""
    with torch.device("meta"):
        h, da = torch.empty(1000, 2816).bfloat16(), torch.empty(1000, 1408).bfloat16()
        weight, ends = torch.empty(1000), torch.empty(64, dtype=torch.int32)
    forward = launches_of("", lambda: kernels.forward(h, weight, ends))
    cases = forward + launches_of("", lambda: kernels.backward(da, h, weight, ends))
    with torch.device("meta"):
        h, da, bias = (torch.empty(size).bfloat16() for size in ((1000, 5760), (1000, 2880), (32, 5760)))
        ends = torch.empty(32, dtype=torch.int32)
    cases += launches_of("biased", lambda: kernels.forward(h, weight, ends, bias, 7.0))
    cases += launches_of("biased", lambda: kernels.backward(da, h, weight, ends, bias, 7.0))
    return cases + launches_of("", lambda: kernels.expert_sums(h, ends))
