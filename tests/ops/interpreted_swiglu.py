"""The SwiGLU kernels, run by Triton's interpreter on CPU tensors.

Collected by tests/ops/test_swiglu.py; see tests/ops/interpreted.py.
"""

from __future__ import annotations

import pytest
import torch

from graphmoe.ops import swiglu_kernels
from tests.ops.row_cases import assert_swiglu_matches_fp64

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 13, 64, 600])
def test_values_and_gradients_match_fp64(width, dtype, weighted):
    run = swiglu_kernels
    assert_swiglu_matches_fp64(run.forward, run.backward, 21, 30, width, dtype, weighted=weighted)


@pytest.mark.parametrize(("live", "rows"), [(0, 9), (150, 150), (1, 140), (0, 0)])
def test_dead_rows_are_neither_read_nor_written(live, rows):
    run = swiglu_kernels
    for dead in (float("nan"), 1.0):
        assert_swiglu_matches_fp64(run.forward, run.backward, live, rows, 20, torch.float32, dead=dead)


def test_large_gates_keep_values_and_gradients_finite():
    h = torch.tensor([[-200.0, 200.0, 1.0, 2.0]])
    ends = torch.tensor([1], dtype=torch.int32)
    assert torch.equal(swiglu_kernels.forward(h, None, ends), torch.tensor([[0.0, 400.0]]))
    dh, _ = swiglu_kernels.backward(torch.ones(1, 2), h, None, ends)
    assert torch.equal(dh, torch.tensor([[0.0, 2.0, 0.0, 200.0]]))
