"""Rows of metrics.jsonl, expert_load.jsonl and of the trackers."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmoe.config.ranges import number_of
from graphmoe.model.moe_segments import ROUTER_STATS
from graphmoe.model.sizes import flops_per_token
from graphmoe.plan.attention import keys_per_query
from graphmoe.plan.costs.hardware import peak_tflops
from graphmoe.plan.plan import Plan
from graphmoe.run.files import EXPERT_LOADS_FILE, METRICS_FILE
from graphmoe.run.machine import device_name
from graphmoe.run.metrics_file import BESIDE_STEPS, cut_metrics
from graphmoe.runtime.host.files import LineFile
from graphmoe.training.step_rows import CLIPPED, MASKED, RECEIVED, REPLICATED, TRAINED, StepRow
from graphmoe.training.trackers import Trackers

log = logging.getLogger(__name__)


class Throughput(NamedTuple):
    """Rates of a step: tokens/s of all devices, TFLOP/s and MFU per device."""

    tokens_per_step: int
    flops_per_token: float
    peak: float | None  # dense bf16 peak of a device; None if unknown
    num_devices: int = 1
    keys: float = 0.0  # with ``data.document_mask``: keys of a token that ``flops_per_token`` counts
    flops_per_key: float = 0.0  # of a token

    @classmethod
    def of_run(cls, plan: Plan, device: torch.device) -> Throughput:
        keys, flops = keys_per_query(plan.model, plan.seq_len), flops_per_token(plan.model, plan.seq_len)
        return cls(
            plan.train.global_batch_size * plan.seq_len,
            flops,
            plan.log.peak_tflops or peak_tflops(device_name(device)),
            plan.layout.size("world"),
            plan.data.document_mask * keys,
            (flops - flops_per_token(plan.model, 0)) / keys,
        )

    def describe(self) -> str:
        gflop = self.flops_per_token / 1e9
        text = f"TFLOP/s = tokens/s x {gflop:.3f} GFLOP per token (forward and backward)"
        if self.keys:
            text += f" that attends to {self.keys:g} keys, {self.flops_per_key / 1e9:.3g} for each key"
        if self.num_devices > 1:
            text += f" / {self.num_devices} devices"
        if self.peak:
            return f"{text}; MFU = TFLOP/s over {self.peak:g} dense bf16"
        return f"{text}; no MFU: the peak of this device is not known (log.peak_tflops sets it)"

    def of(self, seconds: float, attended_keys: float | None = None) -> dict[str, float | None]:
        """Return the rates of a step; ``attended_keys``: mean of a token, by default without a mask."""
        tokens_per_s, flops = self.tokens_per_step / seconds, self.flops_per_token
        if attended_keys is not None:
            flops += self.flops_per_key * (attended_keys - self.keys)
        tflops = tokens_per_s * flops / 1e12 / self.num_devices
        mfu = tflops / self.peak if self.peak else None
        return {"tokens_per_s": tokens_per_s, "tflops": tflops, "mfu": mfu}


class HostTimes:
    """Host seconds of validation, checkpoints and waits for data."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(BESIDE_STEPS, 0.0)

    def take(self) -> dict[str, float]:
        """Return the seconds by name, and reset them."""
        taken, self._seconds = self._seconds, dict.fromkeys(BESIDE_STEPS, 0.0)
        return taken

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - began

    def waited(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the batches, timing the wait for each."""
        while True:
            with self.of("data_s"):
                batch = next(batches)
            yield batch


class MetricsWriter:
    def __init__(self, folder: Path, plan: Plan, done: int) -> None:
        """Continue after step ``done``; truncates later rows."""
        self._trackers = Trackers(folder, plan, done)
        # After the trackers: if a kill interrupts, the next start still sees which steps were dropped.
        if cut := cut_metrics(folder / METRICS_FILE, done):
            log.info("%s of later steps cut from %s", number_of(cut, "row"), METRICS_FILE)
        self._file = LineFile(folder / METRICS_FILE)
        self._file.append([])  # creates it at the start, for `tail -f`
        self._loads = ExpertLoads(folder, done, plan.train.steps)

    def write(self, rows: list[dict[str, Any]], read: Sequence[StepRow] = ()) -> None:
        """Append rows, with the step results ``read``. A killed process loses no row, a full disk does."""
        if read:
            self._loads.write(read)
        lines = [json.dumps({name: _finite(value) for name, value in row.items()}) for row in rows]
        self._file.append(lines)
        self._trackers.draw(rows)

    def close(self) -> None:
        self._file.close()
        self._loads.close()
        self._trackers.close()


def to_json(
    row: StepRow, throughput: Throughput, tokens: int, epoch: float, memory_gib: float
) -> dict[str, Any]:
    values, of_experts = row.values, dict[str, Any]()
    if len(row.load_LE):
        of_experts = {name: values[name] for name in ROUTER_STATS}
        of_experts |= {"load_max_over_mean": row.load, "rank_load": values["rank_load"]}
    found = {
        "step": row.step,
        **{name: values[name] for name in ("loss", "grad_norm", "lr")},
        **throughput.of(row.seconds, values.get(MASKED[0])),
        "memory_gib": round(memory_gib, 3),
        "step_s": row.seconds,
        "tokens": tokens,
        "epoch": round(epoch, 6),
        "mtp_loss": values["mtp_loss"],
        **of_experts,
        "skipped": bool(values["skipped"]),
        "skipped_total": int(values["skipped_total"]),
    }
    others = RECEIVED[0], *REPLICATED, *MASKED, *CLIPPED
    found |= {name: int(values[name]) for name in TRAINED if name in values}
    return found | {name: values[name] for name in others if name in values}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


MAX_LINES = 200  # most lines per run, to bound the file


class ExpertLoads:
    """Writer of mean expert loads, one line per fixed number of steps."""

    def __init__(self, folder: Path, done: int, total_steps: int) -> None:
        """Continue after step ``done`` of ``total_steps``; truncates later lines."""
        self._file = LineFile(folder / EXPERT_LOADS_FILE)
        cut_metrics(folder / EXPERT_LOADS_FILE, done)
        self._total, self._every = total_steps, -(-total_steps // MAX_LINES)
        self._sum_LE: Tensor | None = None
        self._steps = 0
        self._written = self._read = done

    def write(self, rows: Sequence[StepRow]) -> None:
        """Add the loads of steps; write a line at each multiple of the interval and at the last step."""
        for row in rows:
            if not row.load_LE.numel():
                return
            self._sum_LE = row.load_LE if self._sum_LE is None else self._sum_LE + row.load_LE
            self._steps, self._read = self._steps + 1, row.step
        if self._read // self._every > self._written // self._every or self._read >= self._total:
            self._write_line()

    def close(self) -> None:
        """Flush rows not yet written; a resumed run continues from here."""
        self._write_line()
        self._file.close()

    def _write_line(self) -> None:
        if self._sum_LE is None:
            return
        load = [[round(x, 3) for x in layer] for layer in (self._sum_LE / self._steps).tolist()]
        self._file.append([json.dumps({"step": self._read, "steps": self._steps, "load": load})])
        self._sum_LE, self._steps, self._written = None, 0, self._read
