"""Attention on a GPU: values, the kernels that ran, determinism, capture, no sync."""

import functools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graphmoe.config.packages import VENDORS, is_installed
from graphmoe.config.schema import AttentionBackend
from graphmoe.ops.attention import choose_backend
from graphmoe.ops.masked_attention import attention, reference
from tests.gpu.sleeping import capture, syncs_are_errors
from tests.ops import test_attention as cases
from tests.ops import test_masked_attention as masked
from tests.ops.attention_fakes import reference_attention
from tests.ops.test_attention import assert_matches_reference, forward_and_gradients
from tests.tolerances import assert_forward_close, assert_gradient_close

IS_ROCM = torch.version.hip is not None
needs_cuda = pytest.mark.skipif(IS_ROCM, reason="names NVIDIA kernels")
MLA = (2, 512, 4, 4, 192, 128)
EQUAL = (2, 512, 4, 4, 128, 128)
GROUPED = (2, 512, 8, 2, 128, 128)
SHAPES = {  # name: (B, S, H, G, E, V)
    "mla": MLA,
    "equal": EQUAL,
    "grouped": GROUPED,
    "small mla": (2, 256, 4, 4, 48, 32),
    "mla of odd length": (1, 333, 4, 4, 192, 128),
    "odd length": (1, 333, 4, 4, 128, 128),
    "odd unequal head sizes": (1, 65, 3, 3, 21, 13),
    "grouped and unequal": (1, 128, 4, 2, 192, 128),
    "single token": (1, 1, 4, 4, 192, 128),
    "heads too large for flash": (1, 64, 2, 1, 320, 320),
}
SCALE = 0.1
make_inputs = functools.partial(cases.make_inputs, device="cuda")


def runner(backend):
    return functools.partial(attention, scale=SCALE, backend=backend)


def kernels_of(run, qkv, grad):
    forward_and_gradients(run, qkv, grad)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        forward_and_gradients(run, qkv, grad)
        torch.cuda.synchronize()
    names = {e.name for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA}
    assert names, "the profiler saw no kernel"
    return " ".join(sorted(names)).lower()


@pytest.mark.parametrize("backend", [b for b in AttentionBackend if b is not AttentionBackend.auto])
def test_every_backend_matches_the_fp64_reference_at_mla_heads(backend):
    package = VENDORS.get(backend.value)
    if package and not is_installed(package.module):
        pytest.skip(f"{package.module} is not installed")
    if backend is AttentionBackend.turbo and not IS_ROCM:
        pytest.skip("Primus-Turbo needs ROCm")
    assert_matches_reference(runner(backend), MLA, torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backend", [AttentionBackend.auto, AttentionBackend.padded_flash])
def test_torch_backends_run_any_shape_and_dtype(backend, shape, dtype):
    if backend is AttentionBackend.padded_flash and max(shape[-2:]) > 256:
        pytest.skip("choose_backend refuses it")
    how = {"groups": shape[2] != shape[3], "is_half": dtype is torch.bfloat16}
    chosen = choose_backend(backend, "cuda", *shape[-2:], **how)
    assert_matches_reference(runner(chosen), shape, dtype, "cuda")


@needs_cuda
@pytest.mark.parametrize("shape", [MLA, EQUAL, GROUPED], ids=["mla", "equal", "grouped"])
def test_cudnn_runs_heads_of_any_kind(shape):
    *qkv, grad = make_inputs(shape)
    names = kernels_of(runner(AttentionBackend.sdpa), qkv, grad)
    assert "cudnn" in names and "flash_fwd" not in names and "fmha_cutlass" not in names


@needs_cuda
def test_padded_flash_runs_flash_at_mla_heads():
    *qkv, grad = make_inputs(MLA)
    names = kernels_of(runner(AttentionBackend.padded_flash), qkv, grad)
    assert "flash_fwd" in names and "flash_bwd" in names and "cudnn" not in names


@needs_cuda
def test_fp32_runs_the_memory_efficient_kernel_also_with_grouped_heads():
    for shape in (MLA, GROUPED):
        *qkv, grad = make_inputs(shape, torch.float32)
        assert "fmha_cutlass" in kernels_of(runner(AttentionBackend.sdpa), qkv, grad)


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 2048, 8, 8, 192, 128), (2, 2048, 8, 2, 128, 128)], ids=["mla", "grouped"]
)
def test_deterministic_runs_are_bitwise_equal_and_leave_cudnn_out(shape, dtype, deterministic):
    *qkv, grad = make_inputs(shape, dtype)
    run = runner(AttentionBackend.sdpa)
    first = forward_and_gradients(run, qkv, grad)
    for _ in range(5):
        again = forward_and_gradients(run, qkv, grad)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    names = kernels_of(run, qkv, grad)
    assert "cudnn" not in names and ("flash_bwd" in names) == (dtype is torch.bfloat16)


