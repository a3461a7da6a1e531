"""The gated delta rule by flash-linear-attention, the package fla-core, as an operation with a gradient.

Suffixes as in the package. The functions behind its autograd function are called, since the public one breaks
a graph. Documents are refused: it counts their chunks on the host, so that its sizes are not static.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from graphmoe.config.packages import is_installed, require_package, version_of
from graphmoe.config.schema import ConfigError, DeltaNetBackend
from graphmoe.ops import register_gradient, require_half

KEY = "model.delta_net_backend"
CHUNK = 64


def check_delta_net(requested: DeltaNetBackend, device_type: str) -> None:
    """Raise ConfigError if the device or its packages cannot run the backend."""
    if requested is DeltaNetBackend.auto:
        return
    if device_type != "cuda":
        raise ConfigError(f"{KEY}={requested} needs a GPU and the device is {device_type}; use {KEY}=auto")
    if requested is DeltaNetBackend.fla:
        require_package(KEY, "fla", f"{KEY}=auto or triton")
        found = TorchVersion(version_of("triton") or "0")
        on_hopper = torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9
        # fla-core 0.6.0 raises in the backward: such kernels return wrong values (its issue 640)
        if on_hopper and "3.4" <= found < "3.7.1" and not is_installed("tilelang"):
            raise ConfigError(
                f"{KEY}=fla refuses triton {found} on Hopper, since its backward is wrong there; install "
                f"triton 3.7.1 or tilelang, or use {KEY}=auto or triton"
            )


@functools.cache
def _kernels() -> Any:
    require_package(KEY, "fla", f"{KEY}=auto or triton")
    from fla.ops.gated_delta_rule import chunk  # type: ignore[import-not-found]

    return chunk


@torch.library.custom_op("graphmoe::fla_delta_net", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return out as `delta_net`, sums of g within chunks, fp32 [B, S, V], and inverses [B, S, V, CHUNK]."""
    sums, out, inverse, *_ = _kernels().chunk_gated_delta_rule_fwd(
        **_by_name(q=q, k=k, v=v, g=g, beta=beta), scale=q.shape[-1] ** -0.5, initial_state=None,
        output_final_state=False, chunk_size=CHUNK,
    )  # fmt: skip
    return out.to(v.dtype), sums, inverse


@torch.library.custom_op("graphmoe::fla_delta_net_backward", mutates_args=())
def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, sums: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, d_beta, dg, *_ = _kernels().chunk_gated_delta_rule_bwd(
        **_by_name(q=q, k=k, v=v, g=sums, beta=beta, A=inverse, do=d_out), scale=q.shape[-1] ** -0.5,
        initial_state=None, dht=None, chunk_size=CHUNK,
    )  # fmt: skip
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg.to(sums.dtype), d_beta.to(beta.dtype)


def _by_name(**tensors: Tensor) -> dict[str, Tensor]:
    return {name: x.contiguous() for name, x in tensors.items()}


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), g.new_empty(g.shape), k.new_empty(*g.shape, CHUNK)


_backward.register_fake(
    lambda d_out, *given: tuple(given[i].new_empty(given[i].shape) for i in (0, 1, 2, 4, 3))
)
register_gradient(_forward, _backward, lambda inputs, output: (*inputs[:3], inputs[4], *output[1:]))


def delta_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None) -> Tensor:
    """Return what `graphmoe.ops.delta_net.delta_net` does: g and beta are fp32, the others bf16 or fp16."""
    assert first is None and g.dtype == beta.dtype == torch.float32, (first, g.dtype, beta.dtype)
    require_half(KEY, "fla", q.dtype)
    return _forward(q, k, v, g, beta)[0]
