"""The cases of ``suite=ops``: every operation of graphmoe/ops at the shapes of published models, in bf16.

Suffixes: T tokens, K slots, E experts, R routed rows (T * K), D hidden, F expert width, H = 2 * F,
V vocabulary, B sequences.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from graphmoe.bench.arguments import BenchArgs
from graphmoe.bench.cases import (
    BYTES_PER_S,
    FLOPS_PER_S,
    Alternative,
    Case,
    Floor,
    Measured,
    Results,
    Row,
    Run,
    chosen,
    free_memory,
    one_by_one,
    route,
    run_case,
    table,
)
from graphmoe.config.packages import VENDORS, is_installed
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends, random_inputs
from graphmoe.ops.timing import FLUSH_BYTES, MAX_CASE_S, WARM_UP_CALLS

log = logging.getLogger(__name__)
OWN = "graphmoe"
OWN_BACKENDS = ("torch", "triton")
BF16, F32, I32 = 2, 4, 4
"""Bytes of an element."""
MLP_RESULTS = {
    "forward": ("y", "h"),
    "dgrad": ("dx", "dweight", "dh", "a"),
    "wgrad": ("dw_gate_up", "dw_down"),
    "forward_backward": ("y", "dx", "dw_gate_up", "dw_down", "dweight"),
}
"""Directions of the routed experts, and the results of each."""


@dataclass(frozen=True)
class RowShape:
    """Sizes of the operations that move rows."""

    T: int
    D: int
    E: int
    K: int


@dataclass(frozen=True)
class SwigluShape:
    """Rows and expert width."""

    R: int
    F: int


@dataclass(frozen=True)
class RouterShape:
    """Tokens of ``B`` sequences, and the choice of experts; groups with the sigmoid score of DeepSeek-V3."""

    T: int
    B: int
    E: int
    K: int
    num_groups: int = 1
    topk_groups: int = 1


@dataclass(frozen=True)
class LossShape:
    """Tokens of sequences of ``S``, hidden width and vocabulary."""

    T: int
    S: int
    D: int
    V: int


@dataclass(frozen=True)
class Shapes:
    """All shapes of a suite, by label where there are several."""

    mlp: dict[str, MlpShape]
    rows: RowShape
    swiglu: SwigluShape
    router: dict[str, RouterShape]
    loss: LossShape


FULL = Shapes(
    {
        "v2_lite": MlpShape(16384, 2048, 1408, 64, 6),
        "qwen3_30b": MlpShape(16384, 2048, 768, 128, 8),
        "v3_ep8": MlpShape(4096, 7168, 2048, 32, 8),
    },
    RowShape(16384, 2048, 64, 6),
    SwigluShape(98304, 1408),
    {"v2_lite": RouterShape(16384, 4, 64, 6), "v3": RouterShape(16384, 4, 256, 8, 8, 4)},
    LossShape(16384, 4096, 2048, 102400),
)
"""Layers of DeepSeek-V2-Lite, Qwen3-30B-A3B, and an eighth of the experts of DeepSeek-V3."""
TINY = Shapes(
    {
        "v2_lite": MlpShape(64, 32, 16, 8, 2),
        "qwen3_30b": MlpShape(64, 32, 48, 16, 4),
        "v3_ep8": MlpShape(32, 64, 32, 8, 2),
    },
    RowShape(64, 32, 8, 2),
    SwigluShape(128, 16),
    {"v2_lite": RouterShape(64, 4, 16, 2), "v3": RouterShape(64, 4, 32, 4, 8, 4)},
    LossShape(128, 32, 32, 384),
)
"""Large enough to run every line, small enough for a CPU."""


def measure_operations(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=ops``."""
    cases, left_out = ops_suite(FULL if full else TINY, device)
    cases = chosen(cases, args.only)
    for line in left_out:
        log.info("left out: %s", line)

    def run(case: Case) -> list[Row]:
        found = run_case(case, device, args.repeats)
        free_memory(device, after_error=any(row.error for row in found))
        return found

    rows = one_by_one(cases, run, _brief, args.out)
    flushed = FLUSH_BYTES if device.type == "cuda" else 0
    method = {"warm_up_calls": WARM_UP_CALLS, "max_s_per_case": MAX_CASE_S, "cache_flush_bytes": flushed}
    return rows, left_out, method


