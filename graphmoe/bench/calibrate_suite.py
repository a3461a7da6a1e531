"""``suite=calibrate``: shares that this machine reaches of its card's peaks, for ``graphmoe.project rates=``.

Suffixes: see `graphmoe.bench.calibrate_cases`.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphmoe.bench import calibrate_cases
from graphmoe.bench.arguments import BenchArgs, compose_config
from graphmoe.bench.calibrate_cases import CalibrateCase, Calls, names_of
from graphmoe.bench.cases import Measured, chosen, free_memory, is_first, keep, one_by_one, reason, table
from graphmoe.bench.dispatch_times import Streams, samples_ms
from graphmoe.bench.own_process import ProcessFailed, in_own_process
from graphmoe.bench.rank_group import RankGroup, RanksFailed, joined_ranks
from graphmoe.bench.step_times import UNREAD, measure
from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.ops.timing import WARM_UP_CALLS, time_in_turns
from graphmoe.plan.costs.activations import DENSE_SEGMENTS, MOE_SEGMENTS
from graphmoe.plan.costs.hardware import CARDS, H200, Card, device_words, peak_tflops

log = logging.getLogger(__name__)
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


@dataclass
class CalibrateRow:
    """Time of one call, and its share of the peak; an error in place of both where it failed."""

    case: str
    rate: str
    call: str
    kind: float
    size: float
    work: float
    """FLOPs or bytes, or 0 where the rate is a time."""
    median_ms: float | None = None
    share: float | None = None
    """Share of the card's peak, for this call alone."""
    value_us: float | None = None
    """Value of a rate that is a time."""
    error: str | None = None


