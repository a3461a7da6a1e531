"""Attention with documents, windows and sinks: kernels and reference against fp64, and what runs when."""

import functools
import math
from unittest import mock

import pytest
import torch
from torch.library import opcheck

from graphmoe.config.schema import AttentionBackend
from graphmoe.ops import masked_attention
from graphmoe.ops.masked_attention import attention, attention_with_lse, logit_bound, reference
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import BACKENDS, CUDA, INTERPRETING, device_of
from tests.tolerances import TOLERANCES, assert_forward_close

SCALE = 0.21  # not 1 / sqrt(E) of any shape
SHAPES = {  # name: (B, S, H, G, E, V)
    "mla": (1, 70, 2, 2, 48, 32),
    "grouped": (2, 37, 4, 2, 16, 16),
    "odd": (1, 45, 3, 1, 20, 13),
}
LARGE = {
    "mla": (2, 700, 4, 4, 192, 128),
    "grouped": (2, 513, 8, 2, 128, 128),
    "small": (1, 300, 8, 1, 64, 64),
}
LARGE |= {"large": (1, 257, 2, 1, 256, 256), "odd": (1, 130, 3, 3, 80, 24)}
LENGTHS = {  # of documents: those of length 1, one that fills the sequence, and random ones
    "none": None,
    "ones": 1,
    "whole": 10_000,
    "mixed": 9,
}
WINDOWS = {"no window": 0, "one key": 1, "window": 5, "long window": 33}


def first_keys(lengths, B, S):
    """First keys of documents of random lengths, 1 to twice the mean; None without documents."""
    if lengths is None:
        return None
    generator = torch.Generator().manual_seed(lengths)
    starts_BS = torch.rand(B, S, generator=generator) < 1 / lengths
    starts_BS[:, 0] = True
    return torch.where(starts_BS, torch.arange(S), 0).cummax(1).values.int()