def _brief(rows: Sequence[Row]) -> str:
    return ", ".join(
        f"{row.alternative} {row.error}" if row.error else f"{row.alternative} {row.median_ms:.3f} ms"
        for row in rows
    )


def ops_suite(shapes: Shapes, device: torch.device) -> tuple[list[Case], list[str]]:
    """All cases, and one line for each backend that is left out."""
    backends, left_out = _backends(device)
    cases = [
        *_mlp_cases(shapes.mlp, device, backends),
        *_row_cases(shapes.rows, device),
        *_swiglu_cases(shapes.swiglu, device),
        *(case for label, shape in shapes.router.items() for case in _router_cases(label, shape, device)),
        _loss_case(shapes.loss, device),
    ]
    return cases, left_out


def _backends(device: torch.device) -> tuple[list[str], list[str]]:
    """Backends of the routed experts that can run here, and one line for each other."""
    if device.type != "cuda":
        return ["torch"], ["triton, turbo, te: a CPU has the torch backend only"]
    packages = {name: VENDORS[name].module for name in ("turbo", "te")}
    there = [name for name, package in packages.items() if is_installed(package)]
    missing = [
        f"{name}: {package} is not installed" for name, package in packages.items() if name not in there
    ]
    return [*OWN_BACKENDS, *there], missing


def _mlp_cases(shapes: dict[str, MlpShape], device: torch.device, backends: Sequence[str]) -> Iterator[Case]:
    """Every direction at every shape, with natural routing and with one expert at 4 times the mean.

    A training step is timed with the mix of backends that ``moe.experts=auto`` takes, too.
    """
    for label, shape in shapes.items():
        sizes = {name: size for name, size in asdict(shape).items() if name != "dtype"}
        flops = 3 * 2 * (shape.T * shape.K) * shape.F * shape.D  # of the products of gate, up and down
        for skewed in (False, True):
            for direction, results in MLP_RESULTS.items():
                is_step = direction == "forward_backward"
                yield Case(
                    f"grouped_mlp/{label}{'_skewed' if skewed else ''}/{direction}",
                    sizes,
                    Floor(flops * (3 if is_step else 1), "FLOPs"),
                    results,
                    functools.partial(_mlp_alternatives, shape, skewed, direction, device, backends),
                    "kept" if is_step else None,
                )


def _mlp_alternatives(
    shape: MlpShape, skewed: bool, direction: str, device: torch.device, backends: Sequence[str]
) -> list[Alternative]:
    generator = _seeded(device)
    routing, weight_TK = route(shape.T, shape.E, shape.K, generator, device, skewed=skewed)
    dy_TD, names = None, {name: name for name in backends}
    if direction == "forward_backward":
        dy_TD = torch.randn(shape.T, shape.D, generator=generator, device=device, dtype=shape.dtype)
        chosen_backends = choose_backends("auto", shape, device, None)
        names[f"auto={chosen_backends}"], direction = chosen_backends, "forward"
    inputs = random_inputs(direction, shape, weight_TK, routing.plan, generator)
    return [
        Alternative(name, functools.partial(_bind_mlp, direction, inputs, dy_TD, backend))
        for name, backend in names.items()
    ]


def _bind_mlp(direction: str, inputs: Sequence[Tensor], dy_TD: Tensor | None, backend: str) -> Run:
    if dy_TD is None:
        return Run(functools.partial(call_op, direction, *inputs, backend))
    leaves, plan = [tensor.detach().requires_grad_() for tensor in inputs[:4]], inputs[4:]

    def forward() -> Tensor:
        return call_op(direction, *leaves, *plan, backend)[0]

    def call() -> Results:
        y_TD = forward()
        return y_TD.detach(), *torch.autograd.grad(y_TD, leaves, dy_TD)

    return Run(call, forward)


