"""Calls that ``suite=calibrate`` times for each rate of a projection: the project's operations at sizes of
training.

Suffixes: T tokens, R rows, I inner, O outer, D hidden, V vocabulary, E experts, B sequences, S their tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphmoe.bench.cases import route
from graphmoe.config.schema import AttentionBackend
from graphmoe.ops.attention import causal_attention, choose_backend
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends, random_inputs

Call = Callable[[], object]
Calls = dict[str, Call]
"""Timed calls by the rate that they give; a rate of several calls has them as ``rate/call``."""
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Heads:
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


@dataclass(frozen=True)
class CalibrateCase:
    """Operations at one size; each gives a rate one point."""

    name: str
    kind: float
    """The class and the size of `graphmoe.plan.costs.rates.CLASSES`; 0 for rates that have none."""
    size: float
    work: float
    """FLOPs or bytes of each call."""
    make: Callable[[torch.device], Calls]
    """Put the inputs in place and return the timed calls. *Raises* any error of a kernel or the allocator."""


def calibrate_cases(shapes: CalibrateShapes) -> list[CalibrateCase]:
    """All cases of one device by itself."""
    return [
        *_dense(shapes),
        *_experts(shapes),
        *_routers(shapes),
        *_attention(shapes),
        *_losses(shapes),
        CalibrateCase(
            "copy", 0, 0, 2 * shapes.copied_bytes, functools.partial(_copy_calls, shapes.copied_bytes)
        ),
    ]


def _dense(shapes: CalibrateShapes) -> Iterator[CalibrateCase]:
    for inner, outer in shapes.weights:
        for rows in shapes.rows:
            yield CalibrateCase(
                f"dense/{inner}x{outer}/{rows}",
                (inner * outer) ** 0.5,
                rows,
                2 * rows * inner * outer,
                functools.partial(_dense_calls, rows, inner, outer),
            )


def _dense_calls(rows: int, inner: int, outer: int, device: torch.device) -> Calls:
    normal = _normal(device)
    x_RI, weight_OI, dy_RO = normal(rows, inner), normal(outer, inner, scale=inner**-0.5), normal(rows, outer)
    total_OI = torch.zeros(outer, inner, device=device)
    return {
        "dense/forward": lambda: x_RI @ weight_OI.T,
        "dense/inputs": lambda: dy_RO @ weight_OI,
        "dense_weights": lambda: total_OI.copy_(dy_RO.T @ x_RI),
        "dense_weights_added": lambda: total_OI.add_(dy_RO.T @ x_RI),
    }


def _experts(shapes: CalibrateShapes) -> Iterator[CalibrateCase]:
    for shape in shapes.experts:
        yield CalibrateCase(
            f"grouped/{shape.D}x{shape.F}x{shape.E}/{shape.T}",
            shape.F,
            shape.T * shape.K / shape.E,
            3 * 2 * shape.T * shape.K * shape.D * shape.F,
            functools.partial(_experts_calls, shape),
        )


def _experts_calls(shape: MlpShape, device: torch.device) -> Calls:
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


def _routers(shapes: CalibrateShapes) -> Iterator[CalibrateCase]:
    for tokens, hidden, experts in shapes.routers:
        make = functools.partial(_router_calls, tokens, hidden, experts)
        flops = 2 * tokens * hidden * experts
        yield CalibrateCase(f"router/{hidden}x{experts}/{tokens}", experts, tokens, flops, make)


def _router_calls(tokens: int, hidden: int, experts: int, device: torch.device) -> Calls:
    normal = _normal(device)
    h_TD, gate_ED, dlogits_TE = (
        normal(*size).float() for size in ((tokens, hidden), (experts, hidden), (tokens, experts))
    )
    return {
        "router/forward": lambda: h_TD @ gate_ED.T,
        "router/inputs": lambda: dlogits_TE @ gate_ED,
        "router/weights": lambda: dlogits_TE.T @ h_TD,
    }


def _attention(shapes: CalibrateShapes) -> Iterator[CalibrateCase]:
    for heads in shapes.heads:
        sequences = max(shapes.attended // heads.S, 1)
        flops = 2 * sequences * heads.S * heads.H * (heads.E + heads.V) * heads.S / 2
        name = f"attention/{heads.H}x{heads.E}x{heads.V}/{heads.S}"
        make = functools.partial(_attention_calls, heads, sequences)
        yield CalibrateCase(name, heads.E, heads.S, flops, make)


def _attention_calls(heads: Heads, sequences: int, device: torch.device) -> Calls:
    normal, (B, S) = _normal(device), (sequences, heads.S)
    leaves = [
        normal(B, S, *size).requires_grad_()
        for size in ((heads.H, heads.E), (heads.G, heads.E), (heads.G, heads.V))
    ]
    backend = choose_backend(
        AttentionBackend.auto,
        device_type=device.type,
        is_rocm=torch.version.hip is not None,
        head_dim=heads.E,
        v_head_dim=heads.V,
    )

    def forward() -> Tensor:
        return causal_attention(*leaves, scale=heads.E**-0.5, backend=backend)

    out_BSHV = forward()
    dout_BSHV = torch.randn_like(out_BSHV)
    return {
        "attention_forward": forward,
        "attention_backward": lambda: torch.autograd.grad(out_BSHV, leaves, dout_BSHV, retain_graph=True),
    }


def _losses(shapes: CalibrateShapes) -> Iterator[CalibrateCase]:
    for tokens, hidden, vocabulary in shapes.losses:
        make = functools.partial(_loss_calls, tokens, hidden, vocabulary)
        flops = 3 * 2 * tokens * hidden * vocabulary
        yield CalibrateCase(f"head/{hidden}x{vocabulary}/{tokens}", hidden, tokens, flops, make)


def _loss_calls(tokens: int, hidden: int, vocabulary: int, device: torch.device) -> Calls:
    """The forward, which makes both gradients."""
    from graphmoe.ops import linear_cross_entropy  # noqa: F401  # registers the op

    normal = _normal(device)
    h_TD, w_VD = normal(tokens, hidden), normal(vocabulary, hidden, scale=hidden**-0.5)
    labels_T = torch.randint(vocabulary, (tokens,), device=device)
    op = torch.ops.graphmoe.linear_cross_entropy
    return {"head": lambda: op(h_TD, w_VD, labels_T, -100, 0.0, tokens, 0, True)}


def _copy_calls(num_bytes: int, device: torch.device) -> Calls:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"hbm": lambda: target.copy_(source)}


def _normal(device: torch.device) -> Callable[..., Tensor]:
    """Random numbers in bf16, of the same seed in every case."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(scale).to(BF16)

    return normal


def names_of(calls: Sequence[str]) -> list[str]:
    """The rates of a case, each once."""
    return list(dict.fromkeys(name.partition("/")[0] for name in calls))
