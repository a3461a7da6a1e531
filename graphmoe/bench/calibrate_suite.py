"""``suite=calibrate``: the shares that this machine reaches of its card's peak rates, as a file of rates.

Suffixes: T tokens, R rows, I inner, O outer, D hidden, F expert width, V vocabulary, E experts, B sequences,
S their tokens.
"""

import functools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.bench import BenchArgs, card_of_device, cases
from graphmoe.bench.cases import Calls, Case, Operation, Row, mlp_inputs, normal, route
from graphmoe.bench.jobs import UNREAD, train
from graphmoe.bench.rank_group import RankGroup, joined_ranks, samples_ms
from graphmoe.command.hydra import compose_config
from graphmoe.config.schema import AttentionBackend, ModelConfig
from graphmoe.ops import formats, fp8_mlp, linear_cross_entropy, masked_attention  # noqa: F401  # registers
from graphmoe.ops.attention import choose_backend
from graphmoe.ops.delta_net import delta_net
from graphmoe.ops.fp8 import fp8_dtype, quantise, reason_against
from graphmoe.ops.grouped_mlp.choice import MlpShape, call_op, choose_backends
from graphmoe.ops.short_conv import unit_norm
from graphmoe.ops.timing import time_in_turns
from graphmoe.plan.costs.activations import DENSE_SEGMENTS, MOE_SEGMENTS
from graphmoe.plan.costs.hardware import Card
from graphmoe.plan.costs.rates import FP8
from graphmoe.plan.experts import moe_layers, num_dense

SMALL_KERNELS = 200  # one after the other, in one graph on a GPU, for the least time of a kernel
KERNELS_OF_SEGMENT = 8  # small kernels in a segment's forward, which take that time at any size; assumed
EXCHANGED_BYTES = {"cuda": 256 * 2**20, "cpu": 2**16}  # of each rank, its own part included
LAUNCHED = (
    "model=tiny", "data=synthetic", "graph.scope=none", "train.steps=100", "train.log_interval=100",
    "train.global_batch_size=1", "train.micro_batch_size=1", "data.seq_len=64", "optim.lr=1e-6", *UNREAD,
)  # fmt: skip
"""Overrides of a run whose steps are bound by the host."""
TIMED_STEPS = 10
WORK = {"attention_backward": 2, "delta_net_backward": 2}  # products of a call over those of the case's work
BLANK: Row = {"case": "", "rate": "", "call": "", "kind": 0, "size": 0, "work": 0}
BLANK |= dict.fromkeys(("median_ms", "share", "value_us"))
Point = tuple[float, float, float]
"""Class and size as in `graphmoe.plan.costs.rates.CLASSES`, or zeros; FLOPs or bytes of a call."""
ops = torch.ops.graphmoe


def dense(inner: int, outer: int, rows: int, generator: torch.Generator) -> Calls:
    x_RI, dy_RO = normal(generator, rows, inner), normal(generator, rows, outer)
    weight_OI = normal(generator, outer, inner, scale=inner**-0.5)
    total_OI = torch.zeros(outer, inner, device=generator.device)
    return {
        "dense/forward": lambda: x_RI @ weight_OI.T,
        "dense/inputs": lambda: dy_RO @ weight_OI,
        "dense_weights": lambda: total_OI.copy_(dy_RO.T @ x_RI),
        "dense_weights_added": lambda: total_OI.add_(dy_RO.T @ x_RI),
    }