def _row_cases(shape: RowShape, device: torch.device) -> Iterator[Case]:
    """The plan, and rows out and back. Each input and output is counted once, a token's rows as one token."""
    T, D, E, K = asdict(shape).values()
    tokens, rows, index = T * D * BF16, T * K * D * BF16, T * K * I32
    amounts = {
        "routing_plan": (3 * index + 2 * E * I32, ("counts", "ends", "row", "slot")),
        "permute": (tokens + rows + index, ("y",)),
        "unpermute": (tokens + rows + index, ("x",)),
        "unpermute_weighted": (tokens + rows + index + T * K * F32, ("x",)),
    }
    for name, (amount, results) in amounts.items():
        make = functools.partial(_row_alternatives, shape, name, device)
        yield Case(name, asdict(shape), Floor(amount, "bytes"), results, make)


def _row_alternatives(shape: RowShape, name: str, device: torch.device) -> list[Alternative]:
    generator, ops = _seeded(device), torch.ops.graphmoe
    routing, weight_TK = route(shape.T, shape.E, shape.K, generator, device)

    def rows(count: int) -> Tensor:
        return torch.randn(count, shape.D, generator=generator, device=device, dtype=torch.bfloat16)

    if name == "routing_plan":
        return _own(lambda: ops.routing_plan(routing.expert_TK, shape.E))
    if name == "permute":
        x_TD = rows(shape.T)
        return _own(lambda: (ops.permute(x_TD, *routing.plan),))
    y_RD, weights = rows(shape.T * shape.K), weight_TK if name == "unpermute_weighted" else None
    return _own(lambda: (ops.unpermute(y_RD, *routing.plan, weights),))


def _swiglu_cases(shape: SwigluShape, device: torch.device) -> Iterator[Case]:
    h, a, weight = 2 * shape.R * shape.F * BF16, shape.R * shape.F * BF16, shape.R * F32
    for direction, amount, results in (
        ("forward", h + weight + a, ("a",)),
        ("backward", a + h + weight + h + weight, ("dh", "dweight")),
    ):
        make = functools.partial(_swiglu_alternatives, shape, direction, device)
        yield Case(f"swiglu/{direction}", asdict(shape), Floor(amount, "bytes"), results, make)


def _swiglu_alternatives(shape: SwigluShape, direction: str, device: torch.device) -> list[Alternative]:
    from graphmoe.ops import swiglu  # noqa: F401  # registers the ops

    generator, ops, (R, F) = _seeded(device), torch.ops.graphmoe, (shape.R, shape.F)
    h_RH = torch.randn(R, 2 * F, generator=generator, device=device, dtype=torch.bfloat16)
    weight_R = torch.rand(R, generator=generator, device=device)
    ends_E = torch.full((1,), R, dtype=torch.int32, device=device)
    if direction == "forward":
        return _own(lambda: (ops.swiglu(h_RH, weight_R, ends_E),))
    da_RF = torch.randn(R, F, generator=generator, device=device, dtype=torch.bfloat16)
    return _own(lambda: ops.swiglu_backward(da_RF, h_RH, weight_R, ends_E))


def _router_cases(label: str, shape: RouterShape, device: torch.device) -> Iterator[Case]:
    """The backward has gradients of the weights and of the shares, which the balance loss is made of."""
    logits, slots, sums = shape.T * shape.E * F32, shape.T * shape.K * F32, shape.B * shape.E * F32
    bias = shape.E * F32 if shape.num_groups > 1 else 0
    forward = ("weight", "expert", "counts", "share_sum", "z_sum", "entropy_sum")
    for direction, amount, results in (
        ("forward", logits + bias + 2 * slots + 2 * sums + 2 * F32, forward),
        ("backward", logits + 2 * slots + sums + logits, ("dlogits",)),
    ):
        make = functools.partial(_router_alternatives, shape, direction, device)
        yield Case(f"router/{label}/{direction}", asdict(shape), Floor(amount, "bytes"), results, make)


