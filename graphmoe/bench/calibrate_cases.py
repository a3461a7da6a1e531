"""Calls that ``suite=calibrate`` times for each rate of a projection: the project's operations at sizes of
training.

Suffixes: T tokens, R rows, I inner, O outer, D hidden, V vocabulary, E experts, B sequences, S their tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.bench.cases import route
from graphmoe.config.schema import AttentionBackend
from graphmoe.ops import fp8_linear, fp8_mlp
from graphmoe.ops.attention import causal_attention, choose_backend
from graphmoe.ops.fp8 import fp8_dtype, quantise, reason_against
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends, random_inputs

Calls = dict[str, Callable[[], object]]
"""Timed calls by the rate that they give; a rate of several calls has them as ``rate/call``."""


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


LITE = MlpShape(16384, 2048, 1408, 64, 6)
QWEN = MlpShape(16384, 2048, 768, 128, 8)
WEIGHTS = ((2048, 576), (512, 4096), (2048, 2048), (2048, 5632), (4096, 4096), (7168, 12288))
"""Sides of dense weights."""
ROUTERS = ((512, 2048, 64), (4096, 2048, 64), (16384, 2048, 64), (4096, 2048, 128), (4096, 7168, 256))
"""Tokens, hidden size and experts."""


def full_cases() -> Iterator[CalibrateCase]:
    """Sizes around layers of DeepSeek-V2-Lite, Qwen3-30B-A3B and an eighth of the experts of DeepSeek-V3."""
    yield from (dense(rows, *sides) for sides in WEIGHTS for rows in (512, 2048, 4096, 16384))
    yield from (experts(replace(LITE, T=tokens)) for tokens in (512, 4096, 16384))
    yield from (experts(replace(QWEN, T=tokens)) for tokens in (4096, 16384))
    yield experts(MlpShape(4096, 7168, 2048, 32, 8))
    yield from (router(*sizes) for sizes in ROUTERS)
    yield from (attention(16, 16, 192, 128, tokens, 8192) for tokens in (512, 2048, 4096))
    yield from (attention(32, 4, 128, 128, tokens, 8192) for tokens in (1024, 4096, 8192))
    yield from (loss(tokens, 2048, 102400) for tokens in (512, 4096, 16384))
    yield copy(2**31)
    yield from (fp8_dense(rows, *sides) for sides in WEIGHTS for rows in (512, 2048, 4096, 16384))
    yield from (fp8_experts(replace(LITE, T=tokens)) for tokens in (512, 4096, 16384))
    yield from (fp8_experts(replace(QWEN, T=tokens)) for tokens in (4096, 16384))
    yield fp8_experts(MlpShape(4096, 7168, 2048, 32, 8))
    yield fp8_quantise(64, 2816, 2048)


def tiny_cases() -> Iterator[CalibrateCase]:
    """Sizes large enough to run every line, small enough for a CPU."""
    yield from (dense(rows, 16, 32) for rows in (32, 64))
    yield experts(MlpShape(64, 32, 16, 8, 2))
    yield router(64, 32, 8)
    yield attention(2, 2, 24, 16, 32, 64)
    yield loss(64, 32, 128)
    yield copy(2**16)
    yield from (fp8_dense(rows, 16, 32) for rows in (32, 64))
    yield fp8_experts(MlpShape(64, 32, 16, 8, 2))
    yield fp8_quantise(2, 32, 64)


def dense(rows: int, inner: int, outer: int) -> CalibrateCase:
    def make(device: torch.device) -> Calls:
        normal = _normal(device)
        x_RI, dy_RO = normal(rows, inner), normal(rows, outer)
        weight_OI = normal(outer, inner, scale=inner**-0.5)
        total_OI = torch.zeros(outer, inner, device=device)
        return {
            "dense/forward": lambda: x_RI @ weight_OI.T,
            "dense/inputs": lambda: dy_RO @ weight_OI,
            "dense_weights": lambda: total_OI.copy_(dy_RO.T @ x_RI),
            "dense_weights_added": lambda: total_OI.add_(dy_RO.T @ x_RI),
        }

    name, flops = f"dense/{inner}x{outer}/{rows}", 2 * rows * inner * outer
    return CalibrateCase(name, (inner * outer) ** 0.5, rows, flops, make)


def experts(shape: MlpShape) -> CalibrateCase:
    """Grouped products with the backends that ``moe.experts=auto`` takes, on a natural routing."""
    T, D, F, E, K = shape.T, shape.D, shape.F, shape.E, shape.K

    def make(device: torch.device) -> Calls:
        generator = torch.Generator(device).manual_seed(0)
        _, plan, weight_TK = route(T, E, K, generator, device)
        backends = choose_backends("auto", shape, device, None)
        forward, dgrad, wgrad = (
            random_inputs(direction, shape, weight_TK, plan, generator)
            for direction in ("forward", "dgrad", "wgrad")
        )
        totals = [torch.zeros(size, device=device) for size in ((E, 2 * F, D), (E, D, F))]
        return {
            "grouped/forward": lambda: call_op("forward", *forward, backends),
            "grouped/inputs": lambda: call_op("dgrad", *dgrad, backends),
            "grouped_weights": lambda: call_op("wgrad_into", *wgrad, *totals, backends, False),
            "grouped_weights_added": lambda: call_op("wgrad_into", *wgrad, *totals, backends, True),
        }

    return CalibrateCase(f"grouped/{D}x{F}x{E}/{T}", F, T * K / E, 3 * 2 * T * K * D * F, make)


def fp8_dense(rows: int, inner: int, outer: int) -> CalibrateCase:
    """Products of sides that have their 8 bits and lie along what is contracted."""

    def make(device: torch.device) -> Calls:
        refuse_fp8(device)
        product, normal = fp8_linear.product, _normal(device)
        x, dy, w, w_turned, x_turned, dy_turned = (
            quantise(normal(*sides), fp8_dtype())
            for sides in (
                (rows, inner), (rows, outer), (outer, inner), (inner, outer), (inner, rows), (outer, rows)
            )
        )  # fmt: skip
        total_OI, one = torch.zeros(outer, inner, device=device), torch.ones((), device=device)

        def gradient() -> Tensor:
            return torch._scaled_mm(dy_turned[0], x_turned[0].t(), one, one, out_dtype=torch.float32)

        return {
            "fp8_dense/forward": lambda: product(x[0], w[0], x[1], w[1], torch.bfloat16),
            "fp8_dense/inputs": lambda: product(dy[0], w_turned[0], dy[1], w_turned[1], torch.bfloat16),
            "fp8_dense_weights": lambda: total_OI.copy_(gradient()),
            "fp8_dense_weights_added": lambda: total_OI.add_(gradient()),
        }

    name, flops = f"fp8_dense/{inner}x{outer}/{rows}", 2 * rows * inner * outer
    return CalibrateCase(name, (inner * outer) ** 0.5, rows, flops, make)


def fp8_experts(shape: MlpShape) -> CalibrateCase:
    """Grouped products in 8 bits, of tokens and weights that have theirs, on a natural routing."""
    T, D, F, E, K = shape.T, shape.D, shape.F, shape.E, shape.K

    def make(device: torch.device) -> Calls:
        refuse_fp8(device)
        normal, ops = _normal(device), torch.ops.graphmoe
        _, plan, weight_TK = route(T, E, K, torch.Generator(device).manual_seed(0), device)
        x, dy = (quantise(normal(T, D), fp8_dtype()) for _ in range(2))
        weights = normal(E, 2 * F, D, scale=D**-0.5), normal(E, D, F, scale=F**-0.5)
        rows, columns = ([part for w in weights for part in of(w)] for of in (fp8_mlp.rows, fp8_mlp.columns))
        last = torch.bfloat16
        _, *h, _ = ops.fp8_mlp_forward(*x, *rows, weight_TK, *plan, last)
        _, _, *made, _ = ops.fp8_mlp_dgrad(*dy, *h, *columns, weight_TK, *plan, last)
        totals = [torch.zeros_like(w, dtype=torch.float32) for w in weights]
        sides = (*dy, *x, *made, *plan, *totals)
        return {
            "fp8_grouped/forward": lambda: ops.fp8_mlp_forward(*x, *rows, weight_TK, *plan, last),
            "fp8_grouped/inputs": lambda: ops.fp8_mlp_dgrad(*dy, *h, *columns, weight_TK, *plan, last),
            "fp8_grouped_weights": lambda: ops.fp8_mlp_wgrad_into(*sides, False),
            "fp8_grouped_weights_added": lambda: ops.fp8_mlp_wgrad_into(*sides, True),
        }

    return CalibrateCase(f"fp8_grouped/{D}x{F}x{E}/{T}", F, T * K / E, 3 * 2 * T * K * D * F, make)


def fp8_quantise(E: int, N: int, C: int) -> CalibrateCase:
    """Rounding of bf16 rows to 8 bits."""

    def make(device: torch.device) -> Calls:
        refuse_fp8(device)
        w_ENC = _normal(device)(E, N, C)
        return {"fp8_quantise": lambda: fp8_mlp.rows(w_ENC)}

    return CalibrateCase(f"fp8_quantise/{E}x{N}x{C}", 0, 0, 3 * E * N * C, make)


def refuse_fp8(device: torch.device) -> None:
    """Raise RuntimeError on a GPU without products in 8 bits."""
    if reason := reason_against(device, "rowwise"):
        raise RuntimeError(f"fp8 {reason}")


def router(tokens: int, hidden: int, num_experts: int) -> CalibrateCase:
    def make(device: torch.device) -> Calls:
        normal = _normal(device)
        h_TD, gate_ED = normal(tokens, hidden).float(), normal(num_experts, hidden).float()
        dlogits_TE = normal(tokens, num_experts).float()
        return {
            "router/forward": lambda: h_TD @ gate_ED.T,
            "router/inputs": lambda: dlogits_TE @ gate_ED,
            "router/weights": lambda: dlogits_TE.T @ h_TD,
        }

    name, flops = f"router/{hidden}x{num_experts}/{tokens}", 2 * tokens * hidden * num_experts
    return CalibrateCase(name, num_experts, tokens, flops, make)


def attention(H: int, G: int, E: int, V: int, S: int, attended: int) -> CalibrateCase:
    """Heads of queries and of keys, sizes of a query's and a value's, and tokens of a sequence.

    ``attended`` are the tokens of all sequences at once, at least one sequence.
    """
    B = max(attended // S, 1)

    def make(device: torch.device) -> Calls:
        normal = _normal(device)
        leaves = [normal(B, S, *size).requires_grad_() for size in ((H, E), (G, E), (G, V))]
        backend = choose_backend(AttentionBackend.auto, device.type, E, V)

        def forward() -> Tensor:
            return causal_attention(*leaves, scale=E**-0.5, backend=backend)

        out_BSHV = forward()
        dout_BSHV = torch.randn_like(out_BSHV)
        return {
            "attention_forward": forward,
            "attention_backward": lambda: torch.autograd.grad(out_BSHV, leaves, dout_BSHV, retain_graph=True),
        }

    return CalibrateCase(f"attention/{H}x{E}x{V}/{S}", E, S, 2 * B * S * H * (E + V) * S / 2, make)


def loss(tokens: int, hidden: int, vocabulary: int) -> CalibrateCase:
    """The forward, which makes both gradients."""

    def make(device: torch.device) -> Calls:
        from graphmoe.ops import linear_cross_entropy  # noqa: F401  # registers the op

        normal, op = _normal(device), torch.ops.graphmoe.linear_cross_entropy
        h_TD, w_VD = normal(tokens, hidden), normal(vocabulary, hidden, scale=hidden**-0.5)
        labels_T = torch.randint(vocabulary, (tokens,), device=device)
        return {"head": lambda: op(h_TD, w_VD, labels_T, -100, True)}

    name, flops = f"head/{hidden}x{vocabulary}/{tokens}", 3 * 2 * tokens * hidden * vocabulary
    return CalibrateCase(name, hidden, tokens, flops, make)


def copy(num_bytes: int) -> CalibrateCase:
    def make(device: torch.device) -> Calls:
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return {"hbm": lambda: target.copy_(source)}

    return CalibrateCase("copy", 0, 0, 2 * num_bytes, make)


def _normal(device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(scale).bfloat16()

    return normal
