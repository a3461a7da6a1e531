"""Collectives without ranks: shapes without process groups, and errors that say what to do."""

from types import SimpleNamespace

import pytest
import torch

from graphmoe.ops import collectives as ops
from graphmoe.runtime.torch_compat import fake_mode

CALLS = {
    "all_gather": (lambda x, dim: ops.all_gather(x, "tp", 2, dim), 2),
    "reduce_scatter": (lambda x, dim: ops.reduce_scatter(x, "tp", 2, dim), 1 / 2),
    "sum": (lambda x, dim: ops.all_reduce(x, "tp", 2), 1),
    "max": (lambda x, dim: ops.all_reduce(x, "tp", 2, "max"), 1),
}


@pytest.mark.parametrize("device", ["fake", "meta"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", CALLS)
def test_shapes_dtypes_and_gradients_need_no_process_group(name, dim, device):
    call, factor = CALLS[name]
    sizes = [4, 6, 3]
    expected = [int(size * factor) if i == dim else size for i, size in enumerate(sizes)]
    with fake_mode() if device == "fake" else torch.device("meta"):
        x = torch.empty(sizes[::-1], dtype=torch.bfloat16).permute(2, 1, 0).requires_grad_()  # not contiguous
        y = call(x, dim)
    assert list(y.shape) == expected and y.is_contiguous() and y.dtype == torch.bfloat16
    assert y.requires_grad == (name != "max")
    if y.requires_grad:
        (dx,) = torch.autograd.grad(y.float().sum(), x)
        assert dx.shape == x.shape and dx.dtype == x.dtype


@pytest.mark.parametrize("name", CALLS)
def test_without_process_groups_the_error_names_the_axis_and_what_to_call(name):
    with pytest.raises(RuntimeError, match=r"no process group for a collective along tp; call .*use_groups"):
        CALLS[name][0](torch.zeros(2, 2), 0)


def test_a_group_of_another_size_and_an_axis_without_group_are_errors():
    two_ranks = SimpleNamespace(size=lambda: 2)
    ops.use_groups(SimpleNamespace(group={"tp": two_ranks}.get))
    try:
        with pytest.raises(RuntimeError, match="along tp expects 3 ranks, but its process group has 2"):
            ops.all_gather(torch.zeros(2), "tp", 3, 0)
        with pytest.raises(RuntimeError, match="for a collective along ep"):
            ops.index_along("ep", torch.zeros(2))
    finally:
        ops.use_groups(None)
