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
from graphmoe.ops import attention, flash4
from graphmoe.ops.attention import causal_attention, choose_backend, kernel_order
from tests.runs import config
from tests.tolerances import assert_forward_close, assert_gradient_close
from tests.vendor_api import bind, install_module, recorded_signature

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


def reference_attention(
    q_BSHE: torch.Tensor, k_BSGE: torch.Tensor, v_BSGV: torch.Tensor, *, scale: float, causal: bool = True
) -> torch.Tensor:
    """Return attention [B, S, H, V] in fp64, with the softmax written out."""
    q, k, v = (x.double() for x in (q_BSHE, k_BSGE, v_BSGV))
    group_of_head = torch.arange(q.shape[2], device=q.device) // (q.shape[2] // k.shape[2])
    k, v = k[:, :, group_of_head], v[:, :, group_of_head]
    logits_BHST = scale * torch.einsum("bshe,bthe->bhst", q, k)
    if causal:
        future_ST = torch.ones(logits_BHST.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits_BHST = logits_BHST.masked_fill(future_ST, float("-inf"))
    weights_BHST = (logits_BHST - logits_BHST.amax(-1, keepdim=True)).exp()
    weights_BHST = weights_BHST / weights_BHST.sum(-1, keepdim=True)
    return torch.einsum("bhst,bthv->bshv", weights_BHST, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backend", [SDPA, PADDED])
def test_value_and_gradients_match_the_fp64_reference(backend, shape, dtype):
    run = functools.partial(causal_attention, scale=SCALE, backend=backend)
    assert_matches_reference(run, shape, dtype)


@pytest.mark.parametrize(("shape", "dynamic"), [(SHAPES["small mla"], False), (SHAPES["grouped"], True)])
def test_compiled_without_graph_breaks_matches_eager_bitwise(shape, dynamic):
    *qkv, grad = make_inputs(shape, torch.float32)
    run = functools.partial(causal_attention, scale=SCALE, backend=SDPA)
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
    (FLASH4, ROCM, (128, 128), "auto, sdpa, padded_flash, turbo, te"),
    (FLASH4, CUDA, (48, 32), "auto, sdpa, padded_flash, te"),
    (FLASH4, CUDA | {"groups": True}, (192, 128), "auto, sdpa, padded_flash, te"),
    (TURBO, CUDA, (128, 128), "auto, sdpa, padded_flash, flash4, te"),
    (PADDED, CUDA, (320, 128), "auto, sdpa, te"),
    (PADDED, ROCM, (128, 264), "auto, sdpa, turbo, te"),
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


# Vendors' attention over the reference: a fake takes the calls that the recorded signature takes, in the
# vendor's own layout and with its own defaults, and refuses what the vendor refuses.

FLASH_ATTN_FUNC = recorded_signature("primus_turbo", "primus_turbo.pytorch.ops.flash_attn_func")
TE_CLASS = "transformer_engine.pytorch.DotProductAttention"
TE_INIT = recorded_signature("transformer_engine", TE_CLASS, "__init__")
TE_FORWARD = recorded_signature("transformer_engine", TE_CLASS, "forward")


@pytest.fixture
def turbo(monkeypatch):
    """Calls of ``flash_attn_func`` of Primus-Turbo with all their arguments."""
    calls: list[dict[str, Any]] = []

    def flash_attn_func(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = bind(FLASH_ATTN_FUNC, args, kwargs)
        calls.append(call)
        layouts = {_turbo_layout(call[name]) for name in "qkv"}
        assert len(layouts) == 1, f"q, k and v differ in layout: {layouts}"
        assert call["dropout_p"] == 0.0 and call["window_size"] == (-1, -1)
        assert not call["return_lse"] and not call["return_attn_probs"]
        qkv = call["q"], call["k"], call["v"]
        return attended(*qkv, call["softmax_scale"], call["causal"], (torch.bfloat16, torch.float16))

    install_module(monkeypatch, "primus_turbo.pytorch.ops", flash_attn_func=flash_attn_func)
    return calls


def _turbo_layout(x_BSHE: torch.Tensor) -> str:
    batch, seq, head, element = x_BSHE.stride()
    assert element == 1, "the head size must be contiguous"
    if batch >= seq >= head:
        return "bshd"
    return "sbhd" if seq >= batch >= head else "bhsd"


class FakeDotProductAttention(torch.nn.Module):
    """``DotProductAttention`` of Transformer Engine; ``built`` keeps the constructor's arguments."""

    built: list[dict[str, Any]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.settings = bind(TE_INIT, args, kwargs)
        self.built.append(self.settings)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call, built = bind(TE_FORWARD, args, kwargs), self.settings
        axes = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3)}[call["qkv_format"] or built["qkv_format"]]
        q, k, v = (call[name].permute(axes) for name in ("query_layer", "key_layer", "value_layer"))
        channels, heads = built["kv_channels"], built["num_attention_heads"]
        assert (channels if isinstance(channels, tuple) else (channels,) * 2) == (q.shape[-1], v.shape[-1])
        assert (q.shape[2], k.shape[2]) == (heads, built["num_gqa_groups"] or heads)
        assert built["attention_dropout"] == 0.0 and built["softmax_type"] == "vanilla"
        causal = {"causal": True, "no_mask": False}[call["attn_mask_type"] or built["attn_mask_type"]]
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        return attended(q, k, v, built["softmax_scale"], causal, dtypes).permute(axes).flatten(-2)


def attended(q, k, v, scale, causal, dtypes):
    assert q.dtype == k.dtype == v.dtype and q.dtype in dtypes, (q.dtype, k.dtype, v.dtype)
    assert q.ndim == k.ndim == v.ndim == 4
    assert q.shape[:2] == k.shape[:2] == v.shape[:2], (q.shape, k.shape, v.shape)
    assert k.shape[2] == v.shape[2] and q.shape[2] % k.shape[2] == 0 and q.shape[3] == k.shape[3]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return reference_attention(q, k, v, scale=scale, causal=causal).to(q.dtype)


FLASH4_FORWARD, FLASH4_BACKWARD = (
    recorded_signature("flash_attn_4", f"flash_attn.cute.interface.{name}")
    for name in ("_flash_attn_fwd", "_flash_attn_bwd")
)


@pytest.fixture
def fa4(monkeypatch):
    """Backward calls of FlashAttention-4 with all their arguments."""
    calls: list[dict[str, Any]] = []

    def checked(signature, args, kwargs):
        call = bind(signature, args, kwargs)
        assert call["causal"] and call["softcap"] in (None, 0.0) and call["window_size_left"] is None
        assert all(call[name].stride(-1) == 1 and call[name].shape[-1] % 8 == 0 for name in "qkv")
        return call, [call[name].double() for name in "qkv"]

    def scores(q, k, scale):
        by_head = torch.einsum("bshe,bthe->bhst", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
        return by_head.masked_fill(torch.ones_like(by_head, dtype=torch.bool).triu(1), -torch.inf)

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call, (q, k, _) = checked(FLASH4_FORWARD, args, kwargs)
        assert call["return_lse"]
        scale, qkv = call["softmax_scale"], (call["q"], call["k"], call["v"])
        out = attended(*qkv, scale, True, (torch.bfloat16, torch.float16))
        return out, scores(q, k, scale).logsumexp(-1).float(), None, None, None

    def backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        # FlashAttention-2 (arXiv 2307.08691), algorithm 2: from the saved output and log-sum-exp
        call, (q, k, v) = checked(FLASH4_BACKWARD, args, kwargs)
        calls.append(call)
        out, d_out, scale = call["out"].double(), call["dout"].double(), call["softmax_scale"]
        groups = q.shape[2] // k.shape[2]
        share = (scores(q, k, scale) - call["lse"].double().unsqueeze(-1)).exp()
        d_share = torch.einsum("bshv,bthv->bhst", d_out, v.repeat_interleave(groups, 2))
        d_score = share * (d_share - (d_out * out).sum(-1).transpose(1, 2).unsqueeze(-1)) * scale
        dq = torch.einsum("bhst,bthe->bshe", d_score, k.repeat_interleave(groups, 2))
        dk, dv = (
            torch.einsum("bhst,bshe->bthe", *pair).unflatten(2, (-1, groups)).sum(3)
            for pair in ((d_score, q), (share, d_out))
        )
        return tuple(x.to(call["q"].dtype) for x in (dq, dk, dv))

    names = {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward}
    install_module(monkeypatch, "flash_attn.cute.interface", **names)
    flash4._interface.cache_clear()
    yield calls
    flash4._interface.cache_clear()


FLASH4_SHAPES = {name: shape for name, shape in SHAPES.items() if not (shape[4] % 8 or shape[5] % 8)}


@pytest.mark.parametrize("shape", FLASH4_SHAPES.values(), ids=FLASH4_SHAPES)
def test_flash4_matches_the_fp64_reference_eager_and_compiled(shape, fa4):
    run = functools.partial(causal_attention, scale=SCALE, backend=FLASH4)
    assert_matches_reference(run, shape, torch.bfloat16)
    *qkv, grad = make_inputs(shape, torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, *(forward_and_gradients(each, qkv, grad) for each in (run, compiled))))
    torch.use_deterministic_algorithms(True)
    forward_and_gradients(run, qkv, grad)
    assert [call["deterministic"] for call in fa4] == [False, False, False, True]


def test_flash4_of_parts_of_a_tensor_needs_no_copy_but_of_transposed_heads(fa4):
    B, S, H, G, E, V = SHAPES["small mla"]
    together = torch.randn(B, S, H, E + V, dtype=torch.bfloat16)
    k, v = together.split([E, V], dim=-1)
    q = torch.randn(B, S, E, H, dtype=torch.bfloat16).transpose(2, 3)
    out = causal_attention(q, k, v, scale=SCALE, backend=FLASH4)
    assert_forward_close(out, reference_attention(q, k, v, scale=SCALE))


def test_flash4_keeps_compiled_kernels_only_in_a_folder_of_ones_own(fa4, monkeypatch):
    enabled = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    monkeypatch.delenv(enabled, raising=False)
    for folder, wanted in ((None, None), ("work", "1")):
        if folder:
            monkeypatch.setenv(flash4.CACHE_FOLDER, folder)
        flash4._interface.cache_clear()
        flash4._interface()
        assert os.environ.get(enabled) == wanted
    monkeypatch.delenv(enabled)


@pytest.fixture
def te(monkeypatch):
    """Arguments of the modules of Transformer Engine that are built."""
    monkeypatch.setattr(FakeDotProductAttention, "built", [])
    install_module(monkeypatch, "transformer_engine.pytorch", DotProductAttention=FakeDotProductAttention)
    attention._te_module.cache_clear()
    yield FakeDotProductAttention.built
    attention._te_module.cache_clear()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backend", [TURBO, TE])
def test_adapter_matches_the_fp64_reference_through_the_recorded_signature(backend, shape, turbo, te):
    run = functools.partial(causal_attention, scale=SCALE, backend=backend)
    assert_matches_reference(run, shape, torch.bfloat16)
    assert (len(turbo), len(te)) == ((1, 0) if backend is TURBO else (0, 1))


def test_turbo_gets_one_layout_even_from_tensors_that_lie_in_memory_differently(turbo):
    q, k, v, _ = make_inputs(SHAPES["grouped"], torch.bfloat16)
    lies_bhsd = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    lies_sbhd = k.detach().transpose(0, 1).contiguous().transpose(0, 1)
    out = causal_attention(lies_bhsd, lies_sbhd, v, scale=SCALE, backend=TURBO)
    assert_forward_close(out, reference_attention(q, k, v, scale=SCALE))


@pytest.mark.parametrize("backend", [TURBO, FLASH4])
def test_half_precision_kernels_refuse_fp32_by_key_and_value(backend, turbo, fa4):
    q, k, v, _ = make_inputs(SHAPES["mla"], torch.float32)
    said = f"model.attention_backend={backend.value} .*float32.*precision.compute=bf16"
    with pytest.raises(ConfigError, match=said):
        causal_attention(q, k, v, scale=SCALE, backend=backend)


def test_adapters_pass_on_that_determinism_is_asked_for(turbo, te):
    q, k, v, _ = make_inputs(SHAPES["grouped"], torch.bfloat16)
    for asked in (True, False):
        torch.use_deterministic_algorithms(asked)
        for backend in (TURBO, TE):
            causal_attention(q, k, v, scale=SCALE, backend=backend)
    assert [call["deterministic"] for call in turbo] == [True, False]
    assert len(te) == 2  # the module reads the switch when it is built, so each state has its own