def fp8_dense(inner: int, outer: int, rows: int, generator: torch.Generator) -> Calls:
    """Return fp8 GEMMs of a linear layer; all operands are contiguous along the contracted dimension."""
    product, dtype, one = formats.product, torch.bfloat16, torch.ones((), device=generator.device)
    sizes = (rows, inner), (rows, outer), (outer, inner), (inner, outer), (inner, rows), (outer, rows)
    x, dy, w, w_turned, x_turned, dy_turned = (quantise(normal(generator, *s), fp8_dtype()) for s in sizes)
    total_OI = torch.zeros(outer, inner, device=generator.device)

    def gradient() -> Tensor:
        return torch._scaled_mm(dy_turned[0], x_turned[0].t(), one, one, out_dtype=torch.float32)

    return {
        "fp8_dense/forward": lambda: product(x[0], w[0], x[1], w[1], dtype),
        "fp8_dense/inputs": lambda: product(dy[0], w_turned[0], dy[1], w_turned[1], dtype),
        "fp8_dense_weights": lambda: total_OI.copy_(gradient()),
        "fp8_dense_weights_added": lambda: total_OI.add_(gradient()),
    }


def experts(D: int, F: int, E: int, T: int, K: int, generator: torch.Generator) -> Calls:
    shape = MlpShape(T, D, F, E, K)
    backends = choose_backends("auto", shape, generator.device, None)
    forward, dgrad, wgrad = mlp_inputs(shape, generator, "forward", "dgrad", "wgrad")
    totals = [torch.zeros(size, device=generator.device) for size in ((E, 2 * F, D), (E, D, F))]
    return {
        "grouped/forward": lambda: call_op("forward", *forward, backends),
        "grouped/inputs": lambda: call_op("dgrad", *dgrad, backends),
        "grouped_weights": lambda: call_op("wgrad_into", *wgrad, *totals, backends, False),
        "grouped_weights_added": lambda: call_op("wgrad_into", *wgrad, *totals, backends, True),
    }


def fp8_experts(D: int, F: int, E: int, T: int, K: int, generator: torch.Generator) -> Calls:
    _, plan, weight_TK = route(T, E, K, generator)
    x, dy = (quantise(normal(generator, T, D), fp8_dtype()) for _ in range(2))
    weights = normal(generator, E, 2 * F, D, scale=D**-0.5), normal(generator, E, D, F, scale=F**-0.5)
    rows, columns = ([part for w in weights for part in of(w)] for of in (fp8_mlp.rows, fp8_mlp.columns))
    last = torch.bfloat16
    _, *h, _ = ops.fp8_mlp_forward(*x, *rows, weight_TK, *plan, last, "rowwise")
    _, _, *made, _ = ops.fp8_mlp_dgrad(*dy, *h, *columns, weight_TK, *plan, last, "rowwise")
    sides = (*dy, *x, *made, *plan, *(torch.zeros_like(w, dtype=torch.float32) for w in weights))
    return {
        "fp8_grouped/forward": lambda: ops.fp8_mlp_forward(*x, *rows, weight_TK, *plan, last, "rowwise"),
        "fp8_grouped/inputs": lambda: ops.fp8_mlp_dgrad(*dy, *h, *columns, weight_TK, *plan, last, "rowwise"),
        "fp8_grouped_weights": lambda: ops.fp8_mlp_wgrad_into(*sides, "rowwise", False),
        "fp8_grouped_weights_added": lambda: ops.fp8_mlp_wgrad_into(*sides, "rowwise", True),
    }


def router(hidden: int, num_experts: int, tokens: int, generator: torch.Generator) -> Calls:
    sizes = (tokens, hidden), (num_experts, hidden), (tokens, num_experts)
    h_TD, gate_ED, dlogits_TE = (normal(generator, *each).float() for each in sizes)
    return {
        "router/forward": lambda: h_TD @ gate_ED.T,
        "router/inputs": lambda: dlogits_TE @ gate_ED,
        "router/weights": lambda: dlogits_TE.T @ h_TD,
    }


def attention(H: int, E: int, V: int, S: int, G: int, B: int, generator: torch.Generator) -> Calls:
    """Return attention calls: B sequences of S tokens, H query, G key heads; sizes E of keys, V of values."""
    leaves = [normal(generator, B, S, *size).requires_grad_() for size in ((H, E), (G, E), (G, V))]
    backend = choose_backend(AttentionBackend.auto, generator.device.type, E, V)

    def forward() -> Tensor:
        return masked_attention.attention(*leaves, scale=E**-0.5, backend=backend)

    return _both_ways("attention", forward, leaves)


