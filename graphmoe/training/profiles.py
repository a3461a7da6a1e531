"""All that records steps of a run, as ``profile.*`` asks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from graphmoe.plan.plan import Plan
from graphmoe.run.machine import open_device
from graphmoe.runtime.ranks import Mesh, Ranks
from graphmoe.training.heartbeat import Heartbeat
from graphmoe.training.micro_batches import MicroBatches
from graphmoe.training.pipelined import Pipelined
from graphmoe.training.profile_pipeline import PipelineProfile
from graphmoe.training.profile_steps import StepTrace
from graphmoe.training.step_rows import StepClock

log = logging.getLogger(__name__)


class Profiles:
    """What records steps, several things or none."""

    def __init__(self, pipeline: PipelineProfile | None, trace: StepTrace | None) -> None:
        self._pipeline, self._trace = pipeline, trace
        self._all: Sequence[PipelineProfile | StepTrace] = [p for p in (pipeline, trace) if p is not None]

    @property
    def earlier_peak_gib(self) -> float:
        """The most memory in use before counting it began anew; 0.0 where it never did."""
        return self._pipeline.earlier_peak_gib if self._pipeline else 0.0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step of training is the block."""
        with ExitStack() as stack:
            for each in self._all:
                stack.enter_context(each.step(number))
            yield

    def finish(self) -> None:
        """There are no more steps: write what was recorded of those that came. A collective."""
        if self._trace:
            self._trace.finish()

    def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The loop is over, by an error maybe."""
        if self._trace:
            self._trace.drop()


def profiles_of(
    plan: Plan,
    micro_batches: MicroBatches,
    mesh: Mesh,
    ranks: Ranks,
    heartbeat: Heartbeat,
    clock: StepClock,
    folder: Path,
    done: int,
) -> Profiles:
    """What records steps of a run after the first ``done``, in pauses of the steps' clock. A collective."""
    pipeline = trace = None
    config = plan.config
    if plan.pipeline is not None and config.profile.pipeline:
        assert isinstance(micro_batches, Pipelined)
        pipeline = PipelineProfile(config, plan.pipeline, micro_batches, mesh, clock, folder, done)
    if steps := config.profile.steps:
        if done >= steps[-1]:
            log.info("profile.steps=%s: the run goes on after step %d, nothing is recorded", steps, done)
        else:
            trace = StepTrace(config, folder, ranks, open_device(config.run.device), heartbeat, clock)
    return Profiles(pipeline, trace)
