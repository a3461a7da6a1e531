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

from graphmoe.bench import library_calls
from graphmoe.config import packages
from graphmoe.config.schema import AttentionBackend
from graphmoe.ops.grouped_mlp import vendor
from graphmoe.ops.masked_attention import attention as attend
from tests.bench import test_library_calls as suite
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


def swiglu_backward(d_out, x, probs, row_mask):
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), probs.detach().requires_grad_()
        return torch.autograd.grad(suite.swiglu_with_probs(*leaves, row_mask), leaves, d_out)


def route(logits, tokens, experts, groups, topk, selected, score, scale):
    scores, weights, chosen = suite.routed(logits, topk, groups, selected, score, scale)
    none = torch.zeros_like(logits)
    results = none.scatter(1, chosen, weights.float()), none.int().scatter(1, chosen, 1)
    return scores.float(), chosen, logits.sigmoid().gather(1, chosen), *results


def route_backward(d_probs, d_scores, logits, probs, chosen, raw, scores, is_chosen, score, scale):
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        found = suite.routed(leaf, chosen.shape[1], 1, 1, score, scale, chosen)[:2]
        return torch.autograd.grad(found, leaf, (d_scores, d_probs.gather(1, chosen)))[0]


def plan_rows(expert_map, experts, topk, pad, rows, stride):
    given = {"probs_layout": "topk", "pad_multiple": pad, "probs_topk_stride": stride}
    _, slot, _, _, count, *_ = suite.moe_permute(expert_map, expert_map, experts, topk, rows, **given)
    return slot, torch.empty(0), torch.zeros(1), count


def permute(tokens, out, scales, out_scales, probs, out_probs, slot, *_):
    out.copy_(tokens[slot // (len(slot) // len(tokens))])


def unpermute(rows, out, probs, out_probs, slot, count, experts, *_):
    out.copy_(suite.moe_unpermute(rows, slot, count, out.shape, num_local_experts=experts)[0])


def in_blocks(x, dtype, height, width):
    """Return values in 8 bits, and a scale for each."""
    parts = x.unflatten(1, (-1, width)).unflatten(0, (-1, height)).float()
    scale = parts.abs().amax((1, 3), keepdim=True).expand_as(parts) / torch.finfo(dtype).max
    values, scale = (each.flatten(2).flatten(0, 1) for each in (parts / scale, scale))
    return values.to(dtype), scale.contiguous()


def product(a, a_scale, b, b_scale, trans_a, trans_b, out_dtype, trans_c):
    a, b = a.float() * a_scale, b.float() * b_scale
    out = (a.mT if trans_a else a) @ (b.mT if trans_b else b)
    return (out.mT if trans_c else out).to(out_dtype).contiguous()


def by_rows(x, dtype, axis, _):
    return in_blocks(x, dtype, *((1, x.shape[1]) if axis in (-1, 1) else (len(x), 1)))


COMPILED_OPS = SimpleNamespace(
    permute_preprocessing=plan_rows, permute=permute, unpermute=unpermute, quantize_fp8_rowwise=by_rows,
    quantize_fp8_tensorwise=lambda x, dtype, _: in_blocks(x, dtype, *x.shape),
    dequantize_fp8_rowwise=lambda x, scale, axis, dtype: (x.float() * scale).to(dtype),
    hipblaslt_gemm=lambda a, b, dtype, *how: product(a, 1, b, 1, *how[:2], dtype, how[2]),
    hipblaslt_gemm_fp8=lambda a, a_scale, b, b_scale, dtype, *how: product(
        a, a_scale, b, b_scale, *how[:2], dtype, how[2]
    ),
)  # fmt: skip


def values_of(q, k, v, *scales):
    pairs = zip("qkv", (q, k, v), scales, strict=True)
    return {name: (x.float() * s.repeat_interleave(64, -1).mT[..., None]).bfloat16() for name, x, s in pairs}


def attend_in_fp8(q, k, v, p_scale, q_scale, k_scale, v_scale, dropout, scale, causal, left, right, *rest):
    assert causal and left == right == -1 and rest == (None, None, False, True) and not dropout
    return *attention.forward(values_of(q, k, v, q_scale, k_scale, v_scale), scale), torch.empty(0)


def attend_in_fp8_backward(d_out, q, k, v, out, q_scale, k_scale, v_scale, p_scale, lse, *rest):
    return attention.backward(values_of(q, k, v, q_scale, k_scale, v_scale), out, d_out, lse, rest[7])


@pytest.fixture
def kernels(turbo, monkeypatch):
    def put(module: str, **names: Any) -> None:
        for name, value in names.items():
            monkeypatch.setattr(importlib.import_module(f"primus_turbo.pytorch.{module}"), name, value)

    monkeypatch.setattr(torch.ops, "primus_turbo_cpp_extension", COMPILED_OPS, raising=False)
    put(
        "ops.activation", swiglu_fwd_with_probs=suite.swiglu_with_probs, swiglu_bwd_with_probs=swiglu_backward
    )
    put("ops.moe.fused_moe_router", fused_moe_router_fwd=route, fused_moe_router_bkwd=route_backward)
    gemms = {f"gemm_fp8_{kind}_triton_kernel": product for kind in ("rowwise", "blockwise")}
    put("kernels.gemm.gemm_fp8_impl", **gemms)
    put(
        "ops.gemm_fp8",
        quantize_fp8=lambda x, dtype, *_, block_size, **how: in_blocks(x, dtype, block_size, block_size),
        quantize_fp8_with_trans=lambda x, dtype, *_, block_size: (
            *in_blocks(x, dtype, 1, block_size), *in_blocks(x, dtype, block_size, 1)
        ),
    )  # fmt: skip
    attend = {"forward": attend_in_fp8, "backward": attend_in_fp8_backward}
    named = {f"attention_triton_{way}_impl": run for way, run in attend.items()}
    put("ops.attention.flash_attn_interface", **named)


@pytest.mark.parametrize("name", suite.ROWS)
def test_calls_of_the_suite_have_our_results(name, kernels, monkeypatch):
    for module in (library_calls, suite.ops_suite):
        monkeypatch.setattr(module, "reason_against", lambda name, _: None if name == "turbo" else "absent")
    assert suite.errors(name) == dict.fromkeys(suite.ROWS[name])


def test_uncompared_calls_of_the_suite_mean_the_same(kernels):
    suite.assert_router_is_ours((1, 1), "softmax", 1.0)
    suite.assert_router_is_ours((8, 4), "sigmoid", 2.5)
    suite.assert_linear_is_ours("bf16", 40)
    for recipe in ("rowwise", "tensorwise", "blockwise"):
        suite.assert_linear_is_ours(recipe, 20)
    suite.assert_fp8_attention_is_ours(20)
