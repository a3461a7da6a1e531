"""Primus-Turbo in suite=ops: calls bound to recorded signatures, results beside ours, and its errors.

tests/vendors/test_turbo_sources.py runs the same calls through the library's own Python layer.
"""

import functools
import sys

import pytest
import torch

from graphmoe.bench import library_calls, ops_suite
from graphmoe.config import packages
from graphmoe.config.formats import FORMATS
from graphmoe.config.schema import AttentionBackend
from graphmoe.ops.fp8_choice import Dense
from graphmoe.ops.masked_attention import attention
from tests.ops import attention_fakes, grouped_mlp_fakes
from tests.ops.test_fp8_mlp import decibels
from tests.vendor_api import bind, recorded_signature

CPU, OPS, BOTH = torch.device("cpu"), "primus_turbo.pytorch.ops", ("forward", "backward")
PAIR, FORMS, IN_FP8 = ["graphmoe", "turbo"], ["bf16", "fp8", "weights"], [f"turbo/{each}" for each in FORMATS]
ROWS = dict.fromkeys(("permute", "unpermute", *(f"swiglu/{way}" for way in BOTH)), PAIR)
ROWS |= {f"router/{label}/{way}": PAIR for label in ("v2_lite", "v3") for way in BOTH}
ROWS |= {"unpermute_weighted": PAIR[:1], "linear_cross_entropy/forward_backward": PAIR[:1]}
MORE = {f"attention/v2_lite/{way}": ["sdpa", "turbo", "turbo/fp8"] for way in BOTH}
MORE |= {"fp8_linear/q": [*FORMS, "turbo/bf16", *IN_FP8], "fp8_mlp/v2_lite": [*FORMS, *IN_FP8]}


