"""``suite=calibrate``: the shares that this machine reaches of its card's peaks, as a file of rates."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from graphmoe.bench.arguments import BenchArgs, card_of_device
from graphmoe.bench.calibrate_cases import CalibrateCase, full_cases, tiny_cases
from graphmoe.bench.cases import Case, Cell, Measured, Row, Suite, is_first, run_cases
from graphmoe.bench.jobs import UNREAD, compose_config, train
from graphmoe.bench.rank_group import RankGroup, joined_ranks, samples_ms
from graphmoe.config.schema import ModelConfig
from graphmoe.ops.timing import WARM_UP_CALLS, time_in_turns
from graphmoe.plan.costs.activations import DENSE_SEGMENTS, MOE_SEGMENTS
from graphmoe.plan.costs.hardware import Card
from graphmoe.plan.costs.rates import FP8

SMALL_KERNELS = 200
"""Launched one after the other, in one graph on a GPU, for the least time of a kernel."""
KERNELS_OF_SEGMENT = 8
"""Small kernels in the forward of a segment, which take that time whatever they compute; assumed."""
EXCHANGED_BYTES = {"cuda": 256 * 2**20, "cpu": 2**16}
"""Bytes that each rank sends and receives, its own part included."""
LAUNCHED = (
    "model=tiny", "data=synthetic", "graph.scope=none", "train.steps=100", "train.log_interval=100",
    "train.global_batch_size=1", "train.micro_batch_size=1", "data.seq_len=64", "optim.lr=1e-6", *UNREAD,
)  # fmt: skip
"""A step that takes the host longer than the device."""
TIMED_STEPS = 10
WORK = {"attention_backward": 2}
"""Products of a call over those of the case's work, where it is not as many."""