def written_out(q, k, v, sinks, first_BS, window):
    """Attention in fp64 by a softmax over all keys and the sink."""
    (B, S, H, _), G = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(H // G, dim=2) for x in (k, v))
    position_S = torch.arange(S, device=q.device)
    seen_BST = (position_S <= position_S[:, None]).expand(B, S, S).clone()
    if window:
        seen_BST &= position_S > position_S[:, None] - window
    if first_BS is not None:
        seen_BST &= position_S >= first_BS[..., None]
    logits = SCALE * torch.einsum("bshe,bthe->bhst", q, k).masked_fill(~seen_BST[:, None], -math.inf)
    if sinks is None:
        p = logits.softmax(-1).nan_to_num() if first_BS is not None else logits.softmax(-1)
    else:
        p = torch.cat([logits, sinks[:, None, None].expand(B, H, S, 1)], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("bhst,bthv->bshv", p, v)


def inputs_of(shape, dtype, device, sinks=None):
    B, S, H, G, E, V = shape
    generator = torch.Generator().manual_seed(1)
    sizes = ((B, S, H, E), (B, S, G, E), (B, S, G, V), (B, S, H, V))
    q, k, v, grad = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    if sinks is not None:
        spread = torch.linspace(-1, 1, H) if H > 1 else torch.ones(1)
        inputs.append((sinks * spread).to(device, torch.promote_types(dtype, torch.float32)).requires_grad_())
    return inputs, grad


def results(run, inputs, grad):
    out = run(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def operation(first_BS, window, backend=AttentionBackend.sdpa):
    def run(q, k, v, sinks=None):
        how = {"first_BS": first_BS, "window": window, "sinks_H": sinks}
        return attention(q, k, v, scale=SCALE, backend=backend, **how)

    return run


def assert_matches_fp64(shape, lengths, window, sinks, dtype, device):
    inputs, grad = inputs_of(shape, dtype, device, sinks)
    first_BS = first_keys(lengths, *shape[:2])
    first_BS = None if first_BS is None else first_BS.to(device)
    found = results(operation(first_BS, window), inputs, grad)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted_by = functools.partial(written_out, first_BS=first_BS, window=window)
    if sinks is None:
        wanted_by = functools.partial(wanted_by, sinks=None)
    wanted = results(wanted_by, exact, grad.double())
    assert_forward_close(found[0], wanted[0])
    terms = float(grad.double().norm())
    for place, (actual, expected) in enumerate(zip(found[1:], wanted[1:], strict=True)):
        # One key, or a large sink, leaves differences of terms that cancel. The sinks' gradient is a sum over
        # all queries of values rounded to ``dtype``.
        limit = TOLERANCES[dtype].gradient * max(float(expected.norm()), (3e-2, 1.0)[place == 3] * terms)
        assert float((actual.double() - expected).norm()) <= limit, place


CASES = [  # each pair of a shape, documents, a window and sinks
    ([*SHAPES][(i + j) % 3], lengths, window, (None, 20.0, 2.0)[(i + 2 * j) % 3])
    for i, lengths in enumerate(LENGTHS)
    for j, window in enumerate(WINDOWS)
]


@pytest.mark.parametrize("shape, lengths, window, sinks", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients_match_fp64(backend, shape, lengths, window, sinks, small_tiles):
    device = device_of(backend)
    assert_matches_fp64(SHAPES[shape], LENGTHS[lengths], WINDOWS[window], sinks, torch.float32, device)


@pytest.fixture
def small_tiles(monkeypatch):
    """Make tiles so small that short sequences have blocks of every kind; kernels run CPU tensors."""
    if INTERPRETING:
        from graphmoe.ops import attention_kernels as kernels

        monkeypatch.setattr(masked_attention, "has_kernel", lambda x: True)
        monkeypatch.setattr(kernels, "forward_tile", lambda _: kernels.Tile(16, 16, 32, 1))
        monkeypatch.setattr(kernels, "backward_tile", lambda _: kernels.Tile(32, 16, 32, 1))


@pytest.mark.parametrize("window", WINDOWS.values())
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("device", [CUDA])
def test_kernels_match_fp64_in_bf16(device, shape, lengths, window):
    assert_matches_fp64(shape, lengths, window, 2.0 if window == 5 else None, torch.bfloat16, device)


@pytest.mark.parametrize("sinks", [None, 3.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_without_keys_return_zero_and_have_no_gradient(backend, sinks, small_tiles):
    shape, device = (1, 40, 2, 2, 16, 16), device_of(backend)
    inputs, grad = inputs_of(shape, torch.float32, device, sinks)
    first_BS = torch.arange(40, dtype=torch.int32)[None].clone()
    first_BS[:, :7] = 7  # the first seven see no key, the eighth itself
    out, dq, dk, dv, *_ = results(operation(first_BS.to(device), 0), inputs, grad)
    for x in (out, dq, dk, dv):
        assert not x[:, :7].any() and x.isfinite().all()
    if sinks is None:  # fp32 products on tensor cores drop the last bits
        torch.testing.assert_close(out[:, 7:], inputs[2][:, 7:], rtol=0 if device == "cpu" else 1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_that_is_not_finite_makes_what_sees_it_not_finite(backend, small_tiles):
    device = device_of(backend)
    for place in range(3):
        inputs, grad = inputs_of((1, 40, 2, 1, 16, 16), torch.float32, device)
        with torch.no_grad():
            inputs[place][:, 3] = math.nan
        first_BS = torch.zeros(1, 40, dtype=torch.int32, device=device)
        out, dq, dk, dv = results(operation(first_BS, 0), inputs, grad)
        assert all(x[:, 3].isnan().all() for x in (out, dq, dk)) and dv[:, 3].isnan().all() == (place < 2)


def test_sinks_alone_change_the_log_sum_exp_to_rounding():
    inputs, grad = inputs_of((2, 33, 4, 2, 24, 16), torch.float64, "cpu", sinks=20.0)
    wanted = results(functools.partial(written_out, first_BS=None, window=0), inputs, grad)
    for actual, expected in zip(results(operation(None, 0), inputs, grad), wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "window, lengths, sinks", [(0, None, None), (0, None, 2.0), (5, None, None), (5, 9, 5.0)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_bounded_by_the_log_sum_exp(backend, window, lengths, sinks, small_tiles):
    inputs, grad = inputs_of(SHAPES["grouped"], torch.float32, device_of(backend), sinks)
    first_BS, lses = first_keys(lengths, *SHAPES["grouped"][:2]), []
    first_BS = None if first_BS is None else first_BS.to(inputs[0].device)

    def run(q, k, v, sinks=None):
        how = {"first_BS": first_BS, "window": window, "sinks_H": sinks}
        out, lse = attention_with_lse(q, k, v, scale=SCALE, backend=AttentionBackend.sdpa, **how)
        lses.append(lse)
        return out

    found = results(run, inputs, grad)
    for actual, expected in zip(found, results(operation(first_BS, window), inputs, grad), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    q, k, v, *_ = (x.detach().double().cpu() for x in inputs)
    _, lse = reference(q, k, v, first_BS if lengths is None else first_BS.cpu(), None, SCALE, window)
    bound = logit_bound(lses[0], inputs[3] if sinks else None).cpu().double()
    torch.testing.assert_close(bound, lse.amax((0, 2)), rtol=1e-4, atol=1e-4)


def test_whole_sequences_run_the_backend_and_a_window_over_all_keys_is_none(monkeypatch):
    seen = []
    monkeypatch.setattr(masked_attention, "causal_attention", lambda *_, **how: seen.append(how["backend"]))
    (q, k, v), _ = inputs_of((1, 8, 2, 2, 16, 16), torch.float32, "cpu")
    for window in (0, 8, 9):
        operation(None, window, AttentionBackend.padded_flash)(q, k, v)
    assert seen == [AttentionBackend.padded_flash] * 3
    assert operation(None, 7, AttentionBackend.padded_flash)(q, k, v).shape == (1, 8, 2, 16)


@pytest.mark.parametrize(
    "window, lengths, sinks", [(0, None, 1.0), (0, None, None), (5, None, None), (0, 9, None), (5, 9, 1.0)]
)
def test_operation_is_registered_as_torch_asks(window, lengths, sinks):
    inputs, _ = inputs_of((1, 20, 4, 2, 16, 8), torch.float32, "cpu", sinks)
    q, k, v, *sinks_H = inputs
    given = (q, k, v, first_keys(lengths, 1, 20), *(sinks_H or [None]), SCALE, window, "", False)
    opcheck(torch.ops.graphmoe.attention.default, given)


def test_compiled_matches_eager_bitwise():
    inputs, grad = inputs_of(SHAPES["mla"], torch.float32, "cpu", sinks=1.0)
    run = operation(first_keys(9, 1, 70), 7)
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, *(results(each, inputs, grad) for each in (run, compiled))))


def ahead_of_time_cases():
    from graphmoe.ops import attention_kernels as kernels

    def call(H, G, E, V, dtype=torch.bfloat16):
        sizes = ((H, E), (G, E), (G, V), (H, V))
        q, k, v, grad = (torch.empty(2, 4096, *size, dtype=dtype, device="meta") for size in sizes)
        first = torch.empty(2, 4096, dtype=torch.int32, device="meta")
        out, lse = kernels.forward(q, k, v, first, torch.empty(H, device="meta"), SCALE, 0)
        kernels.backward(grad, q, k, v, first, lse, kernels.deltas(grad, out), SCALE, 0)

    cases = []
    for is_rocm, targets in ((False, ("sm_90", "sm_100")), (True, ("gfx942", "gfx950"))):
        with mock.patch.object(kernels, "IS_ROCM", is_rocm):
            wide = [(16, 2, 256, 256, torch.float32)] * is_rocm
            for sizes in ((16, 16, 192, 128), (64, 8, 64, 64), *wide):
                found = launches_of(f"{sizes[2]} {targets[0]}", functools.partial(call, *sizes))
                cases += [case | {"only": targets} for case in found]
    return cases
