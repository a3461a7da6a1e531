"""Attention on the CPU: values, gradients, the choice of a backend, and the vendor adapters."""

import functools
import os
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from graphmoe.config import packages
from graphmoe.config.schema import AttentionBackend, ConfigError
from graphmoe.model.attention import check_backend
from graphmoe.ops import attention, library_attention
from graphmoe.ops.attention import choose_backend, kernel_order
from graphmoe.ops.masked_attention import attention as attend
from graphmoe.ops.masked_attention import attention_with_lse, reference
from tests.ops.attention_fakes import FAKES, reference_attention
from tests.runs import config
from tests.tolerances import assert_forward_close, assert_gradient_close

SHAPES = {  # name: (B, S, H, G, E, V)
    "mla": (2, 33, 2, 2, 192, 128),
    "small mla": (1, 64, 4, 4, 48, 32),
    "value heads larger": (1, 17, 2, 2, 16, 24),
    "grouped": (2, 31, 8, 2, 64, 64),
    "grouped and unequal": (1, 19, 6, 3, 24, 16),
    "one key-value head": (1, 40, 4, 1, 32, 32),
    "odd head size": (1, 13, 3, 3, 20, 20),
    "odd unequal head sizes": (1, 13, 3, 3, 21, 13),
    "single token": (2, 1, 4, 2, 32, 32),
    "single token, unequal": (2, 1, 2, 2, 48, 32),
}
SCALE = 0.21  # not 1/sqrt(E) of any shape: YaRN changes it, so a backend that ignores it must fail
AUTO, SDPA, PADDED = AttentionBackend.auto, AttentionBackend.sdpa, AttentionBackend.padded_flash
TURBO, TE, FLASH4 = AttentionBackend.turbo, AttentionBackend.te, AttentionBackend.flash4
FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
DTYPES = (torch.float32, torch.bfloat16)
CPU, CUDA, ROCM = (
    {"device_type": device, "is_rocm": is_rocm}
    for device, is_rocm in (("cpu", False), ("cuda", False), ("cuda", True))
)


