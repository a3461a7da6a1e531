"""Recording of steps by torch's profiler, or as pipeline timelines."""

from __future__ import annotations

import json
import logging
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from graphmoe.config.schema import ConfigError
from graphmoe.plan.pipeline.simulate import Span, Timeline, timeline_of
from graphmoe.plan.plan import Plan
from graphmoe.run.files import FACTS, PROFILE_FOLDER, STEP, display_path, trace_file
from graphmoe.run.machine import device_name, memory_gib, memory_of
from graphmoe.runtime.capture import Capture
from graphmoe.runtime.host.files import dispensable
from graphmoe.runtime.host.logs import without_text
from graphmoe.runtime.launch.stamps import Heartbeat
from graphmoe.runtime.pipeline.engine import Pipeline
from graphmoe.runtime.pipeline.recorder import FILE_NAME, Recorder, read_timelines, write_timelines
from graphmoe.runtime.ranks import PATIENCE, Mesh, Ranks
from graphmoe.runtime.torch_compat import start_memory_history, stop_memory_history, write_memory_history
from graphmoe.segments import ranges_wanted
from graphmoe.training.floors import floors_of
from graphmoe.training.step_rows import StepClock

log = logging.getLogger(__name__)

# log lines of torch 2.13's profiler, above ERROR: KINETO_LOG_LEVEL=6 would hide errors too
MARKERS = rb"USDT:.*profiler_(start|stop)\n?"
KEPT_STEPS = 20  # most steps in the timeline file


