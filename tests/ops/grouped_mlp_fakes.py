"""Vendor grouped products with recorded signatures over a loop in fp64.

A fake takes the recorded calls alone and refuses what the vendor refuses or misreads; dead rows are NaN.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

import torch

from tests.vendor_api import FOLDER, bind, install_module, recorded_signature

GROUPED_GEMM = recorded_signature("primus_turbo", "primus_turbo.pytorch.ops.grouped_gemm")
VARIABLE_K_MODULE = "primus_turbo.pytorch.kernels.grouped_gemm.grouped_gemm_impl"
VARIABLE_K = recorded_signature("primus_turbo", f"{VARIABLE_K_MODULE}.grouped_gemm_variable_k_impl")
GROUPED_GEMM_FP8 = recorded_signature("primus_turbo", "primus_turbo.pytorch.ops.grouped_gemm_fp8")
CLASSES = json.loads((FOLDER / "primus_turbo.json").read_text())["classes"]
ENUM = CLASSES["primus_turbo.pytorch.core.backend.BackendType"]
BACKENDS = [name for name, _, _ in ENUM["fields"]]
PRECISION_MODULE = "primus_turbo.pytorch.core.low_precision"
PRECISION = {
    name: enum.Enum(name, [field for field, _, _ in CLASSES[f"{PRECISION_MODULE}.{name}"]["fields"]])
    for name in ("Format", "ScalingGranularity", "ScaleDtype")
}
BLOCKS = {  # granularity: block_size and scale_dtype that it takes, blocks of rows, and of weights [N, C]
    "ROWWISE": (None, "FP32", (1, 1 << 30), (1, 1 << 30)),
    "TENSORWISE": (None, "FP32", None, None),
    "BLOCKWISE": (128, "FP32", (1, 128), (128, 128)),
    "MX_BLOCKWISE": (32, "E8M0", (1, 32), (32, 32)),
}
TE_CLASS = "transformer_engine.pytorch.GroupedLinear"
TE_INIT = recorded_signature("transformer_engine", TE_CLASS, "__init__")
TE_FORWARD = recorded_signature("transformer_engine", TE_CLASS, "forward")
TE_MODULE = "transformer_engine.pytorch.module.grouped_linear"
TE_SUPPORTED = recorded_signature(
    "transformer_engine", f"{TE_MODULE}.is_module_grouped_tensor_path_supported"
)
TE_GEMMS = "transformer_engine.pytorch.cpp_extensions"
TE_GEMM = recorded_signature("transformer_engine", f"{TE_GEMMS}.gemm.general_grouped_gemm")
HALF = (torch.bfloat16, torch.float16)


def install_turbo(monkeypatch: Any) -> FakeTurbo:
    fake, backends = FakeTurbo(), enum.Enum("BackendType", BACKENDS)
    install_module(monkeypatch, VARIABLE_K_MODULE, grouped_gemm_variable_k_impl=fake.variable_k)
    install_module(monkeypatch, "primus_turbo.pytorch.core.backend", BackendType=backends)
    fields = CLASSES[f"{PRECISION_MODULE}.Float8QuantConfig"]["fields"]
    config = dataclasses.make_dataclass("Float8QuantConfig", [(name, Any, None) for name, _, _ in fields])
    install_module(monkeypatch, PRECISION_MODULE, Float8QuantConfig=config, **PRECISION)
    functions = {"grouped_gemm": fake.grouped_gemm, "grouped_gemm_fp8": fake.grouped_gemm_fp8}
    install_module(monkeypatch, "primus_turbo.pytorch.ops", **functions)
    return fake


def install_te(monkeypatch: Any, supported: bool = True) -> None:
    def is_supported(*args: Any, **kwargs: Any) -> bool:
        call = bind(TE_SUPPORTED, args, kwargs)
        assert call["recipe"] is None and call["dtype"] in HALF
        return supported

    FakeGroupedLinear.built = []
    install_module(monkeypatch, TE_GEMMS, general_grouped_gemm=general_grouped_gemm)
    # The deepest first: each call puts new parents in place.
    install_module(monkeypatch, TE_MODULE, is_module_grouped_tensor_path_supported=is_supported)
    install_module(monkeypatch, "transformer_engine.pytorch", GroupedLinear=FakeGroupedLinear)


class FakeTurbo:
    """``grouped_gemm``, in 8 bits too, and its weight gradient; ``calls`` keeps the bound arguments."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def grouped_gemm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = self._bound(GROUPED_GEMM, args, kwargs)
        a, b, lens = call["a"], call["b"], call["group_lens"]
        assert b.ndim == 3 and b.is_contiguous() and len(b) == len(lens) and b.dtype == a.dtype
        assert a.shape[1] == b.shape[2 if call["trans_b"] else 1], (a.shape, b.shape)
        assert call["fuse_bgrad_accum_pattern"] is None
        return product(a, b.mT if call["trans_b"] else b, lens)

    def grouped_gemm_fp8(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Multiply what plain rounding to e4m3 leaves; dead rows must be zeros."""
        call = self._bound(GROUPED_GEMM_FP8, args, kwargs)
        a, b, lens, config = (call[name] for name in ("a", "b", "group_lens", "config"))
        assert b.ndim == 3 and b.is_contiguous() and len(b) == len(lens) and b.dtype == a.dtype
        assert not a[int(lens.sum()) :].any() and not torch.is_grad_enabled()
        size, scale, of_a, of_b = BLOCKS[config.granularity.name]
        assert (config.block_size, config.scale_dtype) == (size, PRECISION["ScaleDtype"][scale])
        assert config.format is config.strategy is call["out_dtype"] is None  # which is to leave them out
        assert call["trans_b"] or config.granularity.name != "MX_BLOCKWISE"
        w_ENC = b if call["trans_b"] else b.mT
        return product(in_8_bits(a, of_a), in_8_bits(w_ENC, of_b).mT, lens).to(a.dtype)

    def variable_k(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = self._bound(VARIABLE_K, args, kwargs)
        a, b = call["a"], call["b"]
        assert b.ndim == 2 and b.is_contiguous() and len(b) == len(a) and b.dtype == a.dtype
        assert call["trans_a"] and not call["trans_b"], "the only layout that it takes"
        assert call["default_backend"] == 1 + BACKENDS.index("TRITON")
        left, right = (b, a) if call["trans_c"] else (a, b)
        return outer_products(left, right, call["group_lens"])

    def _bound(self, signature: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        call = bind(signature, args, kwargs)
        self.calls.append(call)
        a, lens, offsets = call["a"], call["group_lens"], call["group_offs"]
        assert a.ndim == 2 and a.is_contiguous() and a.dtype in HALF, (a.shape, a.stride(), a.dtype)
        assert lens.dtype == offsets.dtype == torch.int64 and lens.ndim == 1, (lens.dtype, offsets.dtype)
        assert offsets.tolist() == [0, *lens.cumsum(0).tolist()] and offsets[-1] <= len(a)
        assert call["num_cu"] is None and call.get("schedule", "static") == "static"
        return call


class FakeGroupedLinear(torch.nn.Module):
    """``GroupedLinear`` of Transformer Engine on its path with counts on the device."""

    built: list[dict[str, Any]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.settings = bind(TE_INIT, args, kwargs)
        self.built.append(self.settings)
        assert not self.settings["bias"] and self.settings["use_grouped_tensor"] is True
        assert not self.settings["single_grouped_weight"] and self.settings["tp_size"] == 1
        assert not self.settings["fuse_wgrad_accumulation"] and not self.settings["delay_wgrad_compute"]
        size = (self.settings["out_features"], self.settings["in_features"])
        placed = {"device": self.settings["device"], "dtype": self.settings["params_dtype"]}
        for expert in range(self.settings["num_gemms"]):
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(torch.empty(size, **placed)))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call, built = bind(TE_FORWARD, args, kwargs), self.settings
        x, counts = call["inp"], call["m_splits"]
        assert isinstance(counts, torch.Tensor) and counts.dtype == torch.int64 and counts.device == x.device
        assert counts.shape == (built["num_gemms"],) and int(counts.sum()) <= len(x)
        assert x.ndim == 2 and x.dtype == built["params_dtype"] and x.dtype in HALF
        assert call["is_first_microbatch"] is None and call["out"] is None and call["dgrad_out"] is None
        weights = [getattr(self, f"weight{expert}") for expert in range(built["num_gemms"])]
        size = (built["out_features"], built["in_features"])
        for weight in weights:
            assert weight.shape == size and weight.dtype == x.dtype and weight.device == x.device
            assert weight.is_contiguous()
        return _Linear.apply(x, counts, *weights)


def general_grouped_gemm(*args: Any, **kwargs: Any) -> None:
    """GEMMs of column-major BLAS: T is the transpose of a row-major matrix for A, and itself for B."""
    call = bind(TE_GEMM, args, kwargs)
    counts, layout = call["m_splits"], call["layout"]
    assert all(type(count) is int for count in counts) and call["quantization_params"] == [None] * len(counts)
    assert len(call["A"]) == len(call["B"]) == len(counts) and call["out_dtype"] in HALF
    assert not (call["gelu"] or call["accumulate"] or call["use_bias"] or call["D_dtype"])
    (single,) = call["out"] if call["single_output"] else (None,)
    outs = call["out"] if single is None else single[: sum(counts)].split(counts)
    if single is not None:
        single[sum(counts) :] = torch.nan
    for a, b, out in zip(call["A"], call["B"], outs, strict=True):
        assert a.is_contiguous() and b.is_contiguous() and out.is_contiguous()
        assert a.dtype == b.dtype == out.dtype == call["out_dtype"]
        a, b = a.double(), b.double()
        out.copy_((b.mT if layout[1] == "T" else b) @ (a.mT if layout[0] == "T" else a))


class _Linear(torch.autograd.Function):
    """One node, as there: it has to record inside a custom op, where single operations do not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, counts)
        assert not x.requires_grad, "the gradient of rows is a forward of its own"
        return product(x, torch.stack(weights).mT, counts)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, counts = ctx.saved_tensors
        assert dy.is_contiguous()
        return None, None, *outer_products(dy, x, counts)