def make_inputs(shape, dtype=torch.bfloat16, device="cpu"):
    """Return q, k, v that require gradients, and the gradient of the output."""
    B, S, H, G, E, V = shape
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((B, S, H, E), (B, S, G, E), (B, S, G, V), (B, S, H, V))
    q, k, v, grad = (torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def forward_and_gradients(run, qkv, grad):
    out = run(*qkv)
    return [out, *torch.autograd.grad(out, qkv, grad)]


def assert_matches_reference(run, shape, dtype, device="cpu"):
    """Compare output and gradients of ``run``, a partial with a scale, with the fp64 reference."""
    *qkv, grad = make_inputs(shape, dtype, device)
    out, *gradients = forward_and_gradients(run, qkv, grad)
    reference = functools.partial(reference_attention, scale=run.keywords["scale"])
    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected, *expected_gradients = forward_and_gradients(reference, exact, grad.double())
    assert out.dtype == dtype
    assert_forward_close(out, expected)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert actual.dtype == dtype
        assert_gradient_close(actual, wanted, terms=float(grad.norm()))  # one token: dq = dk = 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backend", [SDPA, PADDED])
def test_value_and_gradients_match_the_fp64_reference(backend, shape, dtype):
    run = functools.partial(attend, scale=SCALE, backend=backend)
    assert_matches_reference(run, shape, dtype)


@pytest.mark.parametrize(("shape", "dynamic"), [(SHAPES["small mla"], False), (SHAPES["grouped"], True)])
def test_compiled_without_graph_breaks_matches_eager_bitwise(shape, dynamic):
    *qkv, grad = make_inputs(shape, torch.float32)
    run = functools.partial(attend, scale=SCALE, backend=SDPA)
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert all(map(torch.equal, *(forward_and_gradients(each, qkv, grad) for each in (run, compiled))))


@pytest.mark.parametrize("deterministic, first", [(False, CUDNN), (True, FLASH)])
def test_kernel_order_begins_with_the_fast_kernel_and_ends_with_one_that_always_runs(deterministic, first):
    order = kernel_order(deterministic=deterministic)
    assert order[0] is first and order[-1] is SDPBackend.MATH
    assert (CUDNN in order) == (first is CUDNN)


@pytest.fixture(autouse=True)
def all_packages(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda package: True)


CHOICES = [  # requested, where, sizes of heads, the backend or the ones that the error lists
    (AUTO, CPU, (192, 128), SDPA),
    (AUTO, CPU, (64, 64), SDPA),
    (AUTO, CUDA, (192, 128), SDPA),
    (AUTO, CUDA, (128, 128), SDPA),
    (AUTO, ROCM, (192, 128), PADDED),
    (AUTO, ROCM, (128, 128), SDPA),
    (AUTO, ROCM, (320, 128), SDPA),
    (SDPA, CPU, (192, 128), SDPA),
    (SDPA, ROCM, (192, 128), SDPA),
    (PADDED, CUDA, (192, 128), PADDED),
    (PADDED, ROCM, (256, 256), PADDED),
    (TURBO, ROCM, (192, 128), TURBO),
    (TE, CUDA, (192, 128), TE),
    (TE, CUDA, (128, 128), TE),
    (PADDED, CPU, (192, 128), "auto, sdpa"),
    (TURBO, CPU, (128, 128), "auto, sdpa"),
    (TE, CPU, (128, 128), "auto, sdpa"),
    (FLASH4, CUDA, (192, 128), FLASH4),
    (FLASH4, CPU, (128, 128), "auto, sdpa"),
    (FLASH4, ROCM, (128, 128), "auto, sdpa, padded_flash, turbo"),
    (TE, ROCM, (128, 128), "auto, sdpa, padded_flash, turbo"),
    (FLASH4, CUDA, (48, 32), "auto, sdpa, padded_flash, te"),
    (FLASH4, CUDA | {"groups": True}, (192, 128), "auto, sdpa, padded_flash, te"),
    (TURBO, CUDA, (128, 128), "auto, sdpa, padded_flash, flash4, te"),
    (PADDED, CUDA, (320, 128), "auto, sdpa, te"),
    (PADDED, ROCM, (128, 264), "auto, sdpa, turbo"),
]


@pytest.mark.parametrize("requested, machine, sizes, result", CHOICES)
def test_auto_is_resolved_and_what_cannot_work_is_refused_with_what_can(requested, machine, sizes, result):
    choose = functools.partial(choose_backend, requested, head_dim=sizes[0], v_head_dim=sizes[1], **machine)
    if isinstance(result, AttentionBackend):
        assert choose() is result
        return
    said = f"model.attention_backend={requested.value} .*; use one of: {result}$"
    with pytest.raises(ConfigError, match=said):
        choose()


@pytest.mark.parametrize("capability, is_half, sizes, result", [
    ((9, 0), True, (192, 128), FLASH4),
    ((9, 0), False, (192, 128), SDPA),
    ((9, 0), True, (48, 32), SDPA),
    ((10, 0), True, (192, 128), SDPA),
])  # fmt: skip
def test_auto_runs_flash4_where_it_was_measured(capability, is_half, sizes, result, monkeypatch):
    monkeypatch.setattr(attention, "is_installed", lambda package: package == "flash_attn.cute")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    attention._has_flash4.cache_clear()
    assert choose_backend(AUTO, "cuda", *sizes, is_half=is_half, is_rocm=False) is result
    attention._has_flash4.cache_clear()


def test_heads_too_large_for_flash_are_logged_once(caplog):
    attention.warn_of_slow_heads.cache_clear()
    model = config("model.head_dim=320", "model.attention=gqa", "model.num_kv_heads=2").model
    for ring in (False, True):  # as a run asks before it starts
        check_backend(model, "cuda", ring=ring)
        assert "heads of 320 run slower kernels" in caplog.text
        caplog.clear()
        attention.warn_of_slow_heads.cache_clear()
    for given in [(SDPA, "cpu", 320), (SDPA, "cuda", 256), (TE, "cuda", 320), *3 * [(SDPA, "cuda", 320)]]:
        attention.warn_of_slow_heads(*given)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "heads of 320 run slower kernels" in record.message
    attention.warn_of_slow_heads.cache_clear()


@pytest.mark.parametrize("requested, machine", [(TURBO, ROCM), (TE, CUDA), (FLASH4, CUDA)])
def test_a_missing_package_is_an_error_that_names_the_install_command(requested, machine, monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda package: False)
    with pytest.raises(ConfigError, match="model.attention_backend=.* pip install"):
        choose_backend(requested, **machine, head_dim=128, v_head_dim=128)


@pytest.fixture
def libraries(monkeypatch):
    """Calls of stand-ins for the libraries' backwards, with all arguments."""
    calls: dict[AttentionBackend, list[dict[str, Any]]] = {}
    for backend, install in FAKES.items():
        calls[backend] = install(monkeypatch)
    library_attention._flash4.cache_clear()
    yield calls
    library_attention._flash4.cache_clear()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backend", FAKES)
def test_libraries_match_the_fp64_reference_eager_and_compiled(backend, shape, libraries):
    run = functools.partial(attend, scale=SCALE, backend=backend)
    assert_matches_reference(run, shape, torch.bfloat16)
    *qkv, grad = make_inputs(shape, torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, *(forward_and_gradients(each, qkv, grad) for each in (run, compiled))))
    torch.use_deterministic_algorithms(True)
    forward_and_gradients(run, qkv, grad)
    assert [call["deterministic"] for call in libraries[backend]] == [False, False, False, True]
    assert not any(calls for other, calls in libraries.items() if other is not backend)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("backend", FAKES)
