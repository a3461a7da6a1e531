"""Recording of steps with torch's profiler, and of the history of the GPU's memory in them."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from graphmoe.config.schema import RunConfig
from graphmoe.plan.costs.hardware import peak_tflops
from graphmoe.run.files import display_path
from graphmoe.run.machine import device_name
from graphmoe.run.records import FACTS, PROFILE_FOLDER, STEP, trace_file
from graphmoe.runtime.host.files import dispensable
from graphmoe.runtime.launch.stamps import Heartbeat
from graphmoe.runtime.ranks import Ranks
from graphmoe.runtime.torch_compat import (
    start_memory_history,
    stop_memory_history,
    write_memory_history,
)
from graphmoe.segments import ranges_wanted
from graphmoe.training.step_rows import StepClock

log = logging.getLogger(__name__)


def memory_file(rank: int) -> str:
    """Name of a rank's history of memory."""
    return f"rank{rank}.memory.pickle"


class StepTrace:
    """Recorder of the steps of ``profile.steps`` on the ranks of ``profile.ranks``.

    Before the first one all ranks wait until all profilers have started, after the last one until all files
    are written; ranks that record wait for their device. Both are pauses of the steps' clock, and other steps
    have nothing of it.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        ranks: Ranks,
        device: torch.device,
        heartbeat: Heartbeat,
        clock: StepClock,
    ) -> None:
        steps = config.profile.steps
        self._first, self._last = steps[0], steps[-1]
        self._config, self._ranks, self._device, self._heartbeat = config, ranks, device, heartbeat
        self._clock = clock
        self._folder = folder / PROFILE_FOLDER
        self._is_wanted = ranks.rank in config.profile.ranks
        self._is_open = False
        self._profiler: profile | None = None
        self._done: list[int] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the block, a step of training, if it is among the steps."""
        if not self._first <= number <= self._last:
            yield
            return
        self._heartbeat.slow(f"step {number}, which is profiled")
        if not self._is_open:
            self._begin()
        self._done.append(number)
        if not self._is_wanted:
            yield
        else:
            with ranges_wanted(), record_function(f"{STEP}{number}"):
                yield
        if number == self._last:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded, if a window of steps is open. A collective."""
        if not self._is_open:
            return
        self._is_open = False
        with self._clock.paused():
            written: list[str] = []
            if self._profiler is not None:
                self._synchronize()
                self._profiler.add_metadata_json(FACTS, json.dumps(self._facts()))
                written = self._write(self._profiler)
                self._profiler = None
            names = ", ".join(chain.from_iterable(self._ranks.gather(written)))
        log.info("steps %d to %d are in %s: %s", self._done[0], self._done[-1], self._folder, names)
        log.info("python -m graphmoe.trace run=%s reads them", display_path(self._folder.parent))

    def drop(self) -> None:
        """Stop recording and write nothing: the run ends with an error."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            if self._on_gpu:
                stop_memory_history()

    def _begin(self) -> None:
        """Open the window of steps. A collective."""
        self._is_open = True
        with self._clock.paused():
            if self._is_wanted:
                self._synchronize()
                self._profiler = self._started()
            self._ranks.barrier()

    def _started(self) -> profile:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        profiler = profile(activities=kinds, record_shapes=True)
        if self._on_gpu:
            start_memory_history()
        else:
            log.info("profile.steps: a CPU has no history of memory; times are those of the host")
        with warnings.catch_warnings():  # torch 2.11 says that of several windows the last one stays
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            profiler.start()
        return profiler

    def _write(self, profiler: profile) -> list[str]:
        """Write this rank's files; returns their names."""
        profiler.stop()
        written: list[str] = []
        with dispensable(self._folder):
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / trace_file(self._ranks.rank)))
            written.append(trace_file(self._ranks.rank))
            if self._on_gpu:
                write_memory_history(self._folder / memory_file(self._ranks.rank))
                written.append(memory_file(self._ranks.rank))
        if self._on_gpu:
            stop_memory_history()
        return written

    def _facts(self) -> dict[str, Any]:
        """Return the facts of the run that graphmoe.trace reads."""
        name = device_name(self._device)
        scope = self._config.graph.scope
        return {
            "run": self._config.run.name,
            "rank": self._ranks.rank,
            "num_ranks": self._ranks.size,
            "steps": self._done,
            "device": name,
            "peak_tflops": self._config.log.peak_tflops or peak_tflops(name),
            "graph_scope": scope if isinstance(scope, str) else [*scope],
            "compiled": self._config.compile.enabled,
            "torch": torch.__version__,
        }

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