def measure_rates(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=calibrate``: rows of calls, each with its share of the card's peak or ``value_us``."""
    card = card_of_device(device)
    rows: list[Row] = []

    def add(cases: Sequence[Case], only: Sequence[str] = ()) -> None:
        rows.extend(run_cases(cases, lambda row: f"{row['call']} {_share_or_time(row)}", args.out, only))

    if is_first():
        cases = [*(full_cases() if full else tiny_cases())]
        add([_case(case, card, device, args.repeats) for case in cases], args.only)
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


def calibrate_row(case: str, rate: str, call: str, kind: float = 0, size: float = 0, work: float = 0) -> Row:
    """A row without its time; ``work`` are FLOPs or bytes, 0 where the rate is a time itself."""
    about = {"case": case, "rate": rate, "call": call, "kind": kind, "size": size, "work": work}
    return about | {"median_ms": None, "share": None, "value_us": None, "error": None}


def _case(case: CalibrateCase, card: Card, device: torch.device, repeats: int) -> Case:
    def run() -> list[Row]:
        calls, rows = case.make(device), []
        for call in calls.values():
            for _ in range(WARM_UP_CALLS):
                call()
        for name, samples in time_in_turns(calls, repeats, device).items():
            rate, ms = name.partition("/")[0], statistics.median(samples)
            work = case.work * WORK.get(rate, 1)
            products = card.fp8_tflops if rate.startswith(FP8) else card.tflops
            peak = (card.hbm_tb_per_s if rate in ("hbm", "fp8_quantise") else products) * 1e12
            rows.append({"rate": rate, "call": name, "work": work, "median_ms": ms})
            rows[-1]["share"] = work / ms * 1e3 / peak
        return rows

    return Case(case.name, calibrate_row(case.name, case.name, "", case.kind, case.size, case.work), run)


def _time_case(case: str, rate: str, measured: Callable[[], tuple[float | None, float]]) -> Case:
    """A rate that is a time, in us; ``measured`` gives it after milliseconds."""

    def run() -> list[Row]:
        return [dict(zip(("median_ms", "value_us"), measured(), strict=True))]

    return Case(case, calibrate_row(case, rate, rate), run)


def _segment_us(device: torch.device) -> float:
    """The least time of kernels that follow each other, as many as a segment has."""
    numbers = torch.zeros(1024, device=device)

    def kernels() -> None:
        for _ in range(SMALL_KERNELS):
            numbers.add_(1)

    kernels()
    if device.type != "cuda":
        started = time.perf_counter()
        kernels()
        return (time.perf_counter() - started) / SMALL_KERNELS * 1e6 * KERNELS_OF_SEGMENT
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels()
    graph.replay()
    (times,) = time_in_turns({"kernels": graph.replay}, 10, device).values()
    return statistics.median(times) / SMALL_KERNELS * 1e3 * KERNELS_OF_SEGMENT


def _host_times(device: torch.device, limit_s: float) -> tuple[float, float]:
    """The host's milliseconds in a step of a small model, and us for each start of a segment."""
    words = [] if device.type == "cuda" else ["compile=none"]
    overrides = [*LAUNCHED, f"run.device={device.type}", *words]
    starts = 2 * num_segments(compose_config(*overrides).model)
    steps = train(overrides, limit_s).steps[-TIMED_STEPS:]
    median_ms = statistics.median(step["step_s"] for step in steps) * 1e3
    return median_ms, median_ms * 1e3 / starts


def num_segments(model: ModelConfig) -> int:
    """Segments of a model's forward, the embedding and the loss among them."""
    of_moe = [name for name in MOE_SEGMENTS if model.shared_ffn_size or name != "shared_experts"]
    dense = model.num_dense_layers
    return 2 + dense * len(DENSE_SEGMENTS) + (model.num_layers + model.mtp_depth - dense) * len(of_moe)


def exchange_case(ranks: RankGroup, card: Card, repeats: int) -> Case:
    """Return the case of an all-to-all of all ranks, equal on all of them; its run is collective."""
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

    return Case("all_to_all", calibrate_row("all_to_all", "node", "node", ranks.size, size, out), run)


def rates_of_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """The rates that rows without errors give, as a file of rates has them.

    A rate of several calls takes the work of all over the time of all, at each size.
    """
    found: dict[str, Any] = {}
    points: dict[str, dict[tuple[float, float], list[Row]]] = {}
    for row in rows:
        if row["error"] is not None:
            continue
        if row["value_us"] is not None:
            found[row["rate"]] = round(row["value_us"], 3)
        elif row["kind"] == 0 or row["rate"] == "node":
            found[row["rate"]] = _share([row])
        else:
            points.setdefault(row["rate"], {}).setdefault((row["kind"], row["size"]), []).append(row)
    for rate, of_rate in points.items():
        found[rate] = [[round(kind, 1), size, _share(same)] for (kind, size), same in sorted(of_rate.items())]
    return found


def _share(rows: Sequence[Row]) -> float:
    """Mean share of calls of one size, weighted by their time.

    No more than the peak, by which a copy of what a cache holds may seem faster.
    """
    mean = sum(row["share"] * row["median_ms"] for row in rows) / sum(row["median_ms"] for row in rows)
    return min(float(f"{mean:.4g}"), 1.0)


def _share_or_time(row: Row) -> str:
    return f"{row['share']:.3g}" if row["share"] is not None else f"{row['value_us']:.1f} us"


_CALIBRATE_COLUMNS: dict[str, Cell] = {
    "case": "{case}",
    "call": "{call}",
    "ms": "{median_ms:.4f}",
    "share of peak": _share_or_time,
}


def _calibrate_legend(document: dict[str, Any]) -> Iterator[str]:
    yield (
        f"Shares of the peaks of {document['method']['card']}. python -m graphmoe.project rates=FILE reads "
        f"the document that out=FILE writes; it has {', '.join(document['rates']) or 'no rates'}."
    )


CALIBRATE = Suite(measure_rates, _CALIBRATE_COLUMNS, _calibrate_legend)
