"""Stand-ins for libraries' causal attention: called as recorded, computed in fp64 from what they save."""

from typing import Any

import torch
from torch import Tensor

from graphmoe.config.schema import AttentionBackend
from tests.vendor_api import bind, install_module, recorded_signature

Calls = list[dict[str, Any]]
HALF = (torch.bfloat16, torch.float16)


def reference_attention(
    q_BSHE: torch.Tensor, k_BSGE: torch.Tensor, v_BSGV: torch.Tensor, *, scale: float, causal: bool = True
) -> torch.Tensor:
    """Return attention [B, S, H, V] in fp64, with the softmax written out."""
    q, k, v = (x.double() for x in (q_BSHE, k_BSGE, v_BSGV))
    weights_BHST = _scores(q, k, scale, 0, causal=causal)
    weights_BHST = (weights_BHST - weights_BHST.amax(-1, keepdim=True)).exp()
    weights_BHST = weights_BHST / weights_BHST.sum(-1, keepdim=True)
    return torch.einsum("bhst,bthv->bshv", weights_BHST, _of_heads(v, q))


def forward(call: dict[str, Any], scale: float, window: int = 0) -> tuple[Tensor, Tensor]:
    """Return out and the fp32 log-sum-exp [B, H, S]."""
    q, k, v = (call[name] for name in "qkv")
    assert q.dtype == k.dtype == v.dtype and q.dtype in HALF, (q.dtype, k.dtype, v.dtype)
    assert q.shape[:2] == k.shape[:2] == v.shape[:2] and k.shape[2] == v.shape[2]
    assert q.shape[2] % k.shape[2] == 0 and q.shape[3] == k.shape[3]
    assert all(x.shape[-1] % 8 == 0 and x.stride(-1) == 1 for x in (q, k, v))
    scores = _scores(q.double(), k.double(), scale, window)
    out = torch.einsum("bhst,bthv->bshv", scores.softmax(-1), _of_heads(v.double(), q))
    return out.to(q.dtype), scores.logsumexp(-1).float()


def backward(
    call: dict[str, Any], out: Tensor, d_out: Tensor, lse: Tensor, scale: float, window: int = 0
) -> list[Tensor]:
    """Return dq, dk and dv: FlashAttention-2 (arXiv 2307.08691), algorithm 2."""
    q, k, v, out, d_out = (x.double() for x in (*(call[name] for name in "qkv"), out, d_out))
    groups = q.shape[2] // k.shape[2]
    share = (_scores(q, k, scale, window) - lse.double().unsqueeze(-1)).exp()
    d_share = torch.einsum("bshv,bthv->bhst", d_out, _of_heads(v, q))
    d_score = share * (d_share - (d_out * out).sum(-1).transpose(1, 2).unsqueeze(-1)) * scale
    dq = torch.einsum("bhst,bthe->bshe", d_score, _of_heads(k, q))
    pairs = (d_score, q), (share, d_out)
    dk, dv = (torch.einsum("bhst,bshe->bthe", *p).unflatten(2, (-1, groups)).sum(3) for p in pairs)
    return [x.to(call["q"].dtype) for x in (dq, dk, dv)]


def _scores(q: Tensor, k: Tensor, scale: float, window: int, *, causal: bool = True) -> Tensor:
    by_head = torch.einsum("bshe,bthe->bhst", q, _of_heads(k, q)) * scale
    if not causal:
        return by_head
    every = torch.ones_like(by_head, dtype=torch.bool)
    unseen = every.triu(1) | every.tril(-window) if window else every.triu(1)
    return by_head.masked_fill(unseen, -torch.inf)


def _of_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[2] // x.shape[2], 2)


