"""The cases of ``suite=ops``: every operation of graphmoe/ops at the shapes of published models, in bf16.

Suffixes: T tokens, K slots, E experts, R routed rows (T * K), D hidden, F expert width, H = 2 * F,
V vocabulary, B sequences, S their tokens; of attention H query heads, G key-value heads, Q and V their sizes.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from graphmoe.bench import BenchArgs, cases
from graphmoe.bench.cases import Call, Calls, Operation, Run, mlp_inputs, normal, route
from graphmoe.bench.library_calls import PARTS, alternatives, either, lazily, reason_against
from graphmoe.config.schema import AttentionBackend
from graphmoe.ops import fp8_choice, linear_cross_entropy, permute, router, swiglu  # noqa: F401  # registers
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends
from graphmoe.ops.masked_attention import attention
from graphmoe.ops.timing import FLUSH_BYTES, MAX_CASE_S, WARM_UP_CALLS

LOOP = "loop"
BF16, F32, I32 = 2, 4, 4  # bytes of an element
MLP_RESULTS = {
    "forward": ("y", "h"),
    "dgrad": ("dx", "dweight", "dh", "a"),
    "wgrad": ("dw_gate_up", "dw_down"),
    "forward_backward": ("y", "dx", "dw_gate_up", "dw_down", "dweight"),
}
# Sizes, full and tiny. T, B, E, K, groups and groups of a token; with groups the sigmoid score of DeepSeek-V3
ROUTERS = {
    "v2_lite": ((16384, 4, 64, 6, 1, 1), (64, 4, 16, 2, 1, 1)),
    "v3": ((16384, 4, 256, 8, 8, 4), (64, 4, 32, 4, 8, 4)),
}
ATTENTION = {  # B, S, H, G, Q, V
    "v2_lite": ((4, 4096, 16, 16, 192, 128), (2, 32, 2, 2, 24, 16)),
    "v3": ((1, 4096, 128, 128, 192, 128), None),
    "qwen3_30b": ((4, 4096, 32, 4, 128, 128), (2, 32, 4, 2, 16, 16)),
    "gpt_oss_20b": ((4, 4096, 64, 8, 64, 64), None),
    "long": ((1, 32768, 16, 16, 192, 128), None),
}
LOSS = (16384, 4096, 2048, 102400), (128, 32, 32, 384)  # T, S, D, V
DENSE = {  # rows, outputs and inputs of products with a weight
    "q": ((16384, 3072, 2048), (64, 48, 32)),
    "kv_a": ((16384, 576, 2048), None),
    "kv_b": ((16384, 4096, 512), None),
    "o": ((16384, 2048, 2048), (64, 32, 32)),
    "shared_gate_up": ((16384, 5632, 2048), None),
    "shared_down": ((16384, 2048, 2816), None),
}
ops = torch.ops.graphmoe


def measure_operations(args: BenchArgs, device: torch.device, full: bool) -> cases.Measured:
    operations, left_out = ops_suite(full, device)
    made = [operation.case(device, args.repeats) for operation in operations]
    rows = cases.run_cases(made, "{alternative} {median_ms:.3f} ms".format_map, args.out, args.only)
    loops = {row["case"]: row["median_ms"] for row in rows if row["alternative"] == LOOP and not row["error"]}
    for row in rows:
        if row["case"] in loops and not row["error"]:
            row["over_loop"] = loops[row["case"]] / row["median_ms"]
    flushed = FLUSH_BYTES if device.type == "cuda" else 0
    method = {"warm_up_calls": WARM_UP_CALLS, "max_s_per_case": MAX_CASE_S, "cache_flush_bytes": flushed}
    return rows, left_out, method


def ops_suite(full: bool, device: torch.device) -> tuple[list[Operation], list[str]]:
    """Return all operations, and one line for each backend that is left out."""
    backends, left_out = ["torch"], ["triton, turbo, te: a CPU has the torch backend only"]
    if device.type == "cuda":
        reasons = {name: reason_against(name, device) for name in PARTS}
        backends = ["torch", "triton", *(name for name, reason in reasons.items() if reason is None)]
        left_out = [reason for reason in reasons.values() if reason]
    at, layers = 0 if full else 1, cases.layers(full)
    lite = layers["v2_lite"]
    found = [
        _mlp(f"grouped_mlp/{label}{'_skewed' if skewed else ''}", layer, skewed, direction, backends)
        for label, layer in layers.items()
        for skewed in (False, True)
        for direction in MLP_RESULTS
    ]
    found += [*_rows(lite.T, lite.D, lite.E, lite.K), *_swiglu(lite.T * lite.K, lite.F)]
    found += [each for label, sizes in ROUTERS.items() for each in _router(label, *sizes[at])]
    sizes = ((label, each[at]) for label, each in ATTENTION.items())
    found += [each for label, size in sizes if size for each in _attention(label, device, *size)]
    found += [*_loss(*LOSS[at]), *(_fp8_experts(label, layer) for label, layer in layers.items())]
    weights = ((label, sizes[at]) for label, sizes in DENSE.items())
    return [*found, *(_fp8_dense(label, *each) for label, each in weights if each)], left_out


def _mlp(name: str, layer: MlpShape, skewed: bool, direction: str, backends: Sequence[str]) -> Operation:
    is_step = direction == "forward_backward"

    def make(generator: torch.Generator) -> Mapping[str, Call | Run]:
        op = "forward" if is_step else direction
        (inputs,) = mlp_inputs(layer, generator, op, skewed=skewed)
        mix = [f"auto={_auto(layer, generator.device)}"] if is_step else []
        calls = {name: _grouped(op, name.removeprefix("auto=")) for name in (*backends, *mix)}
        if op == "forward":
            calls[LOOP] = functools.partial(_loop, inputs[4].tensor_split(inputs[6][:-1].long().cpu()))
        if not is_step:
            return {name: functools.partial(call, *inputs) for name, call in calls.items()}
        dy_TD = normal(generator, layer.T, layer.D)
        return {name: _step(inputs, dy_TD, call) for name, call in calls.items()}

    flops = (3 if is_step else 1) * 3 * 2 * layer.T * layer.K * layer.F * layer.D  # gate, up and down
    about = f"{name}/{direction}", _sizes(layer), flops
    return Operation(*about, "FLOPs", MLP_RESULTS[direction], make, "kept" if is_step else None)


def _grouped(op: str, backend: str) -> Call:
    return lambda *inputs: call_op(op, *inputs, backend)


def _loop(slots_E: Sequence[Tensor], x_TD: Tensor, *experts: Tensor) -> tuple[Tensor]:
    """Apply expert after expert in plain PyTorch, with its slots known to the host."""
    y_TD, (gate_up_EHD, down_EDF, weight_TK, *_) = torch.zeros_like(x_TD), experts
    # Gradients are one stack, while those of slices would be E tensors of all experts
    halves = gate_up_EHD.view(-1, down_EDF.shape[2], x_TD.shape[1]).unbind()
    for slot, gate, up, down in zip(slots_E, halves[::2], halves[1::2], down_EDF.unbind(), strict=True):
        token, weight = slot // weight_TK.shape[1], weight_TK.flatten().index_select(0, slot)
        x = x_TD.index_select(0, token)
        a = functional.silu(functional.linear(x, gate)) * functional.linear(x, up) * weight[:, None]
        y_TD.index_add_(0, token, functional.linear(a.to(x.dtype), down))
    return (y_TD,)


def _step(inputs: Sequence[Tensor], dy_TD: Tensor, experts: Call) -> Run:
    leaves, plan = [tensor.detach().requires_grad_() for tensor in inputs[:4]], inputs[4:]

    def forward() -> Tensor:
        return experts(*leaves, *plan)[0]

    def call() -> tuple[Tensor, ...]:
        y_TD = forward()
        return y_TD.detach(), *torch.autograd.grad(y_TD, leaves, dy_TD)

    return Run(call, forward)


def _own(
    make: Callable[[torch.Generator], Calls],
    shape: dict[str, int],
    kind: Literal["FLOPs", "bytes"],
    amounts: Mapping[str, tuple[int, tuple[str, ...]]],
    memory: Literal["peak"] | None = None,
) -> Iterator[Operation]:
    for name, (amount, results) in amounts.items():

        def alone(generator: torch.Generator, part: str = name.rpartition("/")[2]) -> Calls:
            calls, keys = make(generator), {"graphmoe": part, **{each: f"{each}/{part}" for each in PARTS}}
            return {alternative: calls[key] for alternative, key in keys.items() if key in calls}

        yield Operation(name, shape, amount, kind, results, alone, memory)


def _rows(T: int, D: int, E: int, K: int) -> Iterator[Operation]:
    def make(generator: torch.Generator) -> Calls:
        expert_TK, plan, weight_TK = route(T, E, K, generator)
        x_TD, y_RD = normal(generator, T, D), normal(generator, T * K, D)
        return {
            "routing_plan": lambda: ops.routing_plan(expert_TK, E),
            "permute": lambda: ops.permute(x_TD, *plan),
            "unpermute": lambda: ops.unpermute(y_RD, *plan, None),
            "unpermute_weighted": lambda: ops.unpermute(y_RD, *plan, weight_TK),
            **alternatives("rows", generator.device, x_TD, y_RD, expert_TK, weight_TK, E),
        }

    # Each input and output counts once, a token's rows as one token
    index, rows = T * K * I32, T * D * BF16 + T * K * D * BF16
    amounts = {
        "routing_plan": (3 * index + 2 * E * I32, ("counts", "ends", "row", "slot")),
        "permute": (rows + index, ("y",)),
        "unpermute": (rows + index, ("x",)),
        "unpermute_weighted": (rows + index + T * K * F32, ("x",)),
    }
    return _own(make, {"T": T, "D": D, "E": E, "K": K}, "bytes", amounts)


def _swiglu(R: int, F: int) -> Iterator[Operation]:
    def make(generator: torch.Generator) -> Calls:
        h_RH, da_RF = normal(generator, R, 2 * F), normal(generator, R, F)
        weight_R = torch.rand(R, generator=generator, device=generator.device)
        ends_E = torch.full((1,), R, dtype=torch.int32, device=generator.device)
        return {
            "forward": lambda: ops.swiglu(h_RH, weight_R, ends_E),
            "backward": lambda: ops.swiglu_backward(da_RF, h_RH, weight_R, ends_E),
            **alternatives("swiglu", generator.device, h_RH, weight_R, da_RF),
        }

    a, weighted = R * F * BF16, 2 * R * F * BF16 + R * F32
    amounts = {
        "swiglu/forward": (weighted + a, ("a",)),
        "swiglu/backward": (a + 2 * weighted, ("dh", "dweight")),
    }
    return _own(make, {"R": R, "F": F}, "bytes", amounts)


def _router(label: str, T: int, B: int, E: int, K: int, *groups: int) -> Iterator[Operation]:
    grouped = groups[0] > 1
    score, scale = ("sigmoid", 2.5) if grouped else ("softmax", 1.0)
    how = (grouped, False, scale)  # renormalise, softmax_after_topk, scale

    def make(generator: torch.Generator) -> Calls:
        def drawn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=generator.device)

        def forward() -> Any:
            choice = (B, K, score, *groups, 2 if grouped else 1)
            return ops.router(logits_TE, bias_E, None, *choice, *how, grouped)

        logits_TE, bias_E = drawn(T, E), 0.01 * drawn(E) if grouped else None
        gradients, last = (drawn(T, K), drawn(B, E), None, None), (logits_TE, forward()[1], B, score, *how)
        library = logits_TE, drawn(T, E), bias_E, K, groups, score, scale
        return {
            "forward": forward,
            "backward": lambda: ops.router_backward(*gradients, *last),
            **alternatives("router", generator.device, *library),
        }

    logits, slots, sums, bias = T * E * F32, T * K * F32, B * E * F32, E * F32 * grouped
    forward_results = ("weight", "expert", "counts", "share_sum", "z_sum", "entropy_sum")
    amounts = {
        f"router/{label}/forward": (logits + bias + 2 * slots + 2 * sums + 2 * F32, forward_results),
        f"router/{label}/backward": (2 * logits + 2 * slots + sums, ("dlogits",)),
    }
    names = ("T", "B", "E", "K", "num_groups", "topk_groups")
    return _own(make, dict(zip(names, (T, B, E, K, *groups), strict=True)), "bytes", amounts)


def _attention(label: str, device: torch.device, *size: int) -> Iterator[Operation]:
    B, S, H, G, Q, V = size
    backends = ["sdpa", *(each for each in ("flash4", *PARTS) if reason_against(each, device) is None)]

    def make(generator: torch.Generator, direction: str) -> Calls:
        shapes = (B, S, H, Q), (B, S, G, Q), (B, S, G, V)
        q, k, v, d_out = (normal(generator, *shape) for shape in (*shapes, (B, S, H, V)))
        tensors, calls = (d_out, q, k, v), {}
        for backend in backends:
            run = functools.partial(attention, scale=Q**-0.5, backend=AttentionBackend(backend))
            calls[backend] = lazily(either, direction, run, *tensors)
        return calls | alternatives("attention", device, direction, Q**-0.5, *tensors)

    flops = B * H * S * S * (Q + V)  # causal attention halved; four GEMMs of the backward
    shape = dict(zip("BSHGQV", size, strict=True))
    directions = ("forward", flops, ("out",)), ("backward", 2 * flops, ("dq", "dk", "dv"))
    for direction, amount, results in directions:
        made = functools.partial(make, direction=direction)
        yield Operation(f"attention/{label}/{direction}", shape, amount, "FLOPs", results, made)


def _loss(T: int, S: int, D: int, V: int) -> Iterator[Operation]:
    def make(generator: torch.Generator) -> Calls:
        h_TD = normal(generator, T, D).requires_grad_()
        w_VD = normal(generator, V, D, scale=D**-0.5).requires_grad_()
        labels_T = torch.randint(V, (T,), generator=generator, device=generator.device)
        dtotal = torch.full((), 1 / T, device=generator.device)  # one would hide a missing scale

        def step(total: Tensor) -> tuple[Tensor, ...]:
            return total.detach(), *torch.autograd.grad(total, (h_TD, w_VD), dtotal.to(total.dtype))

        return {
            "forward_backward": lambda: step(ops.linear_cross_entropy(h_TD, w_VD, labels_T, -100)[0]),
            **alternatives("loss", generator.device, step, h_TD, w_VD, labels_T),
        }

    flops = 3 * 2 * T * D * V  # logits, and the gradients of both factors
    amounts = {"linear_cross_entropy/forward_backward": (flops, ("total", "dh", "dw"))}
    return _own(make, {"T": T, "S": S, "D": D, "V": V}, "FLOPs", amounts, "peak")


def _fp8_experts(label: str, layer: MlpShape) -> Operation:
    flops = 3 * 3 * 2 * layer.T * layer.K * layer.F * layer.D
    name, sizes = f"fp8_mlp/{label}", _sizes(layer)
    return _forms(name, sizes, flops, lambda device: fp8_choice.Experts(layer, _auto(layer, device)))


def _fp8_dense(label: str, R: int, N: int, K: int) -> Operation:
    sizes = {"R": R, "N": N, "K": K}
    return _forms(f"fp8_linear/{label}", sizes, 3 * 2 * R * N * K, lambda _: fp8_choice.Dense(R, N, K, "fp8"))


def _forms(name: str, shape: dict[str, int], flops: int, of: Callable[[torch.device], Any]) -> Operation:
    def make(generator: torch.Generator) -> Calls:
        each, device = of(generator.device), generator.device
        own = {"bf16" if form == "plain" else form: call for form, call in each.calls(device).items()}
        return own | alternatives(name.partition("/")[0], device, generator, each)

    # Without results to compare, since alternatives round otherwise: tests/ops compares them
    return Operation(name, shape, flops, "fp8 FLOPs", (), make)


def _auto(layer: MlpShape, device: torch.device) -> str:
    return choose_backends("auto", layer, device, None)


def _sizes(layer: MlpShape) -> dict[str, int]:
    return {name: size for name, size in vars(layer).items() if name != "dtype"}


OPS = cases.Suite(
    measure_operations,
    "case: {case} | alternative: {alternative} | median ms: {median_ms:.4f} | "
    "p10 to p90: {p10_ms:.4f} to {p90_ms:.4f} | floor ms: {floor_ms:.4g} | "
    "time / floor: {time_over_floor:.2f} | loop / time: {over_loop:.2f} | "
    "memory MiB: {memory_bytes:Mi*,.0f} {memory_kind}",
    "Times: medians of up to {method[repeats]} calls with cold caches, alternatives in turns. Floors, as "
    "measured on an H200: FLOPs at {method[floor_flops_per_s]:T*.0f} TFLOP/s, those of fp8_mlp and "
    "fp8_linear at {method[floor_fp8_flops_per_s]:T*,.0f}, bytes at {method[floor_bytes_per_s]:T*.1f} TB/s. "
    "loop: eager PyTorch, expert after expert.\n"
    "Memory: kept for the backward beside x and y; peak above the inputs and the gradients dh and dw.",
)
