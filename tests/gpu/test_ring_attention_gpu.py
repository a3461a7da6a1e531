"""Kernels that give log-sum-exps: blocks of attention on a GPU that join to the whole."""

import pytest
import torch
from torch import Tensor

from graphmoe.ops.ring_attention import _join, attend_to_block, choose_kernel, gradients_of_block
from graphmoe.plan.layout import Layout
from tests.distributed.test_context_parallel import SCALE, Ring
from tests.tolerances import assert_forward_close, assert_gradient_close, relative_error

ALONE = Layout(cp=2, ring=True)  # which the reference reads nothing of
BLOCKS = {
    "cudnn": Ring(ALONE, (4, 4), (64, 64), torch.bfloat16, 256),
    "cudnn, grouped": Ring(ALONE, (8, 2), (128, 128), torch.bfloat16, 256),
    "cudnn, unequal": Ring(ALONE, (4, 4), (192, 128), torch.bfloat16, 256),
    "flash": Ring(ALONE, (4, 4), (64, 64), torch.bfloat16, 256),
    "flash, grouped": Ring(ALONE, (8, 2), (128, 128), torch.bfloat16, 256),
    "flash, unequal": Ring(ALONE, (4, 4), (192, 128), torch.bfloat16, 256),
    "flash, odd": Ring(ALONE, (4, 2), (36, 20), torch.bfloat16, 72),
    "efficient": Ring(ALONE, (4, 4), (64, 64), torch.float32, 256),
    "efficient, grouped": Ring(ALONE, (4, 2), (48, 32), torch.float32, 72),
}


def by_blocks(case: Ring) -> list[Tensor]:
    """Attention of the first half to itself, of the second half to both, joined; then the gradients."""
    q, k, v, d_out = (x.cuda() for x in case.whole())
    half = case.seq_len // 2
    first, second = slice(0, half), slice(half, case.seq_len)
    steps = [(first, first, True), (second, second, True), (second, first, False)]
    out = torch.zeros(*q.shape[:3], v.shape[-1], device="cuda")
    lse = torch.zeros(q.shape[0], q.shape[2], case.seq_len, device="cuda")
    for rows, columns, causal in steps:
        results = attend_to_block(q[:, rows], k[:, columns], v[:, columns], SCALE, causal)
        if causal:
            out[:, rows], lse[:, :, rows] = results
        else:
            _join(out[:, rows], lse[:, :, rows], *results)
    out, gradients = out.to(q.dtype), [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for rows, columns, causal in steps:
        added = gradients_of_block(
            *(d_out[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows]),
            *(SCALE, causal),
        )
        for gradient, where, part in zip(gradients, (rows, columns, columns), added, strict=True):
            gradient[:, where] += part
    return [out, *(gradient.to(q.dtype) for gradient in gradients)]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_that_a_kernel_attends_to_join_to_attention_to_all(name):
    case, kernel = BLOCKS[name], name.split(",")[0]
    torch.use_deterministic_algorithms(kernel == "flash")
    try:
        q, k, v, _ = (x.cuda() for x in case.whole())
        found = choose_kernel(q, k, v, causal=True)
        if kernel == "cudnn" and found != "cudnn":
            pytest.skip("cuDNN does not take these heads here")
        assert found == kernel
        out, *gradients = by_blocks(case)
    finally:
        torch.use_deterministic_algorithms(False)
    of_out, *of_gradients = case.expected()
    if case.dtype == torch.float32:
        for result, expected in zip((out, *gradients), (of_out, *of_gradients), strict=True):
            assert relative_error(result.cpu(), expected) < 1e-3  # products of tensor cores, if allowed
    else:
        assert_forward_close(out.cpu(), of_out)
        for gradient, expected in zip(gradients, of_gradients, strict=True):
            assert_gradient_close(gradient.cpu(), expected)