def install_flash4(monkeypatch: Any) -> Calls:
    path, calls = "flash_attn.cute.interface", []
    names = "_flash_attn_fwd", "_flash_attn_bwd"
    signatures = [recorded_signature("flash_attn_4", f"{path}.{name}") for name in names]

    def checked(signature: Any, args: Any, kwargs: Any) -> tuple[dict[str, Any], float]:
        call = bind(signature, args, kwargs)
        assert call["causal"] and call["softcap"] in (None, 0.0) and call["window_size_left"] is None
        return call, call["softmax_scale"]

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call, scale = checked(signatures[0], args, kwargs)
        assert call["return_lse"]
        return *forward(call, scale), None, None, None

    def back(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call, scale = checked(signatures[1], args, kwargs)
        calls.append(call)
        return tuple(backward(call, call["out"], call["dout"], call["lse"], scale))

    install_module(monkeypatch, path, **dict(zip(names, (run, back), strict=True)))
    return calls


def install_te(monkeypatch: Any) -> Calls:
    path, calls, seeds = "transformer_engine.pytorch.cpp_extensions.fused_attn", [], torch.tensor([3, 4])
    names = "fused_attn_fwd", "fused_attn_bwd"
    signatures = [recorded_signature("transformer_engine", f"{path}.{name}") for name in names]

    def checked(signature: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        call = bind(signature, args, kwargs)
        B, S = call["q"].shape[:2]
        for of in ("q", "kv"):
            assert call[f"max_seqlen_{of}"] == S
            assert call[f"cu_seqlens_{of}"].equal(torch.arange(B + 1, dtype=torch.int32) * S)
        layouts = [value for name, value in call.items() if name.endswith("_layout")]
        formats = [value for name, value in call.items() if name.endswith(("o_format", "do_format"))]
        assert {*layouts} == {"bshd_bshd_bshd"} and {*formats} == {"bshd"}
        assert call["fused_attention_backend"] == 1 and call["fake_dtype"] == call["q"].dtype
        assert call["attn_mask_type"] == "causal" and call["window_size"][1] == 0
        assert call["softmax_type"] == "vanilla" and call["dropout"] == 0 and not call["cuda_graph"]
        assert all(call[name].is_contiguous() for name in "qkv")
        return call

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = checked(signatures[0], args, kwargs)
        out, lse = forward(call, call["attn_scale"], call["window_size"][0] + 1)
        assert call["is_training"]
        return out, [lse.unsqueeze(-1), seeds.clone()]

    def back(*args: Any, **kwargs: Any) -> list[Any]:
        call = checked(signatures[1], args, kwargs)
        calls.append(call)
        lse, of_dropout = call["aux_ctx_tensors"]
        assert lse.shape[-1] == 1 and of_dropout.equal(seeds)
        assert call["o"].is_contiguous() and call["d_o"].is_contiguous()
        how = call["attn_scale"], call["window_size"][0] + 1
        gradients = backward(call, call["o"], call["d_o"], lse.squeeze(-1), *how)
        return [*gradients, None, None]

    kinds = {"F16_arbitrary_seqlen": 1}
    functions = dict(zip(names, (run, back), strict=True))
    install_module(monkeypatch, path, FusedAttnBackend=kinds, **functions)
    return calls


def install_turbo(monkeypatch: Any) -> Calls:
    path, calls, seeds = (
        "primus_turbo.pytorch.kernels.attention.attention_aiter_impl",
        [],
        torch.tensor([5, 6]),
    )
    names = "attention_aiter_forward_impl", "attention_aiter_backward_impl"
    signatures = [recorded_signature("primus_turbo", f"{path}.{name}") for name in names]

    def checked(signature: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        call = bind(signature, args, kwargs)
        for name in "qkv":
            batch, seq, head, element = call[name].stride()
            assert element == 1 and batch >= seq >= head, name
        assert call["qkv_format"] == "bshd" and call["causal"] and call["dropout_p"] == 0
        assert call["window_size_right"] == (-1 if call["window_size_left"] == -1 else 0)
        assert call["bias"] is call["alibi_slopes"] is call["sink"] is None
        return call

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = checked(signatures[0], args, kwargs)
        assert call["return_lse"] and not call["return_softmax"]
        window = call["window_size_left"] + 1
        return *forward(call, call["softmax_scale"], window), torch.empty(0), seeds.clone()

    def back(*args: Any, **kwargs: Any) -> None:
        call = checked(signatures[1], args, kwargs)
        calls.append(call)
        assert call["rng_state"].equal(seeds)
        how = call["softmax_lse"], call["softmax_scale"], call["window_size_left"] + 1
        found = backward(call, call["out"], call["dout"], *how)
        for name, gradient in zip("qkv", found, strict=True):
            call[f"d{name}"].copy_(gradient)

    install_module(monkeypatch, path, **dict(zip(names, (run, back), strict=True)))
    return calls


FAKES = {
    AttentionBackend.flash4: install_flash4,
    AttentionBackend.te: install_te,
    AttentionBackend.turbo: install_turbo,
}