def measure_rates(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=calibrate``."""
    card = card_of_device(device)
    cases = calibrate_cases.calibrate_cases(calibrate_cases.FULL if full else calibrate_cases.TINY)
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    rows: list[CalibrateRow] = []
    if is_first():
        rows += one_by_one(
            chosen(cases, args.only),
            lambda case: run_calibrate_case(case, card, device, args.repeats),
            _brief,
            args.out,
        )
        rows.append(launch_row(device))
        keep(args.out, rows[-1:])
    if is_alone:
        left_out = ["node: one rank sends nothing; start it with torchrun --nproc-per-node=8"]
        own = [] if device.type == "cuda" else ["compile=none"]
        rows.append(host_row(device, args.limit_s, *own))
    else:
        left_out = ["host_us: it is measured by one process; start it with python -m graphmoe.bench"]
        with joined_ranks(device) as ranks:
            rows.append(exchange_row(ranks, card, args.repeats))
    keep(args.out, rows[-1:])
    for line in left_out:
        log.info("left out: %s", line)
    method = {
        "card": card.name,
        "kernels_of_segment": KERNELS_OF_SEGMENT,
        "launched": " ".join(LAUNCHED),
    }
    return rows, left_out, method


def card_of_device(device: torch.device) -> Card:
    """The card whose peaks shares are of; on a CPU an H200. *Raises* ConfigError for any other."""
    if device.type != "cuda":
        return H200
    name = torch.cuda.get_device_name(device)
    for card in CARDS.values():
        if card.name in device_words(name) and peak_tflops(name) == card.tflops:
            return card
    known = ", ".join(card.name for card in CARDS.values())
    raise ConfigError(
        f"suite=calibrate and suite=projection need a card's peaks, and this GPU, {name}, is none that is "
        f"known; run it on a whole one of {known}, those of NVIDIA in the form SXM or HGX: MIG slices, PCIe, "
        "NVL, GH200 and GB200 have other peaks"
    )


def run_calibrate_case(
    case: CalibrateCase, card: Card, device: torch.device, repeats: int
) -> list[CalibrateRow]:
    """Rows of all calls of a case, which take turns. Raises nothing."""
    try:
        calls = case.make(device)
        times = _times(calls, device, repeats)
    except Exception as error:  # whatever a kernel, a compiler or the allocator may raise
        rows = [CalibrateRow(case.name, case.name, "", case.kind, case.size, case.work, error=reason(error))]
    else:
        rows = [_row(case, name, times[name], card) for name in calls]
        del calls
    free_memory(device, after_error=any(row.error for row in rows))
    return rows


def _times(calls: Calls, device: torch.device, repeats: int) -> dict[str, float]:
    for call in calls.values():
        for _ in range(WARM_UP_CALLS):
            call()
    return {name: statistics.median(ms) for name, ms in time_in_turns(calls, repeats, device).items()}


def _row(case: CalibrateCase, name: str, ms: float, card: Card) -> CalibrateRow:
    (rate,) = names_of([name])
    work = case.work * WORK.get(rate, 1)
    peak = card.hbm_tb_per_s * 1e12 if rate == "hbm" else card.tflops * 1e12
    return CalibrateRow(case.name, rate, name, case.kind, case.size, work, ms, work / ms * 1e3 / peak)


def launch_row(device: torch.device) -> CalibrateRow:
    """The least time of kernels that follow each other, times those of a segment. Raises nothing."""
    row = CalibrateRow("kernel", "segment_us", "segment_us", 0, 0, 0)
    try:
        row.value_us = _kernel_us(device) * KERNELS_OF_SEGMENT
    except Exception as error:
        row.error = reason(error)
    return row


def _kernel_us(device: torch.device) -> float:
    numbers = torch.zeros(1024, device=device)

    def kernels() -> None:
        for _ in range(SMALL_KERNELS):
            numbers.add_(1)

    kernels()
    if device.type != "cuda":
        started = time.perf_counter()
        kernels()
        return (time.perf_counter() - started) / SMALL_KERNELS * 1e6
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels()
    graph.replay()
    (times,) = time_in_turns({"kernels": graph.replay}, 10, device).values()
    return statistics.median(times) / SMALL_KERNELS * 1e3


def host_row(device: torch.device, limit_s: float, *words: str) -> CalibrateRow:
    """The host's time in a training step of a small model, over its starts of segments. Raises nothing."""
    row = CalibrateRow("host", "host_us", "host_us", 0, 0, 0)
    try:
        config = compose_config(*LAUNCHED, f"run.device={device.type}", *words)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            times = in_own_process(measure, config, Path(folder), TIMED_STEPS, limit_s=limit_s)
        starts = 2 * num_segments(config.model)
        row.median_ms = statistics.median(times.host_samples_ms)
        row.value_us = row.median_ms * 1e3 / starts
    except (ConfigError, ProcessFailed) as error:
        row.error = " ".join(str(error).split())
    return row


def num_segments(model: ModelConfig) -> int:
    """Segments of a model's forward, the embedding and the loss among them."""
    of_moe = [name for name in MOE_SEGMENTS if model.shared_ffn_size or name != "shared_experts"]
    dense = model.num_dense_layers
    return 2 + dense * len(DENSE_SEGMENTS) + (model.num_layers + model.mtp_depth - dense) * len(of_moe)


def exchange_row(ranks: RankGroup, card: Card, repeats: int) -> CalibrateRow:
    """An all-to-all of all ranks, equal on all of them. Collective. Raises nothing."""
    size = EXCHANGED_BYTES[ranks.device.type] // ranks.size * ranks.size
    out = size * (ranks.size - 1) / ranks.size
    row = CalibrateRow("all_to_all", "node", "node", ranks.size, size, out)
    try:
        row.median_ms = ranks.together(lambda: _exchange_ms(ranks, size, repeats))
        row.share = out / row.median_ms * 1e3 / (card.node_gb_per_s * 1e9)
    except RanksFailed as failed:
        row.error = str(failed)
    return row


def _exchange_ms(ranks: RankGroup, size: int, repeats: int) -> float:
    sent = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
    received = torch.empty_like(sent)
    turns = [(lambda: dist.all_to_all_single(received, sent), None)]
    streams = Streams(ranks.device)
    return statistics.median(samples_ms(ranks, streams, turns, repeats=repeats, captures=False))


def rates_of_rows(rows: Sequence[CalibrateRow]) -> dict[str, Any]:
    """The rates that rows without errors give, as a file of rates has them.

    A rate of several calls takes the work of all over the time of all, at each size.
    """
    found: dict[str, Any] = {}
    of_points: dict[str, dict[tuple[float, float], list[CalibrateRow]]] = {}
    for row in rows:
        if row.error is None and row.value_us is not None:
            found[row.rate] = round(row.value_us, 3)
        elif row.error is None and (row.kind == 0 or row.rate == "node"):
            found[row.rate] = _rounded(row.share)
        elif row.error is None:
            of_points.setdefault(row.rate, {}).setdefault((row.kind, row.size), []).append(row)
    for rate, points in of_points.items():
        found[rate] = [[round(kind, 1), size, _mean(same)] for (kind, size), same in sorted(points.items())]
    return found


def _mean(rows: Sequence[CalibrateRow]) -> float:
    """Mean share of calls of one size, weighted by their time."""
    total_ms = sum(row.median_ms or 0 for row in rows)
    return _rounded(sum((row.share or 0) * (row.median_ms or 0) for row in rows) / total_ms)


def _rounded(share: float | None) -> float:
    """Above 0, and no more than the peak, by which a copy of what a cache holds may seem faster."""
    assert share is not None
    return min(float(f"{share:.4g}"), 1.0)


def render_calibration(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table, and the rates below it."""

    def share(row: dict[str, Any]) -> str:
        return f"{row['share']:.3g}" if row["share"] is not None else f"{row['value_us']:.1f} us"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "case": lambda row: row["case"],
        "call": lambda row: row["call"],
        "ms": lambda row: "" if row["median_ms"] is None else f"{row['median_ms']:.4f}",
        "share of peak": share,
    }
    yield from table(columns, document["rows"], named=2)
    yield (
        f"Shares of the peaks of {document['method']['card']}. python -m graphmoe.project rates=FILE reads "
        f"the document that out=FILE writes; it has {', '.join(document['rates']) or 'no rates'}."
    )


def _brief(rows: Sequence[CalibrateRow]) -> str:
    return ", ".join(
        row.error
        or (f"{row.call} {row.share:.3g}" if row.share is not None else f"{row.call} {row.value_us:.1f}")
        for row in rows
    )