def test_libraries_take_sinks_and_windows_that_they_have(backend, window, libraries):
    *qkv, grad = make_inputs(SHAPES["grouped"], torch.bfloat16)
    sinks_H = torch.linspace(-20, 20, grad.shape[2]).requires_grad_()
    run = functools.partial(attend, scale=SCALE, backend=backend, window=window, sinks_H=sinks_H)
    out = run(*qkv)
    found = torch.autograd.grad(out, [*qkv, sinks_H], grad)
    exact = [x.detach().double().requires_grad_() for x in (*qkv, sinks_H)]
    wanted, _ = reference(*exact[:3], None, exact[3], SCALE, window)
    assert_forward_close(out, wanted)
    expected = torch.autograd.grad(wanted, exact, grad.double())
    for actual, of_exact in zip(found, expected, strict=True):
        assert_gradient_close(actual.bfloat16(), of_exact, terms=float(grad.norm()))  # of rounded results
    assert len(libraries[backend]) == (backend is not AttentionBackend.flash4 or not window)


@pytest.mark.parametrize("backend", FAKES)
def test_libraries_take_parts_of_a_tensor_and_transposed_heads(backend, libraries):
    B, S, H, G, E, V = SHAPES["small mla"]
    k, v = torch.randn(B, S, H, E + V, dtype=torch.bfloat16).split([E, V], dim=-1)
    q = torch.randn(B, S, E, H, dtype=torch.bfloat16).transpose(2, 3)
    by_sequence = k.transpose(0, 1).contiguous().transpose(0, 1)
    for keys in (k, by_sequence):
        out = attend(q, keys, v, scale=SCALE, backend=backend)
        assert_forward_close(out, reference_attention(q, keys, v, scale=SCALE))
        same, lse = attention_with_lse(q, keys, v, scale=SCALE, backend=backend)
        _, wanted = reference(q.double(), keys.double(), v.double(), None, None, SCALE, 0)
        assert torch.equal(same, out)
        torch.testing.assert_close(lse.double(), wanted, rtol=1e-3, atol=1e-3)


def test_flash4_keeps_compiled_kernels_only_in_a_folder_of_ones_own(libraries, monkeypatch):
    enabled = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    monkeypatch.delenv(enabled, raising=False)
    for folder, wanted in ((None, None), ("work", "1")):
        if folder:
            monkeypatch.setenv(library_attention.CACHE_FOLDER, folder)
        library_attention._flash4.cache_clear()
        library_attention._flash4()
        assert os.environ.get(enabled) == wanted
    monkeypatch.delenv(enabled)


@pytest.mark.parametrize("backend", FAKES)
def test_half_precision_kernels_refuse_fp32_by_key_and_value(backend):
    q, k, v, _ = make_inputs(SHAPES["mla"], torch.float32)
    said = f"model.attention_backend={backend.value} .*float32.*precision.compute=bf16"
    with pytest.raises(ConfigError, match=said):
        attend(q, k, v, scale=SCALE, backend=backend)
