"""grouped_mm: values, gradients, dead rows, fakes, and what compilation sees."""

from itertools import product

import pytest
import torch

from graphmoe.ops.grouped_mm import _pad, grouped_mm
from tests.ops.row_cases import NAN, values
from tests.ops.seen_ops import SeenOps
from tests.tolerances import assert_forward_close, assert_gradient_close

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
CASES = {  # name: (rows of each expert, dead rows, N, K)
    "odd sizes": ([3, 9, 11, 1, 5], 0, 7, 13),
    "aligned sizes": ([16, 8, 24], 0, 32, 16),
    "empty experts first, between and last": ([0, 4, 0, 0, 7, 0], 0, 5, 3),
    "all rows on one expert": ([0, 0, 17, 0], 0, 9, 8),
    "one expert": ([6], 0, 4, 10),
    "one row": ([0, 1], 0, 3, 3),
    "size one": ([2, 3], 0, 1, 1),
    "many experts, few rows": ([1, 0] * 40, 0, 6, 5),
    "dead rows": ([3, 0, 4, 2], 5, 7, 9),
    "dead rows only": ([0, 0, 0], 6, 4, 5),
    "no rows": ([0, 0], 0, 4, 5),
}


def make_inputs(counts, dead, N, K, dtype, device="cpu"):
    """Return x, w, ends and the gradient of y; rows beyond the last offset are NaN."""
    live, E = sum(counts), len(counts)
    sizes = ((live + dead, K), (E, N, K), (live + dead, N))
    x, w, dy = (values(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(sizes))
    x[live:], dy[live:] = NAN, NAN
    ends = torch.tensor(counts).cumsum(0).int().to(device)
    return x.requires_grad_(), w.requires_grad_(), ends, dy


def looped(x, w, ends):
    """The same product, one row after the other; live rows only."""
    owner = [e for e, n in enumerate(torch.diff(ends.cpu(), prepend=torch.zeros(1)).int()) for _ in range(n)]
    return torch.stack([w[e] @ x[r] for r, e in enumerate(owner)])


def assert_matches_the_loop(x, w, ends, dy):
    """Compare live outputs, live input gradients and the whole weight gradient with the loop."""
    live = int(ends[-1])
    y = grouped_mm(x, w, ends)
    assert y.shape == (len(x), w.shape[1]) and y.dtype == x.dtype and y.is_contiguous()
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    assert dx.dtype == dw.dtype == x.dtype
    if live == 0:
        assert torch.equal(dw, torch.zeros_like(dw))
        return
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = looped(*exact, ends)
    expected_dx, expected_dw = torch.autograd.grad(expected, exact, dy[:live].double())
    assert_forward_close(y[:live], expected)
    assert_gradient_close(dx[:live], expected_dx[:live])
    assert_gradient_close(dw, expected_dw)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_match_a_loop_over_rows(case, dtype):
    assert_matches_the_loop(*make_inputs(*CASES[case], dtype))


@pytest.mark.parametrize(("x_wants", "w_wants"), list(product((True, False), repeat=2)))
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
    assert (x.grad is not None, w.grad is not None) == (x_wants, w_wants)


def test_torch_accepts_the_three_ops():
    x, w, ends, dy = make_inputs([3, 0, 2], 0, 7, 13, torch.bfloat16)
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
