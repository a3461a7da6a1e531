"""Calls of Primus-Turbo run its own Python layer, from a checkout, with all that is compiled replaced.

Argument checks, schemas of operations and the choice of a backend are its own; kernels are computed in fp64.
``make test-vendors PRIMUS_TURBO_SOURCES=CHECKOUT``
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from graphmoe.config import packages
from graphmoe.config.schema import AttentionBackend
from graphmoe.ops.grouped_mlp import vendor
from graphmoe.ops.masked_attention import attention as attend
from tests.ops import attention_fakes as attention
from tests.ops.test_attention import (
    SCALE,
    SHAPES,
    assert_matches_reference,
    forward_and_gradients,
    make_inputs,
)
from tests.tolerances import assert_forward_close

SOURCES = os.environ.get("PRIMUS_TURBO_SOURCES", "")
pytestmark = pytest.mark.skipif(not SOURCES, reason="PRIMUS_TURBO_SOURCES names no checkout of Primus-Turbo")
COMPILED = ("primus_turbo.pytorch._C", "primus_turbo.flydsl", "primus_turbo.hipkittens", "aiter", "flydsl")
MI300X = SimpleNamespace(major=9, minor=4, gcnArchName="gfx942", multi_processor_count=304)
KERNELS = "primus_turbo.pytorch.kernels"


class Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each that would be compiled."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        compiled = any(f"{name}.".startswith(f"{each}.") for each in COMPILED)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if compiled else None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(__path__=[])

    def exec_module(self, module: Any) -> None: ...


@pytest.fixture(scope="module")
def turbo():
    custom_op = torch.library.custom_op
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SOURCES)
        patch.setattr(sys, "meta_path", [Replaced(), *sys.meta_path])
        # its operations are of CUDA alone; here they run on the CPU
        patch.setattr(
            torch.library, "custom_op", lambda *args, device_types=None, **how: custom_op(*args, **how)
        )
        patch.setattr(torch.version, "hip", "7.0")
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", int, raising=False)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 4))
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: MI300X)
        importlib.import_module("primus_turbo.pytorch.ops")
        patch.setattr(packages, "is_installed", lambda name: True)
        yield


@pytest.fixture
def aiter(turbo, monkeypatch):
    def forward(
        q, k, v, dropout, scale, causal, left, right, sink_size, bias, slopes, q_scale, k_scale, v_scale,
        return_lse, return_softmax, out,
    ):  # fmt: skip
        assert causal and left == right == -1 and return_lse and not (return_softmax or dropout or sink_size)
        assert bias is slopes is q_scale is k_scale is v_scale is None
        found, lse = attention.forward({"q": q, "k": k, "v": v}, scale)
        return out.copy_(found), lse, torch.empty(0), torch.zeros(2, dtype=torch.int64)

    def backward(
        d_out, q, k, v, out, lse, dq, dk, dv, d_bias, dropout, scale, causal, left, right, *_
    ):  # fmt: skip
        assert causal and left == right == -1 and not dropout and d_bias is None
        found = attention.backward({"q": q, "k": k, "v": v}, out, d_out, lse, scale)
        for gradient, value in zip((dq, dk, dv), found, strict=True):
            gradient.copy_(value)

    module = importlib.import_module(f"{KERNELS}.attention.attention_aiter_impl")
    kernels = {"flash_attn_forward": forward, "flash_attn_backward": backward}
    monkeypatch.setattr(module, "_AITER_ATTN_KERNELS", kernels)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_runs_eager_and_compiled(shape, aiter):
    run = functools.partial(attend, scale=SCALE, backend=AttentionBackend.turbo)
    assert_matches_reference(run, shape, torch.bfloat16)
    *qkv, grad = make_inputs(shape)
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, *(forward_and_gradients(each, qkv, grad) for each in (run, compiled))))


@pytest.fixture
def gemms(turbo, monkeypatch):
    """Its grouped GEMMs: of rows a [R, K] with b [E, K, N], and a.T @ b of the rows of each expert."""

    def of_rows(a, b, offsets, trans_b, num_cu, work_steal, ws_mode):
        out = a.new_full((len(a), b.shape[1] if trans_b else b.shape[2]), torch.nan)
        for expert, rows in enumerate(slices(offsets)):
            out[rows] = (a[rows].double() @ (b[expert].mT if trans_b else b[expert]).double()).to(a.dtype)
        return out

    def of_experts(a, b, offsets, num_cu, work_steal, ws_mode, beta, out):
        assert not beta and out is None
        return torch.stack([a[rows].double().T @ b[rows].double() for rows in slices(offsets)]).to(a.dtype)

    def with_tail(out, offsets):
        out[offsets[-1] :] = 0
        return out

    module = importlib.import_module(f"{KERNELS}.grouped_gemm.grouped_gemm_impl")
    monkeypatch.setattr(module, "grouped_gemm_output_tail_kernel", with_tail)
    monkeypatch.setattr(module, "grouped_gemm_triton_kernel", of_rows)
    monkeypatch.setattr(module, "grouped_gemm_variable_k_triton_kernel", of_experts)


def slices(offsets: Tensor) -> list[slice]:
    ends = offsets.tolist()
    return [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]


def test_products_of_experts_are_those_of_each(gemms):
    """One expert has no rows; rows past the last one belong to none."""
    ends, (R, C, N) = torch.tensor([5, 5, 17], dtype=torch.int32), (20, 32, 48)
    x, dy, w = (torch.randn(size, dtype=torch.bfloat16) for size in ((R, C), (R, N), (3, N, C)))
    products = vendor._turbo_products(torch.bfloat16)
    rows, rows_grad = products.rows(x, w, ends), products.rows_grad(dy, w, ends)
    weights = products.weight_grad(dy, x, ends)
    for expert, own in enumerate((slice(0, 5), slice(5, 5), slice(5, 17))):
        assert_forward_close(rows[own], x[own].double() @ w[expert].double().T)
        assert_forward_close(rows_grad[own], dy[own].double() @ w[expert].double())
        assert_forward_close(weights[expert], dy[own].double().T @ x[own].double())
