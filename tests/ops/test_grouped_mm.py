"""grouped_mm on the CPU: values, gradients, dead rows, fakes, and what compilation sees."""

import itertools

import pytest
import torch

from graphmoe.ops.grouped_mm import _pad, grouped_mm
from tests.ops.grouped_mm_cases import CASES, assert_matches_the_loop, make_inputs
from tests.ops.seen_ops import SeenOps

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_match_a_loop_over_rows(case, dtype):
    assert_matches_the_loop(*make_inputs(*CASES[case], dtype))


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
