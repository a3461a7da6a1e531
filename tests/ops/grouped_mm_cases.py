"""Inputs and the check of grouped_mm, on a CPU or a GPU."""

import torch

from graphmoe.ops.grouped_mm import grouped_mm
from tests.tolerances import assert_forward_close, assert_gradient_close

NAN = float("nan")
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


def make_inputs(counts, dead, N, K, dtype, device="cpu", seed=0):
    """Return x, w, ends and the gradient of y; rows beyond the last offset are NaN."""
    generator = torch.Generator().manual_seed(seed)
    live, E = sum(counts), len(counts)
    sizes = ((live + dead, K), (E, N, K), (live + dead, N))
    x, w, dy = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    x[live:], dy[live:] = NAN, NAN
    ends = torch.tensor(counts).cumsum(0).int().to(device)
    return x.requires_grad_(), w.requires_grad_(), ends, dy


def looped(x, w, ends):
    """The same product in fp64, one row after the other; live rows only."""
    owner = [e for e, n in enumerate(torch.diff(ends.cpu(), prepend=torch.zeros(1)).int()) for _ in range(n)]
    rows = [w[e].double() @ x[r].double() for r, e in enumerate(owner)]
    return torch.stack(rows) if rows else x.new_zeros(0, w.shape[1]).double()


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
