"""The cases of ``suite=ops``: every operation of graphmoe/ops at the shapes of published models, in bf16.

Suffixes: T tokens, K slots, E experts, R routed rows (T * K), D hidden, F expert width, H = 2 * F,
V vocabulary, B sequences.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.bench.arguments import BenchArgs
from graphmoe.bench.cases import (
    BYTES_PER_S,
    FLOPS_PER_S,
    FP8_FLOPS_PER_S,
    Cell,
    Measured,
    Operation,
    Results,
    Row,
    Run,
    Suite,
    route,
    run_cases,
)
from graphmoe.config.packages import VENDORS, is_installed
from graphmoe.ops import fp8_choice
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends, random_inputs
from graphmoe.ops.timing import FLUSH_BYTES, MAX_CASE_S, WARM_UP_CALLS

Alternatives = Mapping[str, Callable[[], Run]]
Sizes = dict[str, int]
BF16, F32, I32 = 2, 4, 4
"""Bytes of an element."""
MLP_RESULTS = {
    "forward": ("y", "h"),
    "dgrad": ("dx", "dweight", "dh", "a"),
    "wgrad": ("dw_gate_up", "dw_down"),
    "forward_backward": ("y", "dx", "dw_gate_up", "dw_down", "dweight"),
}
"""Directions of the routed experts, and the results of each."""


class Shapes(NamedTuple):
    """Sizes of all operations by their suffix, by label where there are several.

    The router has groups with the sigmoid score of DeepSeek-V3; S are the tokens of a sequence.
    """

    mlp: dict[str, MlpShape]
    rows: Sizes
    swiglu: Sizes
    router: dict[str, Sizes]
    loss: Sizes
    dense: dict[str, tuple[int, int, int]]
    """Rows, outputs and inputs of products with a weight."""


FULL = Shapes(
    {
        "v2_lite": MlpShape(16384, 2048, 1408, 64, 6),
        "qwen3_30b": MlpShape(16384, 2048, 768, 128, 8),
        "v3_ep8": MlpShape(4096, 7168, 2048, 32, 8),
    },
    {"T": 16384, "D": 2048, "E": 64, "K": 6},
    {"R": 98304, "F": 1408},
    {
        "v2_lite": {"T": 16384, "B": 4, "E": 64, "K": 6, "num_groups": 1, "topk_groups": 1},
        "v3": {"T": 16384, "B": 4, "E": 256, "K": 8, "num_groups": 8, "topk_groups": 4},
    },
    {"T": 16384, "S": 4096, "D": 2048, "V": 102400},
    {
        "q": (16384, 3072, 2048),
        "kv_a": (16384, 576, 2048),
        "kv_b": (16384, 4096, 512),
        "o": (16384, 2048, 2048),
        "shared_gate_up": (16384, 5632, 2048),
        "shared_down": (16384, 2048, 2816),
    },
)
"""Layers of DeepSeek-V2-Lite, Qwen3-30B-A3B, and an eighth of the experts of DeepSeek-V3."""
TINY = Shapes(
    {
        "v2_lite": MlpShape(64, 32, 16, 8, 2),
        "qwen3_30b": MlpShape(64, 32, 48, 16, 4),
        "v3_ep8": MlpShape(32, 64, 32, 8, 2),
    },
    {"T": 64, "D": 32, "E": 8, "K": 2},
    {"R": 128, "F": 16},
    {
        "v2_lite": {"T": 64, "B": 4, "E": 16, "K": 2, "num_groups": 1, "topk_groups": 1},
        "v3": {"T": 64, "B": 4, "E": 32, "K": 4, "num_groups": 8, "topk_groups": 4},
    },
    {"T": 128, "S": 32, "D": 32, "V": 384},
    {"q": (64, 48, 32), "o": (64, 32, 32)},
)
"""Large enough to run every line, small enough for a CPU."""


def measure_operations(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=ops``."""
    cases, left_out = ops_suite(FULL if full else TINY, device)
    made = [case.case(device, args.repeats) for case in cases]
    rows = run_cases(made, "{alternative} {median_ms:.3f} ms".format_map, args.out, args.only)
    flushed = FLUSH_BYTES if device.type == "cuda" else 0
    method = {"warm_up_calls": WARM_UP_CALLS, "max_s_per_case": MAX_CASE_S, "cache_flush_bytes": flushed}
    return rows, left_out, method