class StepTrace:
    """Records ``profile.steps`` on ``profile.ranks`` with torch's profiler.

    All ranks wait while a recording starts or is written; step times exclude that.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        ranks: Ranks,
        device: torch.device,
        heartbeat: Heartbeat,
        clock: StepClock,
        capture: Capture | None = None,
    ) -> None:
        steps = plan.profile.steps
        self._first, self._last = steps[0], steps[-1]
        self._plan, self._ranks, self._device, self._heartbeat = plan, ranks, device, heartbeat
        self._clock, self._on_gpu = clock, device.type == "cuda"
        self._folder, self._capture = folder / PROFILE_FOLDER, capture
        self._is_wanted = ranks.rank in plan.profile.ranks
        self._is_open = False
        self._profiler: profile | None = None
        self._done: list[int] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if not self._first <= number <= self._last:
            yield
            return
        self._heartbeat.slow(f"step {number}, which is profiled")
        if not self._is_open:
            self._is_open = True
            with self._clock.paused():
                if self._is_wanted:
                    self._profiler = self._started()
                self._ranks.barrier()
        self._done.append(number)
        with ExitStack() as recorded:
            if self._is_wanted:
                recorded.enter_context(ranges_wanted())
                recorded.enter_context(record_function(f"{STEP}{number}"))
            yield
        if number == self._last:
            self.finish()

    def finish(self) -> None:
        """Write an open recording. Collective."""
        if not self._is_open:
            return
        self._is_open = False
        with self._clock.paused():
            written: list[str] = []
            if self._profiler is not None:
                torch.get_device_module(self._device).synchronize()
                self._profiler.add_metadata_json(FACTS, json.dumps(self._facts()))
                written = self._write(self._profiler)
                self._profiler = None
            names = ", ".join(chain.from_iterable(self._ranks.gather(written)))
        log.info("traces of steps %d to %d are in %s: %s", self._done[0], self._done[-1], self._folder, names)
        log.info("to read the traces: python -m graphmoe.trace run=%s", display_path(self._folder.parent))

    def drop(self) -> None:
        """Stop recording without writing, after an error."""
        if self._profiler is not None:
            with without_text(MARKERS):
                self._profiler.stop()
            self._profiler = None
            if self._on_gpu:
                stop_memory_history()

    def _started(self) -> profile:
        torch.get_device_module(self._device).synchronize()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        profiler = profile(activities=kinds, record_shapes=True)
        if self._on_gpu:
            start_memory_history()
        else:
            log.info("profile.steps: a CPU has no history of memory; times are those of the host")
        # torch 2.11 warns that only the last of several windows stays
        with without_text(MARKERS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            profiler.start()
        return profiler

    def _write(self, profiler: profile) -> list[str]:
        with without_text(MARKERS):
            profiler.stop()
        rank, written = self._ranks.rank, list[str]()
        trace, memory = trace_file(rank), f"rank{rank}.memory.pickle"
        with dispensable(self._folder):
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / trace))
            written.append(trace)
            if self._on_gpu:
                write_memory_history(self._folder / memory)
                written.append(memory)
        if self._on_gpu:
            stop_memory_history()
        return written

    def _facts(self) -> dict[str, Any]:
        name, scope = device_name(self._device), self._plan.graph.scope
        return {
            "run": self._plan.run.name,
            "rank": self._ranks.rank,
            "num_ranks": self._ranks.size,
            "steps": self._done,
            "device": name,
            "graph_scope": scope if isinstance(scope, str) else [*scope],
            "compiled": self._plan.compile.enabled,
            "torch": torch.__version__,
            "host": platform.node(),
            "experts_on": self._plan.layout.group("ep_etp", self._ranks.rank),
            "memory": memory_gib(self._device) * 2**30 / memory_of(self._device),
            "graph": self._capture.made_by if self._capture else [],
            "floors": floors_of(self._plan, self._ranks.rank, name),
        }


class PipelineProfile:
    """Records timelines of logged pipeline steps; rank 0 writes them.

    A recorded step begins with a device sync and a barrier; step times exclude them.
    """

    earlier_peak_gib = 0.0  # peak GiB before the last counter reset; 0.0 without a reset

    def __init__(
        self,
        plan: Plan,
        pipeline: Pipeline,
        device: torch.device,
        mesh: Mesh,
        clock: StepClock,
        folder: Path,
        done: int,
    ) -> None:
        """Keep the file's recorded steps up to ``done``, drop later ones. Collective."""
        assert plan.pipeline is not None
        self._interval, self._last = plan.train.log_interval, plan.train.steps
        self._table, self._folder, self._clock = plan.pipeline.table, folder, clock
        self._pipeline, self._device = pipeline, device
        self._place = mesh.index("pp")
        groups = [list(group) for group in mesh.layout.groups("pp")]
        self._group, _ = dist.new_subgroups_by_enumeration(groups, backend="gloo", timeout=PATIENCE)
        self._is_wanted = 0 in mesh.layout.group("pp", mesh.rank)
        self._recorder = Recorder(self._device, lambda: dist.barrier(self._group))
        self._timelines = self._earlier(done) if mesh.rank == 0 else {}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if not self._is_wanted or (number % self._interval and number != self._last):
            yield
            return
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            self.earlier_peak_gib = max(self.earlier_peak_gib, memory_gib(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        self._pipeline.recorder = self._recorder
        try:
            yield
        finally:
            self._pipeline.recorder = None
        with self._clock.paused():
            spans = self._recorder.spans(self._place)
            peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else None
            self._keep(number, _Part(platform.node(), self._recorder.began_ns, spans, peak))

    def _keep(self, number: int, part: _Part) -> None:
        first = self._place == 0
        parts: list[_Part] | None = [part] * self._table.placement.num_ranks if first else None
        dist.gather_object(part, parts, group=self._group, group_dst=0)
        if parts is None:
            return
        peaks = [part.peak_bytes for part in parts if part.peak_bytes is not None]
        self._timelines[number] = timeline_of(self._table, in_common_time(parts), peaks or None)
        for step in [*self._timelines][:-KEPT_STEPS]:
            del self._timelines[step]
        with dispensable(self._folder / FILE_NAME):
            write_timelines(self._folder / FILE_NAME, self._timelines)

    def _earlier(self, done: int) -> dict[int, Timeline]:
        if not (path := self._folder / FILE_NAME).exists():
            return {}
        try:
            found = read_timelines(path)
        except ConfigError as error:
            log.warning("%s; this run overwrites the file", error)
            return {}
        return {
            step: timeline
            for step, timeline in found.items()
            if step <= done and replace(timeline.table, ranks=self._table.ranks) == self._table
        }


class _Part(NamedTuple):
    host: str
    began_ns: int
    spans: list[Span]
    peak_bytes: int | None


def in_common_time(parts: Sequence[_Part]) -> list[Span]:
    """Return all ranks' spans on one clock."""
    # Clocks of several hosts differ by more than the ends of a barrier.
    first = parts[0]
    one_host = all(part.host == first.host for part in parts)
    found = []
    for part in parts:
        moved = (part.began_ns - first.began_ns) / 1e3 if one_host else 0.0
        found += [Span(s.rank, s.track, s.step, s.start + moved, s.end + moved) for s in part.spans]
    return found
