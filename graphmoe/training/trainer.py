"""The training loop: batches -> forward and backward -> optimizer step -> metrics -> checkpoints.

Every rank of a job runs it alike, each on its micro-batches; rank 0 writes what the run's folder gets.
The host never waits for the device inside a step; it reads the metrics of the last steps at logging
steps, a step later where steps are captured, and only then learns of skipped steps.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from graphmoe.checkpoint import CheckpointStore
from graphmoe.config.masking import to_plain
from graphmoe.config.schema import ConfigError
from graphmoe.data import Corpus, Loader, open_data
from graphmoe.model.flops import flops_per_token
from graphmoe.ops.collectives import use_groups
from graphmoe.plan.plan import Plan
from graphmoe.run.files import METRICS_FILE
from graphmoe.run.machine import (
    device_name,
    memory_gib,
    open_device,
    seconds_since_process_start,
    taken_gib,
)
from graphmoe.run.metrics_file import cut_metrics
from graphmoe.run.weights import explained_mismatch, load_weights
from graphmoe.runtime.capture.step import CapturedRun
from graphmoe.runtime.dispatch import close_dispatcher, open_dispatcher
from graphmoe.runtime.host.logs import Progress
from graphmoe.runtime.host.signals import StopSignal
from graphmoe.runtime.host.tuning import GarbageCollection
from graphmoe.runtime.launch.stamps import Heartbeat
from graphmoe.runtime.ranks import Mesh, Ranks
from graphmoe.runtime.torch_compat import tensors_of
from graphmoe.training.build import build
from graphmoe.training.executor import Execution
from graphmoe.training.metrics import MetricsWriter, NoMetrics, Throughput, log_line, to_json
from graphmoe.training.pipelined import Pipelined, micro_batches_of
from graphmoe.training.profile_pipeline import PipelineProfile
from graphmoe.training.profile_steps import StepTrace
from graphmoe.training.rerun import RetryingSteps, receive_ladder
from graphmoe.training.saves import Saves
from graphmoe.training.start_state import named_source, random_state, restore_random_state, seed_everything
from graphmoe.training.step import TrainStep
from graphmoe.training.step_rows import StepRow, StepRows
from graphmoe.training.stop import StopFlag
from graphmoe.training.validation import Validation

log = logging.getLogger(__name__)


class Trainer:
    """Model, optimizer, data and checkpoints of one run, and the loop over them."""

    def __init__(self, plan: Plan, folder: Path, progress: Progress, ranks: Ranks | None = None) -> None:
        """Build all parts, and load the state to start from. A collective, as all that follows."""
        config = plan.config
        assert config.data.seq_len is not None
        self.plan, self.config, self.folder, self.progress = plan, config, folder, progress
        self.ranks = ranks or Ranks()
        self.mesh = Mesh(plan.layout)
        use_groups(self.mesh)
        self.device = open_device(config.run.device)
        open_dispatcher(plan, self.mesh, self.device)
        seed_everything(config.train.seed, config.precision, self.device)
        self.corpus: Corpus = open_data(
            config.data,
            seq_len=config.data.seq_len,
            vocab_size=config.model.vocab_size,
            check=self.ranks.local_index == 0,
        )
        self.model, self.optimizer = build(plan, self.device, self.mesh)
        self.execution = Execution(plan, self.device, self.optimizer, self.ranks)
        self.loader = self._loader()
        self.store = CheckpointStore(folder / "checkpoints", config.checkpoint)
        self.saves = Saves(self.store, config, self.ranks)
        self.rows = StepRows(
            min(config.train.log_interval, config.train.steps) + 2,  # those of the steps launched meanwhile
            (self.model.num_moe_layers, config.model.num_experts),
            self.device,
            planned=self.model.dispatcher is not None and self.model.dispatcher.capacity is not None,
        )
        self.throughput = self._throughput()
        self.stop_flag = StopFlag(self.ranks)
        self.capture = self.execution.capture
        first_steps = self.capture.warmup_steps + 1 if self.capture else 1
        self.heartbeat = Heartbeat(config.launch.hang_timeout_s, first_steps)
        self._pending: tuple[int, float] | None = None
        """Last step whose metrics are due to be written, and the epoch after it."""
        self.step = 0
        self.first_step_s: float | None = None
        self.memory = 0.0, 0.0
        """Peak of this rank, and what was taken of its device after the last step, in GiB."""
        self.stopped_by: str | None = None
        """Name of the signal that ended the run early, if one did."""
        self.execute = self.optimizer.executor(self.execution.start(folder, self._restore()))
        micro_batches = micro_batches_of(
            plan, self.model, self.execute, self.mesh, self.execution.stage_options()
        )
        self.train_step = TrainStep(plan, self.model, self.optimizer, micro_batches, self.mesh)
        self._captured = self._captured_run()
        ladder = receive_ladder(plan, self.mesh, self.ranks, self.model, self.execution)
        # A step is TrainStep, replayed by CapturedRun, run again by RetryingSteps where it found no room.
        self.steps = RetryingSteps(self._captured, self.rows, self.optimizer.void, self.heartbeat, ladder)
        self.validation = Validation(
            config.train, self.corpus, self.model, micro_batches, self.mesh, self.heartbeat, ladder
        )
        self.trace = self._step_trace()
        self.pipeline_profile: PipelineProfile | None = None
        if isinstance(micro_batches, Pipelined) and config.profile.pipeline:
            self.pipeline_profile = PipelineProfile(
                plan, micro_batches, self.mesh, self.rows.clock, folder, self.step
            )
        self.metrics: MetricsWriter = NoMetrics()
        self.ranks.on_first(self._open_metrics)

    def run(self) -> bool:
        """Train to the last step, or until a signal asks to stop; return whether the run is finished."""
        log.info(self.throughput.describe())
        with ExitStack() as stack:
            stop = stack.enter_context(StopSignal())
            garbage = stack.enter_context(GarbageCollection(self.config.host))
            stack.callback(self.corpus.bad_records.log_total, "this run's data")
            stack.callback(self.corpus.check.close)
            stack.callback(self.metrics.close)
            stack.callback(self.store.close)
            stack.callback(self.loader.close)
            stack.callback(self._captured.release)
            stack.push(self.heartbeat.leave)
            if self.trace:
                stack.callback(self.trace.drop)
            if self.step == 0:
                self._validate()
            signal = self._loop(stop, garbage)
            if self.trace:
                self.trace.finish()
            self._flush()
            self.memory = self._peak_gib(), taken_gib(self.device)
            finished = self.step >= self.config.train.steps
            if self.step not in self.store.latest():
                self._save(wait=True)
            self.store.wait()
            self.optimizer.gather()  # for who reads the model after training
            self.execution.keep_code()
            if self.ranks.is_first:
                self.execution.write_report(self.folder)  # validation may have compiled after the first step
        close_dispatcher()
        self.execution.warn_if_uncaptured()
        if signal and not finished:
            self.stopped_by = signal
            log.warning(
                "%s: stopped after step %d%s",
                signal,
                self.step,
                f", which is saved: a run in {self.folder} goes on from there"
                if self.config.checkpoint.enabled
                else "; nothing is saved (checkpoint.enabled=false)",
            )
        return finished

    def _loop(self, stop: StopSignal, garbage: GarbageCollection) -> str | None:
        """Run steps up to the last, or to a signal at any rank; return the name of the signal."""
        self.rows.clock.restart()
        while self.step < self.config.train.steps:
            if signal := self.stop_flag.signal(stop.received):
                return signal
            self.corpus.check.raise_damage()
            self._train_step()
            garbage.after_step(self.step)
        self.stop_flag.close()
        self.corpus.check.raise_damage()
        return None

    def _train_step(self) -> None:
        """Run one optimizer step, and what is due after it."""
        train, checkpoint = self.config.train, self.config.checkpoint
        self.heartbeat.step(self.step + 1)
        batches = (next(self.loader) for _ in range(self.plan.num_micro_batches))
        with ExitStack() as recorded:
            for recorder in (self.pipeline_profile, self.trace):
                if recorder is not None:
                    recorded.enter_context(recorder.step(self.step + 1))
            self.steps(self.step + 1, batches)
        self.step += 1
        if self.first_step_s is None:
            self._synchronize()
            self.first_step_s = seconds_since_process_start()
            with self.rows.clock.paused():
                if self.ranks.is_first:
                    self.execution.report(self.folder)
                self.execution.keep_code()
        self.progress.advance(self.step)
        self._report_pending()
        last = self.step == train.steps
        validates = train.val_batches > 0 and (last or _due(self.step, train.val_interval))
        saves = last or _due(self.step, checkpoint.interval)
        waits = validates or saves or self.capture is None
        if validates or saves or len(self.rows) == train.log_interval:
            self._pending = self.step, self.loader.epochs
            if waits:
                self.steps.settle()
        if waits:
            self._report_pending()
        if validates:
            self._validate()
        if saves:
            self._save(wait=last)
        if validates or saves:
            self.rows.clock.restart()

    def _loader(self) -> Loader:
        train, data, layout = self.config.train, self.config.data, self.plan.layout
        return Loader(
            self.corpus.train,
            micro_batch_size=train.micro_batch_size,
            global_batch_size=train.global_batch_size,
            rank=layout.index("dp", self.ranks.rank),
            world_size=layout.dp,
            prefetch=data.prefetch,
            pin_memory=self.device.type == "cuda",
        )

    def _captured_run(self) -> CapturedRun:
        places = {**tensors_of(self.model), **self.optimizer.fixed_tensors()} if self.capture else {}
        folder = self.folder if self.ranks.is_first else None
        return CapturedRun(self.train_step, self.plan, self.capture, self.device, places, folder)

    def _step_trace(self) -> StepTrace | None:
        """Return the recorder of the steps of ``profile.steps``; None where no such step is left."""
        if not (steps := self.config.profile.steps):
            return None
        if self.step >= steps[-1]:
            log.info("profile.steps=%s: the run goes on after step %d, nothing is recorded", steps, self.step)
            return None
        clock = self.rows.clock
        return StepTrace(self.config, self.folder, self.ranks, self.device, self.heartbeat, clock)

    def _flush(self) -> None:
        """Report the metrics of all steps so far."""
        self.steps.settle()
        self._report_pending()
        if len(self.rows):
            self._pending = self.step, self.loader.epochs
            self._report_pending()

    def _report_pending(self) -> None:
        """Write the metrics that are due, if any are, and stop a run that keeps failing.

        A captured step is launched before those of the step before it are read, so that the device has
        work meanwhile.
        """
        if self._pending is None:
            return
        config, (step, epoch), self._pending = self.config, self._pending, None
        read = self._write(step, epoch)
        if read[-1].values["longest_skip"] >= config.train.max_nonfinite:
            self.steps.settle()
            if len(self.rows):
                self._write(self.step, self.loader.epochs)
            self.heartbeat.slow(f"the checkpoint of step {self.step}")
            raise self.saves.after_skips(self.step, self._state(), int(read[-1].values["longest_skip"]))

    def _write(self, step: int, epoch: float) -> list[StepRow]:
        """Write the metrics up to a step and log them; return them as read."""
        memory, per_step = self._peak_gib(), self.throughput.tokens_per_step
        read = self.rows.read(step)
        self.heartbeat.has_read()
        rows = [to_json(row, self.throughput, row.step * per_step, epoch, memory) for row in read]
        self.metrics.write(rows, read)
        for row in rows:
            log.info(log_line(row, self.config.train.steps))
        return read

    def _validate(self) -> None:
        """Write the validation loss, as a row of its own."""
        if not self.validation.wanted:
            return
        self.optimizer.gather()
        mean, count = self.validation()
        self.metrics.write([{"step": self.step, "val_loss": mean}])
        steps = self.config.train.steps
        log.info("step %d/%d  validation loss %.4f (%d micro-batches)", self.step, steps, mean, count)

    def _state(self) -> dict[str, Any]:
        """Return all that the next step depends on; tensors are live where possible. A collective."""
        return {
            "model": self.optimizer.model_state(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "random": random_state(),
            "experts": self.execution.experts,
            "step": self.step,
        }

    def _save(self, *, wait: bool = False) -> None:
        self.heartbeat.slow(f"the checkpoint of step {self.step}")
        self.saves.save(self.step, self._state(), wait=wait)

    def _restore(self) -> str:
        """Continue from this folder's newest whole checkpoint, or from checkpoint.resume_from.

        Returns the backends of the experts that the checkpoint's run used, or nothing.
        """
        store, state = self.store, self._state()
        source = None if store.latest() else self.config.checkpoint.resume_from
        # absent before a checkpoint kept them; what only the checkpoint has is added
        del state["experts"], state["loader"]["contents"]
        with named_source("resume_from", source):
            store = CheckpointStore.open_any(source) if source else store
            with explained_mismatch(store.folder, self.config.model):
                found = store.load(state)
        if found is None:
            self._cut_metrics(-1)
            self._import_weights()
            return ""
        self.saves.taken(store, found, state)
        self.step = state["step"]
        if self.step > self.config.train.steps:
            raise ConfigError(
                f"train.steps={self.config.train.steps}, but {store.folder} is at step {self.step} already; "
                f"use more steps"
            )
        skipped = int(self.optimizer.skipped_in_row.item())
        if self.step == self.config.train.steps and skipped >= self.config.train.max_nonfinite:
            raise self.saves.diverged(self.step, skipped)  # no step is left that could show it again
        self.optimizer.restored()
        self.loader.load_state_dict(state["loader"])
        restore_random_state(state["random"])
        dropped = self._cut_metrics(self.step or -1)  # step 0 validates again
        log.info(
            "continuing after step %d of %s (%d later metrics rows cut)", self.step, store.folder, dropped
        )
        return state.get("experts", "")

    def _cut_metrics(self, step: int) -> int:
        return self.ranks.on_first(lambda: cut_metrics(self.folder / METRICS_FILE, step))

    def _open_metrics(self) -> None:
        config, folder, plain = self.config, self.folder, to_plain(self.config)
        name, steps = config.run.name, config.train.steps
        self.metrics = MetricsWriter(folder, config.log, name, self.step, plain, steps)

    def _import_weights(self) -> None:
        """Start from the weights of checkpoint.init_from, if it names any."""
        if folder := self.config.checkpoint.init_from:
            weights = self.optimizer.weights_to_fill()
            with named_source("init_from", folder):
                kind = load_weights(self.model, folder, weights, self.plan.layout, self.ranks.rank)
            self.optimizer.adopt(weights)
            if name := self.saves.not_finite(self._state()):
                raise ConfigError(f"checkpoint.init_from={folder}: its {name} has values that are not finite")
            log.info("weights taken from %s (%s)", folder, kind.value)

    def _throughput(self) -> Throughput:
        config = self.config
        assert config.data.seq_len is not None
        tokens = config.train.global_batch_size * config.data.seq_len
        flops = flops_per_token(config.model, config.data.seq_len).total
        name, peak = device_name(self.device), config.log.peak_tflops
        return Throughput(tokens, flops, name, peak, self.ranks.size)

    def _peak_gib(self) -> float:
        earlier = self.pipeline_profile.earlier_peak_gib if self.pipeline_profile else 0.0
        return max(memory_gib(self.device), earlier)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
