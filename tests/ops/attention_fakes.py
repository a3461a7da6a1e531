"""Vendor attention with recorded signatures over the fp64 reference.

A fake takes exactly the calls that the recorded signature takes, in the vendor's own layout and with
the vendor's own defaults, and refuses dtypes, layouts and sizes that the vendor refuses.
"""

from typing import Any

import torch

from tests.ops.attention_cases import reference_attention
from tests.vendor_api import bind, recorded_signature

FLASH_ATTN_FUNC = recorded_signature("primus_turbo", "primus_turbo.pytorch.ops.flash_attn_func")
TE_CLASS = "transformer_engine.pytorch.DotProductAttention"
TE_INIT = recorded_signature("transformer_engine", TE_CLASS, "__init__")
TE_FORWARD = recorded_signature("transformer_engine", TE_CLASS, "forward")


class FakeTurbo:
    """``flash_attn_func`` of Primus-Turbo; ``calls`` keeps the bound arguments."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def flash_attn_func(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = bind(FLASH_ATTN_FUNC, args, kwargs)
        self.calls.append(call)
        q, k, v = call["q"], call["k"], call["v"]
        _check_sizes(q, k, v, (torch.bfloat16, torch.float16))
        layouts = {_turbo_layout(x) for x in (q, k, v)}
        assert len(layouts) == 1, f"q, k and v differ in layout: {layouts}"
        assert call["dropout_p"] == 0.0 and call["window_size"] == (-1, -1)
        assert not call["return_lse"] and not call["return_attn_probs"]
        scale = q.shape[-1] ** -0.5 if call["softmax_scale"] is None else call["softmax_scale"]
        return reference_attention(q, k, v, scale=scale, causal=call["causal"]).to(q.dtype)


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
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.built.append(self.settings)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call, built = bind(TE_FORWARD, args, kwargs), self.settings
        layout = call["qkv_format"] or built["qkv_format"]
        axes = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3)}[layout]
        q, k, v = (call[name].permute(axes) for name in ("query_layer", "key_layer", "value_layer"))
        _check_sizes(q, k, v, (torch.bfloat16, torch.float16, torch.float32))
        channels = built["kv_channels"]
        assert (channels if isinstance(channels, tuple) else (channels,) * 2) == (q.shape[-1], v.shape[-1])
        assert q.shape[2] == built["num_attention_heads"]
        assert k.shape[2] == (built["num_gqa_groups"] or built["num_attention_heads"])
        assert built["attention_dropout"] == 0.0 and built["softmax_type"] == "vanilla"
        mask = call["attn_mask_type"] or built["attn_mask_type"]
        scale = q.shape[-1] ** -0.5 if built["softmax_scale"] is None else built["softmax_scale"]
        out = reference_attention(q, k, v, scale=scale, causal={"causal": True, "no_mask": False}[mask])
        return out.to(q.dtype).permute(axes).flatten(-2)


def _check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    assert q.dtype == k.dtype == v.dtype and q.dtype in dtypes, (q.dtype, k.dtype, v.dtype)
    assert q.ndim == k.ndim == v.ndim == 4
    assert q.shape[:2] == k.shape[:2] == v.shape[:2], (q.shape, k.shape, v.shape)
    assert k.shape[2] == v.shape[2] and q.shape[2] % k.shape[2] == 0 and q.shape[3] == k.shape[3]