def _router_alternatives(shape: RouterShape, direction: str, device: torch.device) -> list[Alternative]:
    from graphmoe.ops import fused_router as router_op  # noqa: F401  # registers the ops

    generator, ops, grouped = _seeded(device), torch.ops.graphmoe, shape.num_groups > 1
    logits_TE = torch.randn(shape.T, shape.E, generator=generator, device=device)
    bias_E = 0.01 * torch.randn(shape.E, generator=generator, device=device) if grouped else None
    score, scale = ("sigmoid", 2.5) if grouped else ("softmax", 1.0)
    groups = (shape.num_groups, shape.topk_groups, 2 if grouped else 1)
    how = (grouped, False, scale)  # renormalise, softmax_after_topk, scale

    def forward() -> Results:
        return ops.router(logits_TE, bias_E, None, shape.B, shape.K, score, *groups, *how, grouped)

    if direction == "forward":
        return _own(forward)
    expert_TK = forward()[1]
    dweight_TK = torch.randn(shape.T, shape.K, generator=generator, device=device)
    dshare_BE = torch.randn(shape.B, shape.E, generator=generator, device=device)
    gradients = (dweight_TK, dshare_BE, None, None)
    return _own(lambda: (ops.router_backward(*gradients, logits_TE, expert_TK, shape.B, score, *how),))


def _loss_case(shape: LossShape, device: torch.device) -> Case:
    """Forward and backward; the floor is the three products, each 2 * T * D * V."""
    return Case(
        "linear_cross_entropy/forward_backward",
        asdict(shape),
        Floor(3 * 2 * shape.T * shape.D * shape.V, "FLOPs"),
        ("total", "dh", "dw"),
        functools.partial(_loss_alternatives, shape, device),
        "peak",
    )


def _loss_alternatives(shape: LossShape, device: torch.device) -> list[Alternative]:
    from graphmoe.ops import linear_cross_entropy  # noqa: F401  # registers the ops

    generator, (T, S, D, V) = _seeded(device), asdict(shape).values()
    h_TD = torch.randn(T, D, generator=generator, device=device, dtype=torch.bfloat16).requires_grad_()
    w_VD = torch.randn(V, D, generator=generator, device=device, dtype=torch.bfloat16).mul_(D**-0.5)
    w_VD.requires_grad_()
    labels_T = torch.randint(V, (T,), generator=generator, device=device)
    dtotal = torch.full((), 1 / T, device=device)  # of a mean: a gradient of one would hide a missing scale

    def call() -> Results:
        total = torch.ops.graphmoe.linear_cross_entropy(h_TD, w_VD, labels_T, -100, 0.0, S, 0, True)[0]
        return total.detach(), *torch.autograd.grad(total, (h_TD, w_VD), dtotal.to(total.dtype))

    return _own(call)


def _own(call: Callable[[], Results]) -> list[Alternative]:
    return [Alternative(OWN, lambda: Run(call))]


def _seeded(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def render_operations(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table and its legend."""

    def memory(row: dict[str, Any]) -> str:
        count = row["memory_bytes"]
        return "" if count is None else f"{count / 2**20:,.0f} {row['memory_kind']}"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "case": lambda row: row["case"],
        "alternative": lambda row: row["alternative"],
        "median ms": lambda row: f"{row['median_ms']:.4f}",
        "p10 to p90": lambda row: f"{row['p10_ms']:.4f} to {row['p90_ms']:.4f}",
        "floor ms": lambda row: f"{row['floor_ms']:.4g}",
        "time / floor": lambda row: f"{row['time_over_floor']:.2f}",
        "memory MiB": memory,
    }
    yield from table(columns, document["rows"], named=2)
    yield (
        f"Times: medians of up to {document['method']['repeats']} calls with cold caches, alternatives in "
        f"turns. Floors: FLOPs at {FLOPS_PER_S / 1e12:.0f} TFLOP/s (grouped_mlp, linear_cross_entropy), "
        f"bytes at {BYTES_PER_S / 1e12:.1f} TB/s (the others), both as measured on an H200."
    )
    yield (
        "Memory: kept for the backward beside x and y (kept); most in use above the inputs and the "
        "gradients dh and dw (peak)."
    )