def states(H: int, V: int, K: int, W: int, S: int, B: int, generator: torch.Generator) -> Calls:
    """Return a delta net's calls: B sequences of S tokens, H key, V value heads; their sizes K and W."""
    q_BSHK, k_BSHK = (unit_norm(normal(generator, B, S, H, K)) for _ in range(2))
    decay_BSV, beta_BSV = (normal(generator, B, S, V).float() for _ in range(2))
    given = q_BSHK, k_BSHK, normal(generator, B, S, V, W), -decay_BSV.abs(), beta_BSV.sigmoid()
    leaves = [x.requires_grad_() for x in given]
    return _both_ways("delta_net", lambda: delta_net(*leaves, None), leaves)


def _both_ways(rate: str, forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Calls:
    out = forward()
    d_out = torch.randn_like(out)
    return {
        f"{rate}_forward": forward,
        f"{rate}_backward": lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True),
    }


def head(hidden: int, vocabulary: int, tokens: int, generator: torch.Generator) -> Calls:
    h_TD, w_VD = normal(generator, tokens, hidden), normal(generator, vocabulary, hidden, scale=hidden**-0.5)
    labels_T = torch.randint(vocabulary, (tokens,), device=generator.device)
    return {"head": lambda: ops.linear_cross_entropy(h_TD, w_VD, labels_T, -100)}


def copy(num_bytes: int, generator: torch.Generator) -> Calls:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=generator.device)
    target = torch.empty_like(source)
    return {"hbm": lambda: target.copy_(source)}


def stored(E: int, N: int, C: int, generator: torch.Generator) -> Calls:
    w_ENC = normal(generator, E, N, C)
    return {"fp8_quantise": lambda: fp8_mlp.rows(w_ENC)}


def _dense_point(inner: int, outer: int, rows: int) -> Point:
    return (inner * outer) ** 0.5, rows, 2 * rows * inner * outer


def _grouped_point(D: int, F: int, E: int, T: int, K: int) -> Point:
    return F, T * K / E, 3 * 2 * T * K * D * F


def _states_point(H: int, V: int, K: int, W: int, S: int, B: int) -> Point:
    return K, B * V, 6 * B * S * V * K * W


def _attention_point(H: int, E: int, V: int, S: int, G: int, B: int) -> Point:
    return E, S, 2 * B * S * H * (E + V) * S / 2


