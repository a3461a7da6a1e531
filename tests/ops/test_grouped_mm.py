"""grouped_mm on the CPU: values, gradients, dead rows, fakes, and what compilation sees."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphmoe.ops.grouped_mm import _pad, grouped_mm
from tests.ops.grouped_mm_cases import CASES, assert_matches_the_loop, make_inputs
from tests.ops.seen_ops import SeenOps
from tests.tolerances import assert_forward_close, assert_gradient_close

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_match_a_loop_over_rows(case, dtype):
    assert_matches_the_loop(*make_inputs(*CASES[case], dtype))


def test_the_weight_gradient_of_an_empty_expert_is_exactly_zero():
    x, w, ends, dy = make_inputs([3, 0, 2], 2, 5, 4, torch.float32)
    (dw,) = torch.autograd.grad(grouped_mm(x, w, ends), w, dy)
    assert torch.equal(dw[1], torch.zeros_like(dw[1]))
    assert bool(dw[0].any()) and bool(dw[2].any())


def test_views_and_expanded_gradients_are_accepted():
    x, w, ends, _ = make_inputs([3, 0, 2], 0, 5, 4, torch.float64)
    x_view = x.detach().t().contiguous().t().requires_grad_()
    w_view = w.detach().mT.contiguous().mT.requires_grad_()
    dy = torch.ones(1, 1, dtype=torch.float64).expand(5, 5)
    gradients = torch.autograd.grad(grouped_mm(x_view, w_view, ends), (x_view, w_view), dy)
    expected = torch.autograd.grad(grouped_mm(x, w, ends), (x, w), dy.contiguous())
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_gradient_close(actual, wanted)


@pytest.mark.parametrize(("x_wants", "w_wants"), list(itertools.product((True, False), repeat=2)))
def test_only_the_gradients_that_are_wanted_are_computed(x_wants, w_wants):
    x, w, ends, dy = make_inputs([3, 0, 2], 1, 5, 4, torch.float32)
    x.requires_grad_(x_wants), w.requires_grad_(w_wants)
    with SeenOps() as seen:
        y = grouped_mm(x, w, ends)
        assert y.requires_grad == (x_wants or w_wants)
        if y.requires_grad:
            y.backward(dy)
    wanted = ["graphmoe::grouped_mm_dgrad"] * x_wants + ["graphmoe::grouped_mm_wgrad"] * w_wants
    assert seen.names == ["graphmoe::grouped_mm", *wanted]
    assert ((x.grad is not None), (w.grad is not None)) == (x_wants, w_wants)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_meta_tensors_get_shapes_dtypes_and_gradients(dtype):
    x, w, ends, _ = make_inputs([3, 0, 2], 1, 7, 13, dtype)
    x, w, ends = (t.detach().to("meta") for t in (x, w, ends))
    y = grouped_mm(x.requires_grad_(), w.requires_grad_(), ends)
    assert (y.shape, y.dtype, y.is_meta) == ((6, 7), dtype, True)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert (dx.shape, dw.shape, dx.dtype, dw.dtype) == (x.shape, w.shape, dtype, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_tensors_have_the_shape_and_strides_of_real_ones(dtype):
    x, w, ends, dy = make_inputs([3, 0, 2], 0, 7, 13, dtype)

    def results(x, w, ends, dy):
        y = grouped_mm(x, w, ends)
        return y, *torch.autograd.grad(y, (x, w), dy)

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, w, ends, dy)]
        fake_results = results(*fakes)
    for fake, real in zip(fake_results, results(x, w, ends, dy), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_accepts_the_three_ops(dtype):
    x, w, ends, dy = make_inputs([3, 0, 2], 0, 7, 13, dtype)
    ops, plain = torch.ops.graphmoe, (x.detach(), w.detach())
    torch.library.opcheck(ops.grouped_mm.default, (x, w, ends))
    torch.library.opcheck(ops.grouped_mm_dgrad.default, (dy, plain[1], ends))
    torch.library.opcheck(ops.grouped_mm_wgrad.default, (dy, plain[0], ends))


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("width", [16, 13])
def test_what_the_gpu_kernel_gets_is_aligned_to_16_bytes_and_keeps_its_values(width, offset):
    x = torch.randn(5 * width + offset).bfloat16()[offset:].view(5, width)
    padded = _pad(x)
    assert padded.data_ptr() % 16 == 0 and padded.stride(0) * 2 % 16 == 0
    assert torch.equal(padded[:, :width], x) and not bool(padded[:, width:].any())
    assert (padded.data_ptr() == x.data_ptr()) == (width == 16 and offset != 1)


@pytest.mark.slow
def test_a_compiled_graph_without_breaks_gives_the_eager_values_and_gradients():
    def gated(x, w, ends):
        gate, up = grouped_mm(x * 2, w, ends).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    x, w, ends, dy = make_inputs([3, 0, 2, 6], 0, 10, 13, torch.float32)
    dy = dy[:, :5].contiguous()
    eager, compiled = gated(x, w, ends), torch.compile(gated, fullgraph=True)(x, w, ends)
    assert_forward_close(compiled, eager)
    for actual, wanted in zip(
        torch.autograd.grad(compiled, (x, w), dy), torch.autograd.grad(eager, (x, w), dy), strict=True
    ):
        assert_gradient_close(actual, wanted)
