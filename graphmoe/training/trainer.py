"""Training loop: batches -> forward and backward -> optimizer step -> metrics -> checkpoints.

Each rank runs it on its own micro-batches; rank 0 writes the run's folder. The host never syncs the device
inside a step: it reads metrics at logging steps, of captured steps one step later.
"""

import itertools
import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.config.ranges import number_of
from graphmoe.data import Corpus, Loader
from graphmoe.model.transformer import Transformer
from graphmoe.optim.base import StepOptimizer
from graphmoe.plan.plan import Plan
from graphmoe.run.files import display_path
from graphmoe.run.machine import memory_gib, seconds_since_command, taken_gib
from graphmoe.runtime.dispatch import close_dispatcher
from graphmoe.runtime.host.logs import FILE_ONLY, Progress
from graphmoe.runtime.host.signals import StopSignal
from graphmoe.runtime.host.tuning import GarbageCollection
from graphmoe.runtime.launch.stamps import Heartbeat, wait_for
from graphmoe.runtime.ranks import PATIENCE, Ranks
from graphmoe.training.evaluation import Validation
from graphmoe.training.executor import Execution
from graphmoe.training.log_lines import StepLog
from graphmoe.training.metrics import HostTimes, MetricsWriter, Throughput, to_json
from graphmoe.training.profile import PipelineProfile, StepTrace
from graphmoe.training.replicas import ReplicaCheck
from graphmoe.training.saves import Saves, state_of
from graphmoe.training.slow_ranks import SlowRanks
from graphmoe.training.step import Steps
from graphmoe.training.step_rows import StepRow

log = logging.getLogger(__name__)

OUT_OF_TIME = signal.SIGALRM.name  # what ranks tell each other after train.max_hours