def ops_suite(shapes: Shapes, device: torch.device) -> tuple[list[Operation], list[str]]:
    """All cases, and one line for each backend that is left out."""
    backends, left_out = ["torch"], ["triton, turbo, te: a CPU has the torch backend only"]
    if device.type == "cuda":
        packages = {name: VENDORS[name].module for name in ("turbo", "te")}
        here = [name for name, package in packages.items() if is_installed(package)]
        backends = ["torch", "triton", *here]
        left_out = [f"{name}: {packages[name]} is not installed" for name in packages if name not in here]
    cases = [
        *(
            _mlp_case(label, shape, skewed, direction, device, backends)
            for label, shape in shapes.mlp.items()
            for skewed in (False, True)
            for direction in MLP_RESULTS
        ),
        *_row_cases(shapes.rows, device),
        *_swiglu_cases(shapes.swiglu, device),
        *(case for label, shape in shapes.router.items() for case in _router_cases(label, shape, device)),
        _loss_case(shapes.loss, device),
        *_fp8_cases(shapes, device),
    ]
    return cases, left_out


def _mlp_case(
    label: str, shape: MlpShape, skewed: bool, direction: str, device: torch.device, backends: Sequence[str]
) -> Operation:
    """A direction at a shape, with natural routing or with one expert at 4 times the mean.

    A training step is timed with the mix of backends that ``moe.experts=auto`` takes, too.
    """
    is_step = direction == "forward_backward"

    def make() -> Alternatives:
        generator, op = _seeded(device), "forward" if is_step else direction
        _, plan, weight_TK = route(shape.T, shape.E, shape.K, generator, device, skewed=skewed)
        dy_TD, names = None, {name: name for name in backends}
        if is_step:
            dy_TD = torch.randn(shape.T, shape.D, generator=generator, device=device, dtype=shape.dtype)
            mix = choose_backends("auto", shape, device, None)
            names[f"auto={mix}"] = mix
        inputs = random_inputs(op, shape, weight_TK, plan, generator)
        return {
            name: functools.partial(_bind_mlp, op, inputs, dy_TD, backend) for name, backend in names.items()
        }

    flops = 3 * 2 * (shape.T * shape.K) * shape.F * shape.D  # of the products of gate, up and down
    return Operation(
        f"grouped_mlp/{label}{'_skewed' if skewed else ''}/{direction}",
        {name: size for name, size in vars(shape).items() if name != "dtype"},
        flops * (3 if is_step else 1),
        "FLOPs",
        MLP_RESULTS[direction],
        make,
        "kept" if is_step else None,
    )


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


def _row_cases(shape: Sizes, device: torch.device) -> Iterator[Operation]:
    """The plan, and rows out and back. Each input and output is counted once, a token's rows as one token."""
    T, D, E, K = shape.values()
    tokens, rows, index = T * D * BF16, T * K * D * BF16, T * K * I32
    amounts = {
        "routing_plan": (3 * index + 2 * E * I32, ("counts", "ends", "row", "slot")),
        "permute": (tokens + rows + index, ("y",)),
        "unpermute": (tokens + rows + index, ("x",)),
        "unpermute_weighted": (tokens + rows + index + T * K * F32, ("x",)),
    }

    def make(name: str) -> Alternatives:
        generator, ops = _seeded(device), torch.ops.graphmoe
        expert_TK, plan, weight_TK = route(T, E, K, generator, device)
        if name == "routing_plan":
            return _own(lambda: ops.routing_plan(expert_TK, E))
        if name == "permute":
            x_TD = _random(generator, T, D)
            return _own(lambda: (ops.permute(x_TD, *plan),))
        y_RD, weights = _random(generator, T * K, D), weight_TK if name == "unpermute_weighted" else None
        return _own(lambda: (ops.unpermute(y_RD, *plan, weights),))

    for name, (amount, results) in amounts.items():
        yield Operation(name, shape, amount, "bytes", results, functools.partial(make, name))


