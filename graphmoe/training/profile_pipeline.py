"""Recording of a pipeline's logged steps as timelines in pipeline.json."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from graphmoe.config.schema import ConfigError
from graphmoe.plan.pipeline.simulate import Span, Timeline, timeline_of
from graphmoe.plan.plan import Plan
from graphmoe.run.machine import memory_gib
from graphmoe.runtime.host.files import dispensable
from graphmoe.runtime.pipeline.recorder import FILE_NAME, Recorder, read_timelines, write_timelines
from graphmoe.runtime.ranks import PATIENCE, Mesh
from graphmoe.training.pipelined import Pipelined
from graphmoe.training.step_rows import StepClock

log = logging.getLogger(__name__)

KEPT_STEPS = 20
"""The last recorded ones, which the file holds."""


class PipelineProfile:
    """Recorder of logged steps of the pipeline of rank 0; other ranks do nothing.

    Recorded steps begin with a wait for the device and all ranks, and are brought together in a pause of the
    steps' clock; no other step has anything of it.
    """

    earlier_peak_gib = 0.0
    """The most memory in use before counting it began anew; 0.0 where it never did."""

    def __init__(
        self,
        plan: Plan,
        micro_batches: Pipelined,
        mesh: Mesh,
        clock: StepClock,
        folder: Path,
        done: int,
    ) -> None:
        """Keep steps up to ``done`` of the folder's file. A collective."""
        assert plan.pipeline is not None
        self._interval, self._last = plan.config.train.log_interval, plan.config.train.steps
        self._table, self._folder, self._clock = plan.pipeline.table, folder, clock
        self._pipeline, self._device = micro_batches.pipeline, micro_batches.device
        self._place = mesh.index("pp")
        groups = mesh.layout.groups("pp")
        self._group, _ = dist.new_subgroups_by_enumeration(
            [list(group) for group in groups], backend="gloo", timeout=PATIENCE
        )
        self._is_wanted = 0 in mesh.layout.group("pp", mesh.rank)
        self._recorder = Recorder(self._device, lambda: dist.barrier(self._group))
        self._timelines = self._earlier(done) if mesh.rank == 0 else {}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the block, a step of training, if it is a logged one."""
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
        """Bring the parts of all ranks to the first, which writes them. A collective of the pipeline."""
        first = self._place == 0
        parts: list[_Part] | None = [part] * self._table.placement.num_ranks if first else None
        dist.gather_object(part, parts, group=self._group, group_dst=0)
        if parts is None:
            return
        self._timelines[number] = self._timeline(parts)
        for step in [*self._timelines][:-KEPT_STEPS]:
            del self._timelines[step]
        with dispensable(self._folder / FILE_NAME):
            write_timelines(self._folder / FILE_NAME, self._timelines)

    def _timeline(self, parts: Sequence[_Part]) -> Timeline:
        table = self._table
        peaks = [part.peak_bytes for part in parts if part.peak_bytes is not None]
        return timeline_of(
            table.schedule, table.placement, table.num_micro_batches, in_common_time(parts), peaks or None
        )

    def _earlier(self, done: int) -> dict[int, Timeline]:
        """Read the timelines of earlier steps, where they are of the same schedule."""
        if not (path := self._folder / FILE_NAME).exists():
            return {}
        try:
            found = read_timelines(path)
        except ConfigError as error:
            log.warning("%s, and is written anew", error)
            return {}
        table = self._table
        same = table.schedule, table.placement, table.num_micro_batches
        return {
            step: timeline
            for step, timeline in found.items()
            if step <= done and (timeline.schedule, timeline.placement, timeline.num_micro_batches) == same
        }


class _Part(NamedTuple):
    """One rank's recording of a step."""

    host: str
    began_ns: int
    spans: list[Span]
    """From its own zero."""
    peak_bytes: int | None
    """The most that was allocated; None on a CPU."""


def in_common_time(parts: Sequence[_Part]) -> list[Span]:
    """Return the spans of all ranks from one zero.

    On one host by its clock; clocks of several differ by more than ranks do in leaving a barrier.
    """
    first = parts[0]
    one_host = all(part.host == first.host for part in parts)
    found = []
    for part in parts:
        moved = (part.began_ns - first.began_ns) / 1e3 if one_host else 0.0
        found += [Span(s.rank, s.track, s.step, s.start + moved, s.end + moved) for s in part.spans]
    return found
