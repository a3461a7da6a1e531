"""Calls that ``suite=calibrate`` times for each rate of a projection: the project's operations at sizes of
training.

Suffixes: T tokens, R rows, I inner, O outer, D hidden, V vocabulary, E experts, B sequences, S their tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.bench.cases import route
from graphmoe.config.schema import AttentionBackend
from graphmoe.ops.attention import causal_attention, choose_backend
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends, random_inputs

Calls = dict[str, Callable[[], object]]
"""Timed calls by the rate that they give; a rate of several calls has them as ``rate/call``."""


class Heads(NamedTuple):
    """Heads of queries and of keys, sizes of a query's and a value's, and tokens of a sequence."""

    H: int
    G: int
    E: int
    V: int
    S: int


@dataclass(frozen=True)
class CalibrateShapes:
    """All sizes of a suite."""

    rows: tuple[int, ...]
    """Rows of dense products."""
    weights: tuple[tuple[int, int], ...]
    """Sides of dense weights."""
    experts: tuple[MlpShape, ...]
    routers: tuple[tuple[int, int, int], ...]
    """Tokens, hidden size and experts."""
    heads: tuple[Heads, ...]
    attended: int
    """Tokens of all sequences that attention has at once, at least one sequence."""
    losses: tuple[tuple[int, int, int], ...]
    """Tokens, hidden size and vocabulary."""
    copied_bytes: int


LITE = MlpShape(16384, 2048, 1408, 64, 6)
QWEN = MlpShape(16384, 2048, 768, 128, 8)
FULL = CalibrateShapes(
    rows=(512, 2048, 4096, 16384),
    weights=((2048, 576), (512, 4096), (2048, 2048), (2048, 5632), (4096, 4096), (7168, 12288)),
    experts=(
        *(replace(LITE, T=tokens) for tokens in (512, 4096, 16384)),
        *(replace(QWEN, T=tokens) for tokens in (4096, 16384)),
        MlpShape(4096, 7168, 2048, 32, 8),
    ),
    routers=((512, 2048, 64), (4096, 2048, 64), (16384, 2048, 64), (4096, 2048, 128), (4096, 7168, 256)),
    heads=(
        *(Heads(16, 16, 192, 128, tokens) for tokens in (512, 2048, 4096)),
        *(Heads(32, 4, 128, 128, tokens) for tokens in (1024, 4096, 8192)),
    ),
    attended=8192,
    losses=((512, 2048, 102400), (4096, 2048, 102400), (16384, 2048, 102400)),
    copied_bytes=2**31,
)
"""Around layers of DeepSeek-V2-Lite, Qwen3-30B-A3B and an eighth of the experts of DeepSeek-V3."""
TINY = CalibrateShapes(
    rows=(32, 64),
    weights=((16, 32),),
    experts=(MlpShape(64, 32, 16, 8, 2),),
    routers=((64, 32, 8),),
    heads=(Heads(2, 2, 24, 16, 32),),
    attended=64,
    losses=((64, 32, 128),),
    copied_bytes=2**16,
)
"""Large enough to run every line, small enough for a CPU."""


class CalibrateCase(NamedTuple):
    """Operations at one size; each gives a rate one point."""

    name: str
    kind: float
    """The class and the size of `graphmoe.plan.costs.rates.CLASSES`; 0 for rates that have none."""
    size: float
    work: float
    """FLOPs or bytes of each call."""
    make: Callable[[torch.device], Calls]
    """Put the inputs in place and return the timed calls. *Raises* any error of a kernel or the allocator."""


def calibrate_cases(shapes: CalibrateShapes) -> Iterator[CalibrateCase]:
    """All cases of one device by itself."""
    for inner, outer in shapes.weights:
        for rows in shapes.rows:
            name, make = f"dense/{inner}x{outer}/{rows}", functools.partial(_dense, rows, inner, outer)
            yield CalibrateCase(name, (inner * outer) ** 0.5, rows, 2 * rows * inner * outer, make)
    for mlp in shapes.experts:
        name, make = f"grouped/{mlp.D}x{mlp.F}x{mlp.E}/{mlp.T}", functools.partial(_experts, mlp)
        slots = mlp.T * mlp.K
        yield CalibrateCase(name, mlp.F, slots / mlp.E, 3 * 2 * slots * mlp.D * mlp.F, make)
    for T, D, E in shapes.routers:
        make = functools.partial(_router, T, D, E)
        yield CalibrateCase(f"router/{D}x{E}/{T}", E, T, 2 * T * D * E, make)
    for heads in shapes.heads:
        sequences = max(shapes.attended // heads.S, 1)
        flops = 2 * sequences * heads.S * heads.H * (heads.E + heads.V) * heads.S / 2
        name = f"attention/{heads.H}x{heads.E}x{heads.V}/{heads.S}"
        yield CalibrateCase(name, heads.E, heads.S, flops, functools.partial(_attention, heads, sequences))
    for T, D, V in shapes.losses:
        make = functools.partial(_loss, T, D, V)
        yield CalibrateCase(f"head/{D}x{V}/{T}", D, T, 3 * 2 * T * D * V, make)
    copied = shapes.copied_bytes
    yield CalibrateCase("copy", 0, 0, 2 * copied, functools.partial(_copy, copied))


def _dense(rows: int, inner: int, outer: int, device: torch.device) -> Calls:
    normal = _normal(device)
    x_RI, weight_OI, dy_RO = normal(rows, inner), normal(outer, inner, scale=inner**-0.5), normal(rows, outer)
    total_OI = torch.zeros(outer, inner, device=device)
    return {
        "dense/forward": lambda: x_RI @ weight_OI.T,
        "dense/inputs": lambda: dy_RO @ weight_OI,
        "dense_weights": lambda: total_OI.copy_(dy_RO.T @ x_RI),
        "dense_weights_added": lambda: total_OI.add_(dy_RO.T @ x_RI),
    }


def _experts(shape: MlpShape, device: torch.device) -> Calls:
    """With the backends that ``moe.experts=auto`` takes, on a natural routing."""
    generator = torch.Generator(device).manual_seed(0)
    routing, weight_TK = route(shape.T, shape.E, shape.K, generator, device)
    backends = choose_backends("auto", shape, device, None)
    inputs = {
        direction: random_inputs(direction, shape, weight_TK, routing.plan, generator)
        for direction in ("forward", "dgrad", "wgrad")
    }
    sizes = (shape.E, 2 * shape.F, shape.D), (shape.E, shape.D, shape.F)
    totals = [torch.zeros(size, device=device) for size in sizes]
    return {
        "grouped/forward": lambda: call_op("forward", *inputs["forward"], backends),
        "grouped/inputs": lambda: call_op("dgrad", *inputs["dgrad"], backends),
        "grouped_weights": lambda: call_op("wgrad_into", *inputs["wgrad"], *totals, backends, False),
        "grouped_weights_added": lambda: call_op("wgrad_into", *inputs["wgrad"], *totals, backends, True),
    }


def _router(tokens: int, hidden: int, experts: int, device: torch.device) -> Calls:
    normal = _normal(device)
    h_TD, gate_ED, dlogits_TE = (
        normal(*size).float() for size in ((tokens, hidden), (experts, hidden), (tokens, experts))
    )
    return {
        "router/forward": lambda: h_TD @ gate_ED.T,
        "router/inputs": lambda: dlogits_TE @ gate_ED,
        "router/weights": lambda: dlogits_TE.T @ h_TD,
    }


def _attention(heads: Heads, sequences: int, device: torch.device) -> Calls:
    normal, (H, G, E, V, S) = _normal(device), heads
    leaves = [normal(sequences, S, *size).requires_grad_() for size in ((H, E), (G, E), (G, V))]
    backend = choose_backend(
        AttentionBackend.auto,
        device_type=device.type,
        is_rocm=torch.version.hip is not None,
        head_dim=E,
        v_head_dim=V,
    )

    def forward() -> Tensor:
        return causal_attention(*leaves, scale=E**-0.5, backend=backend)

    out_BSHV = forward()
    dout_BSHV = torch.randn_like(out_BSHV)
    return {
        "attention_forward": forward,
        "attention_backward": lambda: torch.autograd.grad(out_BSHV, leaves, dout_BSHV, retain_graph=True),
    }


def _loss(tokens: int, hidden: int, vocabulary: int, device: torch.device) -> Calls:
    """The forward, which makes both gradients."""
    from graphmoe.ops import linear_cross_entropy  # noqa: F401  # registers the op

    normal = _normal(device)
    h_TD, w_VD = normal(tokens, hidden), normal(vocabulary, hidden, scale=hidden**-0.5)
    labels_T = torch.randint(vocabulary, (tokens,), device=device)
    op = torch.ops.graphmoe.linear_cross_entropy
    return {"head": lambda: op(h_TD, w_VD, labels_T, -100, 0.0, tokens, 0, True)}


def _copy(num_bytes: int, device: torch.device) -> Calls:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"hbm": lambda: target.copy_(source)}


def _normal(device: torch.device) -> Callable[..., Tensor]:
    """Random numbers in bf16, of the same seed in every case."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(scale).bfloat16()

    return normal