def _swiglu_cases(shape: Sizes, device: torch.device) -> Iterator[Operation]:
    R, F = shape.values()
    h, a, weight = 2 * R * F * BF16, R * F * BF16, R * F32

    def make(direction: str) -> Alternatives:
        from graphmoe.ops import swiglu  # noqa: F401  # registers the ops

        generator, ops = _seeded(device), torch.ops.graphmoe
        h_RH = _random(generator, R, 2 * F)
        weight_R = torch.rand(R, generator=generator, device=device)
        ends_E = torch.full((1,), R, dtype=torch.int32, device=device)
        if direction == "forward":
            return _own(lambda: (ops.swiglu(h_RH, weight_R, ends_E),))
        da_RF = _random(generator, R, F)
        return _own(lambda: ops.swiglu_backward(da_RF, h_RH, weight_R, ends_E))

    for direction, amount, results in (
        ("forward", h + weight + a, ("a",)),
        ("backward", a + h + weight + h + weight, ("dh", "dweight")),
    ):
        bound = functools.partial(make, direction)
        yield Operation(f"swiglu/{direction}", shape, amount, "bytes", results, bound)


def _router_cases(label: str, shape: Sizes, device: torch.device) -> Iterator[Operation]:
    """The backward has gradients of the weights and of the shares, which the balance loss is made of."""
    T, B, E, K, *groups = shape.values()
    grouped = groups[0] > 1
    logits, slots, sums, bias = T * E * F32, T * K * F32, B * E * F32, E * F32 * grouped
    score, scale = ("sigmoid", 2.5) if grouped else ("softmax", 1.0)
    how = (grouped, False, scale)  # renormalise, softmax_after_topk, scale

    def make(direction: str) -> Alternatives:
        from graphmoe.ops import router  # noqa: F401  # registers the ops

        generator, ops = _seeded(device), torch.ops.graphmoe
        logits_TE = torch.randn(T, E, generator=generator, device=device)
        bias_E = 0.01 * torch.randn(E, generator=generator, device=device) if grouped else None

        def forward() -> Results:
            choice = (B, K, score, *groups, 2 if grouped else 1)
            return ops.router(logits_TE, bias_E, None, *choice, *how, grouped)

        if direction == "forward":
            return _own(forward)
        expert_TK = forward()[1]
        dweight_TK = torch.randn(T, K, generator=generator, device=device)
        dshare_BE = torch.randn(B, E, generator=generator, device=device)
        gradients = (dweight_TK, dshare_BE, None, None)
        return _own(lambda: (ops.router_backward(*gradients, logits_TE, expert_TK, B, score, *how),))

    forward_results = ("weight", "expert", "counts", "share_sum", "z_sum", "entropy_sum")
    for direction, amount, results in (
        ("forward", logits + bias + 2 * slots + 2 * sums + 2 * F32, forward_results),
        ("backward", logits + 2 * slots + sums + logits, ("dlogits",)),
    ):
        bound = functools.partial(make, direction)
        yield Operation(f"router/{label}/{direction}", shape, amount, "bytes", results, bound)


