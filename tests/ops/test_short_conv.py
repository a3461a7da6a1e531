"""Convolution, unit norm and gated norm around the delta rule: against fp64, documents, compiled kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_fw_bw_and_get_code

from graphmoe.ops.short_conv import gated_norm, short_conv, unit_norm
from tests.ops.test_masked_attention import first_keys
from tests.tolerances import assert_forward_close, assert_gradient_close

B, C, T = 2, 6, 4


def by_document(x_BSC, w_CT, first_BS):
    """The convolution of each document as a sequence of its own, by torch's."""
    rows = []
    for x_SC, first_S in zip(x_BSC, first_BS, strict=True):
        lengths = first_S.unique(return_counts=True)[1].tolist()
        parts = [F.pad(part.T[None], (T - 1, 0)) for part in x_SC.split(lengths)]
        rows.append(torch.cat([F.conv1d(part, w_CT[:, None], groups=C)[0].T for part in parts]))
    return F.silu(torch.stack(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("S, lengths", [(1, None), (3, None), (20, None), (20, 1), (20, 4), (20, 1000)])
def test_convolution_stays_within_documents(S, lengths, dtype):
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(B, S, C, generator=generator).to(dtype) for _ in range(2))
    given = [x.requires_grad_(), torch.randn(C, T, generator=generator).to(dtype).requires_grad_()]
    first_BS = first_keys(lengths, B, S)
    found = short_conv(*given, first_BS)
    exact = [each.detach().double().requires_grad_() for each in given]
    wanted = by_document(*exact, torch.zeros(B, S, dtype=torch.int32) if first_BS is None else first_BS)
    assert_forward_close(found, wanted)
    gradients = zip(
        torch.autograd.grad(found, given, grad),
        torch.autograd.grad(wanted, exact, grad.double()),
        strict=True,
    )
    for actual, expected in gradients:
        assert_gradient_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_round_once(dtype):
    x, gate = (torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    weight, x64 = torch.linspace(0.5, 2, 16).to(dtype), x.double()
    assert_forward_close(unit_norm(x), x64 / (x64.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    normed = x64 / (x64.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert_forward_close(gated_norm(x, weight, gate, 1e-3), weight.double() * normed * F.silu(gate.double()))


@pytest.mark.slow  # compiles C++
def test_each_compiles_to_one_kernel_per_direction():
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    w, first_BS = torch.randn(64, T, requires_grad=True), first_keys(4, 2, 32)
    weight = torch.ones(16, requires_grad=True)

    def joined():
        return unit_norm(short_conv(x, w, first_BS).unflatten(-1, (4, 16)))

    def gated():
        return gated_norm(x.unflatten(-1, (4, 16)), weight, w[:, :1].expand(64, 16)[:4], 1e-6)

    for function in (joined, gated):
        torch.compiler.reset()
        _, codes = run_fw_bw_and_get_code(torch.compile(function))
        assert [code.count("= async_compile.cpp") for code in codes] == [1, 1]
