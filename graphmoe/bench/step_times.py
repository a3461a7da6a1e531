"""Times of whole training steps of a run, idle time of the device, memory, kernels."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from graphmoe.config.schema import RunConfig
from graphmoe.model.attention import check_backend
from graphmoe.plan.plan import plan_of
from graphmoe.run.machine import open_device
from graphmoe.runtime.host.logs import Progress
from graphmoe.runtime.host.tuning import GarbageCollection
from graphmoe.trace.gpu import length
from graphmoe.training.start_state import check_memory
from graphmoe.training.trainer import Trainer

UNREAD = (
    "train.val_batches=0",
    "checkpoint=none",
    "checkpoint.interval=0",
    "log.tensorboard=false",
    "log.report=false",
    "log.progress=false",
)
"""Overrides of every run, so that only steps are timed."""
WARM_UP_STEPS = 3
"""After those of graph.warmup_steps; graphs are made in the first of them."""
HOST_STEPS = 7
"""Steps that start from an idle device, for the time of the host."""
PROFILED_STEPS = 3
NUM_KERNELS = 10
NAME_LENGTH = 200
"""Characters of a kernel's name that are kept."""


class Activity(NamedTuple):
    """A kernel, copy or memset of the device; start and end in microseconds."""

    name: str
    start: float
    end: float


@dataclass
class StepTimes:
    """Measured steps. Without a GPU there are times of the host alone; without capture no graphs."""

    samples_ms: list[float] = field(default_factory=list)
    """From one step's end to the next one's, by the device's clock, while the host runs ahead."""
    host_samples_ms: list[float] = field(default_factory=list)
    """Until the host is back from a step that it started with the device idle."""
    busy_ms: float | None = None
    """Time per step in which the device runs anything, from a profile."""
    kernels: list[dict[str, str | float]] = field(default_factory=list)
    """Name, calls and milliseconds per step of those with the most time."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    pool_bytes: int | None = None
    graphs: int | None = None
    capture_s: float | None = None


def measure(config: RunConfig, folder: Path, repeats: int) -> StepTimes:
    """Train in this process, whose device must hold nothing else, and time ``repeats`` steps."""
    device = open_device(config.run.device)
    plan = plan_of(config, 1)
    check_memory(plan, device)
    check_backend(config.model, device.type)
    silent = Progress(Console(stderr=True), config.train.steps, wanted=False)
    trainer = Trainer(plan, folder, silent)
    with ExitStack() as stack:
        stack.callback(trainer.loader.close)
        stack.callback(trainer.metrics.close)
        stack.enter_context(GarbageCollection(config.host))
        for _ in range(config.graph.warmup_steps + WARM_UP_STEPS):
            trainer._train_step()
        return _measured(trainer, device, repeats)


def _measured(trainer: Trainer, device: torch.device, repeats: int) -> StepTimes:
    step, on_gpu = trainer._train_step, device.type == "cuda"
    _synchronize(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    times = StepTimes(_step_ms(step, repeats, device))
    if on_gpu:
        times.peak_allocated_bytes = torch.cuda.max_memory_allocated(device)
        times.peak_reserved_bytes = torch.cuda.max_memory_reserved(device)
    times.host_samples_ms = _host_ms(step, device)
    if capture := trainer.execution.capture:
        times.pool_bytes = capture.maker.pool_bytes()
        times.graphs, times.capture_s = capture.report.graphs, capture.report.seconds
    if on_gpu:
        activities = _profiled(step, device)
        times.busy_ms = (
            length((a.start, a.end) for a in activities) / PROFILED_STEPS / 1e3 if activities else None
        )
        times.kernels = largest(activities, PROFILED_STEPS)
    return times


def _step_ms(step: Callable[[], None], count: int, device: torch.device) -> list[float]:
    """Milliseconds of steps that are queued one after the other without a wait; on a CPU of the host."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [(end - start) * 1e3 for start, end in pairwise(marks)]
    step()  # finds the device idle, as the others do not
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def _host_ms(step: Callable[[], None], device: torch.device) -> list[float]:
    samples = []
    for _ in range(HOST_STEPS):
        _synchronize(device)
        started = time.perf_counter()
        step()
        samples.append((time.perf_counter() - started) * 1e3)
    _synchronize(device)
    return samples


def _profiled(step: Callable[[], None], device: torch.device) -> list[Activity]:
    """Activities of the device in `PROFILED_STEPS` steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize(device)
    return [
        Activity(event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def largest(activities: Iterable[Activity], steps: int) -> list[dict[str, str | float]]:
    """The `NUM_KERNELS` names with the most time; calls and milliseconds are those of one step."""
    durations: dict[str, list[float]] = defaultdict(list)
    for activity in activities:
        durations[activity.name].append(activity.end - activity.start)
    names = sorted(durations, key=lambda name: -sum(durations[name]))[:NUM_KERNELS]
    return [
        {
            "name": name[:NAME_LENGTH],
            "calls": round(len(durations[name]) / steps, 2),
            "ms": round(sum(durations[name]) / steps / 1e3, 4),
        }
        for name in names
    ]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