def _loss_case(shape: Sizes, device: torch.device) -> Operation:
    """Forward and backward; the floor is the three products, each 2 * T * D * V."""
    T, S, D, V = shape.values()

    def make() -> Alternatives:
        from graphmoe.ops import linear_cross_entropy  # noqa: F401  # registers the ops

        generator = _seeded(device)
        h_TD = _random(generator, T, D).requires_grad_()
        w_VD = _random(generator, V, D).mul_(D**-0.5).requires_grad_()
        labels_T = torch.randint(V, (T,), generator=generator, device=device)
        dtotal = torch.full((), 1 / T, device=device)  # a gradient of one would hide a missing scale

        def call() -> Results:
            total = torch.ops.graphmoe.linear_cross_entropy(h_TD, w_VD, labels_T, -100, True)[0]
            return total.detach(), *torch.autograd.grad(total, (h_TD, w_VD), dtotal.to(total.dtype))

        return _own(call)

    name, results = "linear_cross_entropy/forward_backward", ("total", "dh", "dw")
    return Operation(name, shape, 3 * 2 * T * D * V, "FLOPs", results, make, "peak")


def _fp8_cases(shapes: Shapes, device: torch.device) -> Iterator[Operation]:
    """Forward and backward of products in 8 bits, the storing of activations included, that of weights apart.

    Their numbers are those of 8 bits, so alternatives are not compared: tests/ops does that.
    """

    def make(of: Callable[[], fp8_choice.Dense | fp8_choice.Experts]) -> Alternatives:
        calls = of().calls(device)

        def bind(form: str) -> Run:
            def call() -> Results:
                calls[form]()
                return ()

            return Run(call)

        return {"bf16" if form == "plain" else form: functools.partial(bind, form) for form in calls}

    for label, shape in shapes.mlp.items():
        sizes = {name: size for name, size in vars(shape).items() if name != "dtype"}
        experts = functools.partial(_experts_in_fp8, shape, device)
        flops = 3 * 3 * 2 * shape.T * shape.K * shape.F * shape.D
        bound = functools.partial(make, experts)
        yield Operation(f"fp8_mlp/{label}", sizes, flops, "fp8 FLOPs", (), bound)
    for label, (R, N, K) in shapes.dense.items():
        bound = functools.partial(make, functools.partial(fp8_choice.Dense, R, N, K, "fp8"))
        sizes = {"R": R, "N": N, "K": K}
        yield Operation(f"fp8_linear/{label}", sizes, 3 * 2 * R * N * K, "fp8 FLOPs", (), bound)


def _experts_in_fp8(shape: MlpShape, device: torch.device) -> fp8_choice.Experts:
    return fp8_choice.Experts(shape, choose_backends("auto", shape, device, None))


def _own(call: Callable[[], Results]) -> Alternatives:
    return {"graphmoe": lambda: Run(call)}


def _seeded(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _random(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(size, generator=generator, device=generator.device, dtype=torch.bfloat16)


def _memory(row: Row) -> str:
    count = row["memory_bytes"]
    return "" if count is None else f"{count / 2**20:,.0f} {row['memory_kind']}"


_OPS_COLUMNS: dict[str, Cell] = {
    "case": "{case}",
    "alternative": "{alternative}",
    "median ms": "{median_ms:.4f}",
    "p10 to p90": "{p10_ms:.4f} to {p90_ms:.4f}",
    "floor ms": "{floor_ms:.4g}",
    "time / floor": "{time_over_floor:.2f}",
    "memory MiB": _memory,
}


def _ops_legend(document: dict[str, Any]) -> Iterator[str]:
    yield (
        f"Times: medians of up to {document['method']['repeats']} calls with cold caches, alternatives in "
        f"turns. Floors: FLOPs at {FLOPS_PER_S / 1e12:.0f} TFLOP/s (grouped_mlp, linear_cross_entropy), "
        f"those of fp8 at {FP8_FLOPS_PER_S / 1e12:,.0f} (fp8_mlp, fp8_linear, their bf16 too), "
        f"bytes at {BYTES_PER_S / 1e12:.1f} TB/s (the others), all as measured on an H200."
    )
    yield (
        "Memory: kept for the backward beside x and y (kept); most in use above the inputs and the "
        "gradients dh and dw (peak)."
    )


OPS = Suite(measure_operations, _OPS_COLUMNS, _ops_legend)