SIDES = (2048, 576), (512, 4096), (2048, 2048), (2048, 5632), (4096, 4096), (7168, 12288)
DENSE = [(*sides, rows) for sides in SIDES for rows in (512, 2048, 4096, 16384)], [(16, 32, 32), (16, 32, 64)]
TOKENS = {"v2_lite": (512, 4096, 16384), "qwen3_30b": (4096, 16384), "v3_ep8": (4096,)}
GROUPED = (
    [(s.D, s.F, s.E, T, s.K) for label, s in cases.layers(True).items() for T in TOKENS[label]],
    [(32, 16, 8, 64, 2)],
)
ROUTERS = [(2048, 64, 512), (2048, 64, 4096), (2048, 64, 16384), (2048, 128, 4096), (7168, 256, 4096)]
ATTENTION = [(16, 192, 128, S, 16, 8192 // S) for S in (512, 2048, 4096)]
ATTENTION += [(32, 128, 128, S, 4, 8192 // S) for S in (1024, 4096, 8192)]
STATES = [(16, 32, 128, 128, 4096, B) for B in (1, 2, 4)]
STATES += [(H, 2 * H, 128, 128, 4096, 1) for H in (1, 8)]
STATES += [(H, 2 * H, 64, 64, 4096, 4) for H in (1, 4, 16)]
HEADS = [(2048, 102400, tokens) for tokens in (512, 4096, 16384)]
TABLE: tuple[tuple[str, Callable[..., Calls], Callable[..., Point], Any, Any], ...] = (
    ("dense/{}x{}/{}", dense, _dense_point, *DENSE),
    ("grouped/{}x{}x{}/{}", experts, _grouped_point, *GROUPED),
    ("router/{}x{}/{}", router, lambda D, E, T: (E, T, 2 * T * D * E), ROUTERS, [(32, 8, 64)]),
    ("attention/{}x{}x{}/{}", attention, _attention_point, ATTENTION, [(2, 24, 16, 32, 2, 2)]),
    ("delta_net/{}x{}x{}x{}/{}x{}", states, _states_point, STATES, [(2, 4, 16, 16, 80, 1)]),
    ("head/{}x{}/{}", head, lambda D, V, T: (D, T, 3 * 2 * T * D * V), HEADS, [(32, 128, 64)]),
    ("copy", copy, lambda size: (0, 0, 2 * size), [(2**31,)], [(2**16,)]),
    ("fp8_dense/{}x{}/{}", fp8_dense, _dense_point, *DENSE),
    ("fp8_grouped/{}x{}x{}/{}", fp8_experts, _grouped_point, *GROUPED),
    ("fp8_quantise/{}x{}x{}", stored, lambda *s: (0, 0, 3 * math.prod(s)), [(64, 2816, 2048)], [(2, 32, 64)]),
)


def operations(full: bool) -> Iterator[Operation]:
    for name, make, point, *sizes in TABLE:
        for each in sizes[0 if full else 1]:
            kind, size, work = point(*each)
            shape, made = {"kind": kind, "size": size}, functools.partial(make, *each)
            yield Operation(name.format(*each), shape, work, "FLOPs", (), made)


def measure_rates(args: BenchArgs, device: torch.device, full: bool) -> cases.Measured:
    card = card_of_device(device)
    rows: list[Row] = []

    def add(made: Sequence[Case], only: Sequence[str] = ()) -> None:
        rows.extend(cases.run_cases(made, lambda row: f"{row['call']} {_of_peak(row)}", args.out, only))

    if cases.is_first():
        add([_case(each, card, device, args.repeats) for each in operations(full)], args.only)
        add([_time_case("kernel", "segment_us", lambda: (None, _segment_us(device)))])
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        left_out = ["node: one rank sends nothing; start it with torchrun --nproc-per-node=8"]
        add([_time_case("host", "host_us", lambda: _host_times(device, args.limit_s))])
    else:
        left_out = ["host_us: it is measured by one process; start it with python -m graphmoe.bench"]
        with joined_ranks(device) as ranks:
            add([exchange_case(ranks, card, args.repeats)])
    method = {"card": card.name, "kernels_of_segment": KERNELS_OF_SEGMENT, "launched": " ".join(LAUNCHED)}
    return rows, left_out, method


def _case(operation: Operation, card: Card, device: torch.device, repeats: int) -> Case:
    name = operation.name

    def work(call: str) -> float:
        return operation.amount * WORK.get(call, 1)

    def peak_ms(call: str) -> float:
        products = card.fp8_tflops if call.startswith(FP8) else card.tflops
        return work(call) / 1e9 / (card.hbm_tb_per_s if call in ("hbm", "fp8_quantise") else products)

    def run() -> list[Row]:
        if name.startswith(FP8) and (why := reason_against(device, "rowwise")):
            raise cases.CaseFailed(f"fp8 {why}")
        rows = []
        for row in operation.rows(device, repeats, peak_ms):
            call, ms = row["alternative"], row.get("median_ms")
            found = {"rate": call.partition("/")[0], "call": call, "work": work(call), "error": row["error"]}
            rows.append(found | {"median_ms": ms, "share": row.get("share_of_floor_rate")})
        return rows

    return Case(name, BLANK | {"case": name, "rate": name, "work": operation.amount} | operation.shape, run)


def _time_case(case: str, rate: str, measured: Callable[[], tuple[float | None, float]]) -> Case:
    def run() -> list[Row]:
        return [dict(zip(("median_ms", "value_us"), measured(), strict=True))]

    return Case(case, BLANK | {"case": case, "rate": rate, "call": rate}, run)


def _segment_us(device: torch.device) -> float:
    numbers = torch.zeros(1024, device=device)

    def kernels() -> None:
        for _ in range(SMALL_KERNELS):
            numbers.add_(1)

    kernels()
    call: Callable[[], object] = kernels
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels()
        call = graph.replay
        call()
    (times,) = time_in_turns({"kernels": call}, 10, device).values()
    return statistics.median(times) / SMALL_KERNELS * 1e3 * KERNELS_OF_SEGMENT


def _host_times(device: torch.device, limit_s: float) -> tuple[float, float]:
    overrides = [*LAUNCHED, f"run.device={device.type}"] + ["compile=none"] * (device.type != "cuda")
    starts = 2 * num_segments(compose_config(*overrides).model)
    steps = train(overrides, limit_s).steps[-TIMED_STEPS:]
    median_ms = statistics.median(step["step_s"] for step in steps) * 1e3
    return median_ms, median_ms * 1e3 / starts


def num_segments(model: ModelConfig) -> int:
    of_moe = [name for name in MOE_SEGMENTS if model.shared_ffn_size or name != "shared_experts"]
    return 2 + num_dense(model) * len(DENSE_SEGMENTS) + len(moe_layers(model)) * len(of_moe)


def exchange_case(ranks: RankGroup, card: Card, repeats: int) -> Case:
    """Return the case of an all-to-all between all ranks; running it is collective."""
    size = EXCHANGED_BYTES[ranks.device.type] // ranks.size * ranks.size
    out = size * (ranks.size - 1) / ranks.size

    def samples() -> list[float]:
        sent = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
        received = torch.empty_like(sent)
        turns = [(lambda: dist.all_to_all_single(received, sent), None)]
        return samples_ms(ranks, turns, repeats=repeats, captures=False)

    def run() -> list[Row]:
        ms = statistics.median(ranks.together(samples))
        return [{"median_ms": ms, "share": out / ms * 1e3 / (card.node_gb_per_s * 1e9)}]

    about = {"rate": "node", "call": "node", "kind": ranks.size, "size": size, "work": out}
    return Case("all_to_all", BLANK | {"case": "all_to_all"} | about, run)


def rates_of_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the content of a rates file, made from the rows without errors."""
    found: dict[str, Any] = {}
    same: dict[tuple[str, float, float], list[Row]] = {}
    for row in rows:
        if row["error"] is None and row["value_us"] is not None:
            found[row["rate"]] = round(row["value_us"], 3)
        elif row["error"] is None:
            same.setdefault((row["rate"], row["kind"], row["size"]), []).append(row)
    for (rate, kind, size), calls in sorted(same.items()):
        # Mean weighted by time, and at most 1: a copy of what a cache holds may seem faster than the peak
        taken = sum(row["share"] * row["median_ms"] for row in calls)
        share = min(float(f"{taken / sum(row['median_ms'] for row in calls):.4g}"), 1.0)
        if kind == 0 or rate == "node":
            found[rate] = share
        else:
            found.setdefault(rate, []).append([round(kind, 1), size, share])
    return found


def _of_peak(row: Row) -> str:
    return f"{row['share']:.3g}" if row["share"] is not None else f"{row['value_us']:.1f} us"


CALIBRATE = cases.Suite(
    measure_rates,
    "case: {case} | call: {call} | ms: {median_ms:.4f} | share of peak: {of_peak}",
    "Shares of the peaks of {method[card]}. python -m graphmoe.project rates=FILE reads the document that "
    "out=FILE writes; its rates: {rates}.",
    lambda row: row | {"of_peak": _of_peak(row)},
)
