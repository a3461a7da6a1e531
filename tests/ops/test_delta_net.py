"""The gated delta rule: kernels and reference against the recurrence in fp64, with gradients by autograd."""

import functools
import math
from unittest import mock

import pytest
import torch
from torch.library import opcheck

from graphmoe.ops import delta_net as package
from graphmoe.ops.delta_net import delta_net, reference
from graphmoe.ops.short_conv import unit_norm
from tests.gpu.sleeping import capture, syncs_are_errors
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import BACKENDS, CUDA, INTERPRETING, device_of
from tests.ops.test_masked_attention import first_keys
from tests.tolerances import assert_forward_close, assert_gradient_close

SHAPES = {  # name: (B, S, H, V, K, W)
    "one": (2, 1, 1, 2, 16, 16),
    "almost a chunk": (1, 63, 2, 2, 16, 32),
    "a chunk": (1, 64, 1, 1, 64, 64),
    "a chunk and one": (2, 65, 1, 3, 32, 16),
    "chunks": (2, 200, 2, 4, 16, 64),
    "large heads": (1, 200, 1, 1, 128, 128),
}
LENGTHS = {"none": None, "ones": 1, "whole": 10_000, "mixed": 9, "long": 100}
DECAYS = {"none": (0.0, 0.0), "weak": (-0.1, 0.0), "strong": (-20.0, -19.0), "both": (-20.0, 0.0)}
LARGE = (2, 4096, 16, 32, 128, 128)


def inputs_of(shape, decays, dtype, device, alike=0.0):
    """Inputs with unit keys and queries, and d_out; ``alike`` is how much of a key is the same in all."""
    B, S, H, V, K, W = shape
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(B, S, *heads, generator=generator) for heads in 2 * [(H, K)] + 2 * [(V, W)])
    q, k = (unit_norm(x + alike * torch.ones(K)) for x in (q, k))
    # a decay of "both" is strong or weak
    least, most = decays
    share = torch.rand(B, S, V, generator=generator)
    g = most + (least - most) * (share if most - least <= 1 else share.gt(0.8) * share)
    beta = torch.rand(B, S, V, generator=generator)
    half = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
    wide = torch.promote_types(dtype, torch.float32)
    return [*half, *(x.to(device, wide).requires_grad_() for x in (g, beta))], grad.to(device, dtype)


def written_out(q, k, v, g, beta, first_BS):
    copies = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(copies, dim=2) for x in (q, k))
    state, results = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]), []
    for i in range(v.shape[1]):
        state = torch.exp(g[:, i])[..., None, None] * state
        if first_BS is not None:
            state = state * (first_BS[:, i] < i)[:, None, None, None]
        error = v[:, i] - (state.mT @ k[:, i, ..., None])[..., 0]
        state = state + k[:, i, ..., None] * (beta[:, i, ..., None] * error)[..., None, :]
        results.append((state.mT @ q[:, i, ..., None])[..., 0])
    return torch.stack(results, 1) / math.sqrt(k.shape[-1])


def results(run, inputs, grad, first_BS):
    out = run(*inputs, first_BS)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def assert_matches_fp64(shape, lengths, decays, dtype, device, alike=0.0):
    inputs, grad = inputs_of(shape, decays, dtype, device, alike)
    first_BS = first_keys(lengths, *shape[:2])
    first_BS = None if first_BS is None else first_BS.to(device)
    out, *gradients = results(delta_net, inputs, grad, first_BS)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted, *wanted_gradients = results(written_out, exact, grad.double(), first_BS)
    assert_forward_close(out, wanted)
    for x, actual, expected in zip(inputs, gradients, wanted_gradients, strict=True):
        assert actual.dtype == x.dtype and actual.is_contiguous()
        # in bf16, gradients in fp32 are of rounded products too
        assert_gradient_close(actual.to(dtype), expected, terms=float(grad.norm()))


CASES = [
    (shape, [*LENGTHS][(number + 2 * of_decay) % 5], decays)
    for number, shape in enumerate(SHAPES)
    for of_decay, decays in enumerate(DECAYS)
]