@dataclass(eq=False)
class Trainer:
    """Parts of a run and its loop, made by `graphmoe.training.setup.build_trainer`."""

    plan: Plan
    folder: Path
    progress: Progress
    ranks: Ranks
    device: torch.device
    corpus: Corpus
    loader: Loader
    model: Transformer
    optimizer: StepOptimizer
    saves: Saves
    step: int  # last launched step
    execution: Execution
    heartbeat: Heartbeat
    steps: Steps
    validation: Validation
    trace: StepTrace | None  # None if no ``profile.steps`` are left
    pipeline_profile: PipelineProfile | None
    metrics: MetricsWriter | None  # writer of rank 0
    # writes the weights at the end, and calls its argument while it advances; collective
    export: Callable[[Callable[[], None]], None] | None = None
    replicas: ReplicaCheck | None = None  # None without ``checkpoint.replica_check``
    stopped_by: str | None = None  # signal that ended the run early
    first_step_s: float | None = None  # seconds from the command to the end of its first step
    # this rank's peak, and device memory in use after the last step, in GiB
    memory: tuple[float, float] = 0.0, 0.0

    def __post_init__(self) -> None:
        self.rows, self.host_times, self.step_log = self.steps.rows, HostTimes(), StepLog(self.plan)
        self.throughput, self.stop_flag = Throughput.of_run(self.plan, self.device), StopFlag(self.ranks)
        self.slow_ranks = SlowRanks(self.ranks, self.plan.layout, self.device)
        self._first = self.step + 1
        self._pending: tuple[int, float] | None = None  # last step with unwritten metrics, and its epoch

    def run(self) -> bool:
        """Train to the last step or to a signal; return whether the run is finished."""
        log.info(self.throughput.describe(), extra=FILE_ONLY)
        with ExitStack() as stack:
            stop = stack.enter_context(StopSignal())
            garbage = stack.enter_context(GarbageCollection(self.plan.host))
            stack.callback(self.corpus.bad_records.log_total, "this run's data")
            for end in (self.corpus.check, self.metrics, self.saves.store, self.loader):
                if end is not None:
                    stack.callback(end.close)
            stack.callback(self.execution.release_graphs)
            stack.push(self.heartbeat.leave)
            if self.trace:
                stack.callback(self.trace.drop)
            stopped_by = self._loop(stop, garbage)
            if self.trace:
                self.trace.finish()
            self._flush()
            self.memory = self._peak_gib(), taken_gib(self.device)
            finished = self.step >= self.plan.train.steps
            if self.step not in self.saves.store.latest():
                self._save(wait=True)
            self.saves.store.wait()
            if self.export:
                note = partial(self.heartbeat.slow, f"the export to {self.plan.checkpoint.export}")
                note()
                self.export(note)
            self.optimizer.gather()  # for readers of the model after training
            self.execution.keep_code()
            if self.ranks.is_first:
                self.execution.write_report()  # more may have been compiled after the first step
        close_dispatcher()
        self.execution.warn_if_uncaptured()
        if stopped_by and not finished:
            self.stopped_by = stopped_by
            log.warning(
                "%s: stopped after step %d%s",
                stopped_by,
                self.step,
                f", which is saved in {display_path(self.folder)}: the same command goes on from there"
                if self.plan.checkpoint.enabled
                else "; nothing is saved (checkpoint.enabled=false)",
            )
        return finished

    def _time_is_over(self) -> str | None:
        hours = self.plan.train.max_hours
        if hours is None or seconds_since_command(with_restarts=True) < hours * 3600:
            return None
        return OUT_OF_TIME

    def _loop(self, stop: StopSignal, garbage: GarbageCollection) -> str | None:
        self.rows.clock.restart()
        while self.step < self.plan.train.steps:
            if stopped_by := self.stop_flag.signal(stop.received or self._time_is_over()):
                of_time = stopped_by == OUT_OF_TIME
                return f"train.max_hours={self.plan.train.max_hours:g}" if of_time else stopped_by
            self.corpus.check.raise_damage()
            self._train_step()
            garbage.after_step(self.step)
        self.stop_flag.close()
        self.corpus.check.raise_damage()
        return None

    def _train_step(self) -> None:
        train, checkpoint = self.plan.train, self.plan.checkpoint
        self.heartbeat.step(self.step + 1)
        if self.rows.waits:
            self.rows.waits.begin(counts=_due(self.step + 1, train.log_interval))
        batches = itertools.islice(self.host_times.waited(self.loader), self.plan.num_micro_batches)
        with ExitStack() as recorded:
            for recorder in (self.pipeline_profile, self.trace):
                if recorder is not None:
                    recorded.enter_context(recorder.step(self.step + 1))
            self.steps(self.step + 1, batches)
        self.step += 1
        if self.replicas:
            self.replicas.add()
        if self.first_step_s is None:
            torch.get_device_module(self.device).synchronize()
            self.first_step_s = seconds_since_command()
            self.host_times.take()  # drops times of the start
            with self.rows.clock.paused():
                if self.ranks.is_first:
                    self.execution.report()
                self.execution.keep_code()
        self.progress.advance(self.step)
        self._report_pending()
        last = self.step == train.steps
        validates = train.val_batches > 0 and (last or self.step == 1 or _due(self.step, train.val_interval))
        saves = last or _due(self.step, checkpoint.interval)
        waits = validates or saves or self.execution.capture is None
        if validates or saves or self.step == self._first or _due(self.step, train.log_interval):
            self._pending = self.step, self.loader.place.epochs
            if waits:
                self.steps.settle()
        if waits:
            self._report_pending()
        if not saves and _due(self.step, checkpoint.replica_check):
            self._compare_replicas()
        if validates:
            self._validate()
        if saves:
            self._save(wait=last)
        if validates or saves:
            self.rows.clock.restart()

    def _flush(self) -> None:
        self.steps.settle()
        self._report_pending()
        if len(self.rows):
            self._pending = self.step, self.loader.place.epochs
            self._report_pending()

    def _report_pending(self) -> None:
        # A captured step is launched before the metrics of the one before are read: the device never idles.
        if self._pending is None:
            return
        (step, epoch), self._pending = self._pending, None
        read = self._write(step, epoch)
        if read[-1].values["longest_skip"] >= self.plan.train.max_nonfinite:
            self.steps.settle()
            if len(self.rows):
                self._write(self.step, self.loader.place.epochs)
            self._compare_replicas()
            self.heartbeat.slow(f"the checkpoint of step {self.step}")
            raise self.saves.after_skips(self.step, self._state(), int(read[-1].values["longest_skip"]))

    def _write(self, step: int, epoch: float) -> list[StepRow]:
        memory, per_step = self._peak_gib(), self.throughput.tokens_per_step
        read = self.rows.read(step)
        self.heartbeat.has_read()
        rows = [to_json(row, self.throughput, row.step * per_step, epoch, memory) for row in read]
        if rows[0]["step"] == self._first:
            rows[0]["start_s"] = self.first_step_s
        elif self.rows.waits and _due(step, self.plan.train.log_interval):
            rows[-1] |= self.slow_ranks.add(step, read[-1].seconds - read[-1].waited_s)
        rows[-1] |= self.host_times.take()
        if self.metrics:
            self.metrics.write(rows, read)
        self.step_log.write(rows, read)
        return read

    def _validate(self) -> None:
        if not self.validation.wanted:
            return
        with self.host_times.of("validation_s"):
            self.optimizer.gather()
            mean, count = self.validation()
            self.optimizer.restore_weights()  # a captured step expects them
        if self.metrics:
            self.metrics.write([{"step": self.step, "val_loss": mean}])
        steps, of = self.plan.train.steps, number_of(count, "micro-batch")
        log.info("step %d/%d  validation loss %.4f (%s)", self.step, steps, mean, of)

    def _state(self) -> dict[str, Any]:
        return state_of(self.step, self.optimizer, self.loader, self.execution.chosen)

    def _compare_replicas(self) -> None:
        if self.replicas and (difference := self.replicas.difference(self.step)):
            raise self.saves.replicas_differ(self.step, difference)

    def _save(self, *, wait: bool = False) -> None:
        self._compare_replicas()
        self.heartbeat.slow(f"the checkpoint of step {self.step}")
        with self.host_times.of("checkpoint_s"):
            self.saves.save(self.step, self._state(), wait=wait)

    def _peak_gib(self) -> float:
        earlier = self.pipeline_profile.earlier_peak_gib if self.pipeline_profile else 0.0
        return max(memory_gib(self.device), earlier)


class StopFlag:
    """Lets all ranks stop after the same step if any got a signal. All ranks call it after the same steps.

    Flags, sent by a dedicated gloo group, are read one step later, so no rank waits.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if ranks.size > 1 else None
        self._sent: tuple[Tensor, dist.Work] | None = None

    def signal(self, received: str | None) -> str | None:
        """Return the signal to stop for, the same on all ranks, one call after any rank received it."""
        if self._group is None:
            return received
        agreed = self.close()
        if agreed is None:
            flag = torch.tensor(signal.Signals[received] if received else 0, dtype=torch.int32)
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._sent = flag, work
        return agreed

    def close(self) -> str | None:
        """Wait for the flags sent last; return the signal that a rank got, if any."""
        if self._sent is None:
            return None
        (flag, work), self._sent = self._sent, None
        wait_for(work.wait)
        return signal.Signals(int(flag)).name if flag else None


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