def in_8_bits(x: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """Values of x [..., R, C] in e4m3 with a scale for each block, or one for all; in fp64."""
    if block is None:
        return in_8_bits(x.reshape(1, -1), (1, x.numel())).view(x.shape)
    R, C = x.shape[-2:]
    height, width = min(block[0], R), min(block[1], C)
    padded = torch.nn.functional.pad(x.double(), (0, -C % width, 0, -R % height))
    blocks = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    scale = blocks.abs().amax((-3, -1), keepdim=True).clamp(min=1e-12) / 448
    values = (blocks / scale).to(torch.float8_e4m3fn).double() * scale
    return values.flatten(-2).flatten(-3, -2)[..., :R, :C]


def product(a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``a[r] @ b[e(r)]``, computed in fp64; NaN in dead rows."""
    parts = a.double().split([*counts.tolist(), len(a) - int(counts.sum())])
    results = [rows @ w for rows, w in zip(parts, b.double(), strict=False)]
    dead = parts[-1].new_full((len(parts[-1]), b.shape[2]), float("nan"))
    return torch.cat([*results, dead]).to(a.dtype)


def outer_products(left: torch.Tensor, right: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``left[rows of e].T @ right[rows of e]``, computed in fp64."""
    parts = (side[: int(counts.sum())].double().split(counts.tolist()) for side in (left, right))
    return torch.stack([one.T @ other for one, other in zip(*parts, strict=True)]).to(left.dtype)