@pytest.mark.parametrize("shape, lengths, decays", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients_match_fp64(backend, shape, lengths, decays, kernels_run):
    assert_matches_fp64(
        SHAPES[shape], LENGTHS[lengths], DECAYS[decays], torch.float32, device_of(backend)
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_are_alike_lose_no_bits(backend, kernels_run):
    """The powers of the matrix that a chunk inverts grow to 1e18 here, and the inverse to 1."""
    assert_matches_fp64((1, 128, 1, 1, 16, 16), None, (0.0, 0.0), torch.float32, device_of(backend), 30.0)


@pytest.fixture
def kernels_run(monkeypatch):
    """Kernels run CPU tensors in the interpreter."""
    if INTERPRETING:
        monkeypatch.setattr(package, "has_kernel", lambda x: True)


@pytest.mark.parametrize("decays", DECAYS.values(), ids=DECAYS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("device", [CUDA])
def test_kernels_match_fp64_in_bf16(device, lengths, decays):
    for size in (64, 128):
        assert_matches_fp64((2, 300, 2, 4, size, size), lengths, decays, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("device", [CUDA])
def test_the_heads_of_qwen3_next_match_fp64(device, dtype):
    inputs, grad = inputs_of(LARGE, DECAYS["weak"], dtype, device)
    first_BS = first_keys(1000, *LARGE[:2]).to(device)
    found = results(delta_net, inputs, grad, first_BS)
    own = [torch.tensor(heads, device=device) for heads in ([0, 15], [0, 1, 30, 31])]
    heads = [*2 * [own[0]], *3 * [own[1]]]
    exact = [x.detach().double()[:, :, of_x] for x, of_x in zip(inputs, heads, strict=True)]
    assert_forward_close(found[0][:, :, own[1]], reference.forward(*exact, first_BS))
    wanted = reference.backward(grad.double()[:, :, own[1]], *exact, first_BS)
    for actual, expected, of_x in zip(found[1:], wanted, heads, strict=True):
        assert_gradient_close(actual[:, :, of_x].to(dtype), expected)


@pytest.mark.parametrize("device", [CUDA])
def test_a_captured_call_does_not_wait_and_follows_new_inputs(device):
    inputs, grad = inputs_of((2, 1000, 4, 8, 128, 128), DECAYS["both"], torch.bfloat16, device)
    first_BS = first_keys(9, 2, 1000).to(device)
    call = functools.partial(results, delta_net, inputs, grad, first_BS)
    call()
    with syncs_are_errors():
        call()
    graph, captured = capture(call)
    with torch.no_grad():
        for x in inputs:
            x.mul_(0.5)
        first_BS.copy_(first_keys(90, 2, 1000))
    graph.replay()
    assert all(map(torch.equal, captured, call()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_that_is_not_finite_reaches_the_result(backend, kernels_run):
    for place in range(5):
        inputs, grad = inputs_of((1, 70, 1, 2, 16, 16), DECAYS["weak"], torch.float32, device_of(backend))
        for value in (math.nan, math.inf):
            with torch.no_grad():
                inputs[place][:, 3] = value
            out, *gradients = results(delta_net, inputs, grad, None)
            assert not out[:, 3].isfinite().any() and not all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_one_projection_give_the_same_bits(backend, kernels_run):
    B, S, H, V, K, W = 2, 70, 1, 2, 16, 32
    inputs, _ = inputs_of((B, S, H, V, K, W), DECAYS["weak"], torch.float32, device_of(backend))
    joined = torch.cat([x.detach().flatten(2) for x in inputs[:3]], -1)
    q, k, v = joined.split([H * K, H * K, V * W], -1)
    views = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (V, W))
    assert torch.equal(delta_net(*views, *inputs[3:], None), delta_net(*inputs, None))


@pytest.mark.parametrize("lengths", [None, 9])
def test_operation_is_registered_as_torch_asks(lengths):
    inputs, _ = inputs_of((2, 10, 1, 2, 16, 16), DECAYS["weak"], torch.float32, "cpu")
    opcheck(torch.ops.graphmoe.delta_net.default, (*inputs, first_keys(lengths, 2, 10)))


def ahead_of_time_cases():
    from graphmoe.ops.delta_net import launches

    def call(H, V, size, dtype=torch.bfloat16):
        heads = (H, size), (H, size), (V, size), (V, size)
        q, k, v, grad = (torch.empty(2, 4096, *each, dtype=dtype, device="meta") for each in heads)
        g, beta = (torch.empty(2, 4096, V, device="meta") for _ in range(2))
        first = torch.empty(2, 4096, dtype=torch.int32, device="meta")
        launches.forward(q, k, v, g, beta, first)
        launches.backward(grad, q, k, v, g, beta, first)

    cases = []
    for is_rocm, targets in ((False, ("sm_90", "sm_100")), (True, ("gfx942", "gfx950"))):
        with mock.patch.object(launches, "IS_ROCM", is_rocm):
            wide = [(16, 32, 128, torch.float32)] * is_rocm
            for sizes in ((16, 32, 128), (8, 8, 64), *wide):
                found = launches_of("", functools.partial(call, *sizes))
                for number, case in enumerate(found):
                    name = f"{case['name']} {number} {sizes[2:]} {targets[0]}"
                    cases.append(case | {"name": name, "only": targets})
    return cases