@needs_cuda
@pytest.mark.parametrize("shape", [MLA, GROUPED], ids=["mla", "grouped"])
def test_compiled_without_graph_breaks_runs_the_same_kernel(shape):
    *qkv, grad = make_inputs(shape)
    compiled = torch.compile(runner(AttentionBackend.sdpa), fullgraph=True)
    assert "cudnn" in kernels_of(compiled, qkv, grad)
    out = compiled(*qkv)
    assert_forward_close(out, reference_attention(*qkv, scale=SCALE))


FAST = [
    AttentionBackend.sdpa,
    *(pytest.param(library, marks=pytest.mark.skipif(
        not is_installed(VENDORS[library.value].module), reason=f"{library.value} is not installed"))
      for library in (AttentionBackend.flash4, AttentionBackend.te)),
]  # fmt: skip


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("shape", [MLA, GROUPED], ids=["mla", "grouped"])
def test_a_captured_forward_and_backward_replays_on_new_inputs(shape, backend):
    *qkv, grad = make_inputs(shape)
    run = runner(backend)
    graph, captured = capture(lambda: forward_and_gradients(run, qkv, grad))
    with torch.no_grad():
        for x in qkv:
            x.mul_(0.5)
    graph.replay()
    assert torch.equal(captured[0], run(*qkv))
    exact = [x.detach().double().requires_grad_() for x in qkv]
    reference = functools.partial(reference_attention, scale=SCALE)
    for actual, wanted in zip(
        captured[1:], forward_and_gradients(reference, exact, grad.double())[1:], strict=True
    ):
        assert_gradient_close(actual, wanted)


@pytest.mark.parametrize(
    "window, sinks, lengths", [(0, False, 9), (100, True, 9), (0, True, None), (100, True, None)], ids=str
)
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("shape", [MLA, GROUPED], ids=["mla", "grouped"])
def test_captured_documents_windows_and_sinks_follow_new_inputs(shape, backend, window, sinks, lengths):
    *qkv, grad = make_inputs(shape)
    B, S, H = shape[:3]
    inputs = [*qkv, torch.randn(H, device="cuda", requires_grad=True)] if sinks else qkv
    first_BS = masked.first_keys(lengths, B, S).cuda() if lengths else None

    def run(q, k, v, sinks_H=None):
        how = {"first_BS": first_BS, "window": window, "sinks_H": sinks_H}
        return attention(q, k, v, scale=SCALE, backend=backend, **how)

    with syncs_are_errors():
        forward_and_gradients(run, inputs, grad)
    graph, captured = capture(lambda: forward_and_gradients(run, inputs, grad))
    with torch.no_grad():
        for x in inputs:
            x.mul_(0.5)
        if first_BS is not None:
            first_BS.copy_(masked.first_keys(90, B, S))
    graph.replay()
    again = forward_and_gradients(run, inputs, grad)
    if first_BS is not None:  # cuDNN's backward is not deterministic
        assert all(map(torch.equal, captured, again))
    assert torch.equal(captured[0], again[0])
    exact = [x.detach().double().requires_grad_() for x in inputs]
    documents = None if first_BS is None else first_BS.cpu()
    q, k, v, *sinks_H = (x.cpu() for x in exact)
    wanted, _ = reference(q, k, v, documents, *(sinks_H or [None]), SCALE, window)
    expected = torch.autograd.grad(wanted, exact, grad.double().cpu())
    assert_forward_close(captured[0].cpu(), wanted)
    for actual, of_exact in zip(captured[1:], expected, strict=True):
        assert_gradient_close(actual.bfloat16(), of_exact)