def routed(logits, topk, groups, selected_groups, score_function, scaling_factor, chosen=None):
    """Return scores, weights [T, K] and experts, in fp64."""
    is_sigmoid = score_function == "sigmoid"
    share = logits.double().sigmoid() if is_sigmoid else logits.double().softmax(-1)
    of_groups = share.unflatten(1, (groups, -1))
    best = of_groups.topk(topk // selected_groups).values.sum(-1).topk(selected_groups).indices
    seen = torch.zeros(of_groups.shape[:2]).scatter(1, best, 1)[..., None]
    chosen = (of_groups * seen).flatten(1).topk(topk).indices if chosen is None else chosen
    weights, total = share.gather(1, chosen), share.sum(-1, keepdim=True)  # a softmax's is one
    weights = weights / weights.sum(-1, keepdim=True) if is_sigmoid else weights
    return share / total, weights * scaling_factor, chosen


def fused_group_topk_routing_with_aux_score(logits, **choice):
    scores, weights, chosen = routed(logits, **choice)
    none = torch.zeros_like(logits)
    return scores, none.scatter(1, chosen, weights.float()), none.scatter(1, chosen, 1).bool()


def moe_permute(tokens, expert_map, num_local_experts, num_topk, num_permuted_tokens, probs_layout, **rest):
    assert expert_map.dtype == torch.int32 and expert_map.is_contiguous() and probs_layout == "topk"
    assert expert_map.shape == (len(tokens), num_topk) and num_permuted_tokens == expert_map.numel()
    assert not any(rest.values()) and expert_map.max() < num_local_experts
    slot = expert_map.flatten().argsort(stable=True)
    return tokens[slot // num_topk], slot, None, None, torch.tensor([len(tokens)]), None, None


def moe_unpermute(permuted_tokens, row_id_map, num_dispatched_tokens_tensor, restore_shape, **rest):
    assert rest.pop("num_local_experts") and not any(rest.values())
    T = int(num_dispatched_tokens_tensor)
    token, x = row_id_map // (len(row_id_map) // T), torch.zeros(restore_shape, dtype=torch.float64)
    return x.index_add_(0, token, permuted_tokens.double()).bfloat16(), None


def swiglu_with_probs(x, probs, row_mask):
    assert row_mask is None and probs.dtype == torch.float32 and probs.shape == x.shape[:1]
    gate, up = x.double().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up * probs.double()[:, None]).to(x.dtype)


def gemm(a, b, trans_b, **rest):
    assert trans_b and not any(rest.values())
    return a @ b.mT


def gemm_fp8(config, **call):
    size, scale, *_ = grouped_mlp_fakes.BLOCKS[config.granularity.name]
    assert (config.block_size, config.scale_dtype.name) == (size, scale)
    return gemm(**call)


def flash_attn_fp8_func(q, k, v, softmax_scale, causal, window_size, **rest):
    assert causal and window_size == (-1, -1) and not any(rest.values())
    return attention_fakes.reference_attention(q, k, v, scale=softmax_scale).to(q.dtype)


def bound(function):
    signature = recorded_signature("primus_turbo", f"{OPS}.{function.__name__}")
    return lambda *args, **kwargs: function(**bind(signature, args, kwargs))


@pytest.fixture
def turbo_alone(monkeypatch):
    reasons = {"turbo": None, "te": "te is absent", "flash4": "flash4 is absent"}
    for module in (library_calls, ops_suite):
        monkeypatch.setattr(module, "reason_against", lambda library, _: reasons[library])


@pytest.fixture
def turbo(turbo_alone, monkeypatch):
    attention_fakes.install_turbo(monkeypatch)
    grouped_mlp_fakes.install_turbo(monkeypatch)
    fakes = moe_permute, moe_unpermute, swiglu_with_probs, gemm, gemm_fp8, flash_attn_fp8_func
    for function in (*fakes, fused_group_topk_routing_with_aux_score):
        monkeypatch.setattr(sys.modules[OPS], function.__name__, bound(function), raising=False)


def errors(name):
    operations = {each.name: each for each in ops_suite.ops_suite(False, CPU)[0]}
    return {row["alternative"]: row["error"] for row in operations[name].rows(CPU, 1, lambda _: 1.0)}


@pytest.mark.parametrize("name", ROWS | MORE)
def test_alternatives_run_with_our_results(name, turbo):
    assert errors(name) == dict.fromkeys((ROWS | MORE)[name])


def assert_router_is_ours(*choice):
    groups, score, scale = choice
    B, K, how, ops = 4, 8, (groups[0] > 1, False, scale), torch.ops.graphmoe
    logits, d_TE, none = torch.randn(64, 32), torch.randn(64, 32), torch.zeros(64, 32)
    weight, expert, *_ = ops.router(logits, None, None, B, K, score, *groups, 2, *how, how[0])
    d_weight = d_TE.gather(1, expert.long())
    d_logits = ops.router_backward(d_weight, none[:B], None, None, logits, expert, B, score, *how)
    expected = none.scatter(1, expert.long(), weight), (d_logits,)
    for way, each in zip(BOTH, expected, strict=True):
        found = library_calls._turbo_router(way, logits, d_TE, torch.ones(32), K, *choice)()
        torch.testing.assert_close(found, each)


def assert_linear_is_ours(result, least):
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    found = library_calls._turbo_linear(result, generators[0], Dense(256, 384, 128, "fp8"))()
    sizes = (256, 128), (384, 128), (256, 384)
    x, w, dy = (torch.randn(size, generator=generators[1]).bfloat16().double() for size in sizes)
    assert all(decibels(*pair) > least for pair in zip(found, (x @ w.T, dy @ w, dy.T @ x), strict=True))


def assert_fp8_attention_is_ours(least):
    tensors = [torch.randn(2, 128, *size).bfloat16() for size in ((4, 16), (4, 32), (2, 32), (2, 16))]
    run = functools.partial(attention, scale=0.2, backend=AttentionBackend.sdpa)
    for way in BOTH:
        found = library_calls._turbo_attention("", way, 0.2, *tensors)()
        expected = library_calls.either(way, run, *tensors)()
        assert all(decibels(*pair) > least for pair in zip(found, expected, strict=True))


def test_uncompared_results_mean_the_same(turbo):
    assert_router_is_ours((1, 1), "softmax", 1.0)
    assert_router_is_ours((8, 4), "sigmoid", 2.5)
    assert_linear_is_ours("bf16", 40)
    assert_fp8_attention_is_ours(40)


def test_an_error_of_the_library_is_of_its_row_alone(turbo_alone):
    for name in ("unpermute", "router/v3/backward", "attention/v2_lite/backward", "fp8_linear/q"):
        missing = {each for each, error in errors(name).items() if error and "primus_turbo" in error}
        assert missing == {each for each in (ROWS | MORE)[name] if "turbo" in each}


def test_reasons_name_the_build_and_the_package(monkeypatch):
    gpu = torch.device("cuda")
    assert library_calls.reason_against("te", CPU) == "te needs a GPU"
    assert library_calls.reason_against("turbo", gpu) == "turbo needs a ROCm build of torch"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(packages, "is_installed", lambda package: package != "primus_turbo")
    assert "needs the package primus_turbo, which is not" in library_calls.reason_against("turbo", gpu)
    assert library_calls.reason_against("te", gpu) is None
