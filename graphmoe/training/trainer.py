"""The training loop: batches -> forward and backward -> optimizer step -> metrics -> checkpoints.

Every rank of a job runs it alike, each on its micro-batches; rank 0 writes what the run's folder gets.
The host never waits for the device inside a step; it reads the metrics of the last steps at logging
steps, a step later where steps are captured, and only then learns of skipped steps.
"""

import itertools
import logging
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError
from graphmoe.data import Corpus, Loader, open_data
from graphmoe.ops.collectives import use_groups
from graphmoe.plan.plan import Plan
from graphmoe.run.files import display_path
from graphmoe.run.machine import device_name, memory_gib, open_device, seconds_since_command, taken_gib
from graphmoe.run.stored import refuse_other_tokenizer
from graphmoe.run.weights import explained_mismatch, load_weights
from graphmoe.runtime.capture.step import CapturedRun
from graphmoe.runtime.dispatch import close_dispatcher, make_dispatcher, open_dispatcher
from graphmoe.runtime.host.logs import FILE_ONLY, Progress
from graphmoe.runtime.host.signals import StopSignal
from graphmoe.runtime.host.tuning import GarbageCollection
from graphmoe.runtime.launch.stamps import Heartbeat, wait_for
from graphmoe.runtime.ranks import PATIENCE, Mesh, Ranks
from graphmoe.runtime.torch_compat import tensors_of
from graphmoe.training.build import build
from graphmoe.training.executor import Chosen, Execution
from graphmoe.training.log_lines import StepLog, start_block
from graphmoe.training.metrics import HostTimes, MetricsWriter, Throughput, to_json
from graphmoe.training.micro_batches import Pipelined, micro_batches_of
from graphmoe.training.profile import PipelineProfile, StepTrace
from graphmoe.training.retry import RetryingSteps, receive_ladder
from graphmoe.training.saves import Saves
from graphmoe.training.start_state import named_source, random_state, restore_random_state, seed_everything
from graphmoe.training.step import TrainStep
from graphmoe.training.step_rows import StepRow, StepRows
from graphmoe.training.validation import Validation

log = logging.getLogger(__name__)


class Trainer:
    """Model, optimizer, data and checkpoints of one run, and the loop over them."""

    def __init__(self, plan: Plan, folder: Path, progress: Progress, ranks: Ranks | None = None) -> None:
        """Build all parts, and load the state to start from. A collective, as all that follows."""
        config, layout = plan.config, plan.layout
        train, data = config.train, config.data
        assert data.seq_len is not None
        self.plan, self.config, self.folder, self.progress = plan, config, folder, progress
        self.ranks = ranks = ranks or Ranks()
        self.mesh = mesh = Mesh(layout)
        use_groups(mesh)
        self.device = device = open_device(config.run.device)
        open_dispatcher(plan, mesh, device)
        seed_everything(train.seed, config.precision, device)
        self.corpus: Corpus = open_data(
            data, seq_len=data.seq_len, vocab_size=config.model.vocab_size, check=ranks.local_index == 0
        )
        self.model, self.optimizer = build(plan, device, mesh, make_dispatcher(plan, mesh))
        self.loader = Loader(
            self.corpus.train,
            micro_batch_size=train.micro_batch_size,
            global_batch_size=train.global_batch_size,
            rank=layout.index("dp", ranks.rank),
            world_size=layout.dp,
            prefetch=data.prefetch,
            pin_memory=device.type == "cuda",
        )
        self.store = CheckpointStore(folder / "checkpoints", config.checkpoint)
        self.saves = Saves(self.store, config, ranks)
        self.step, self.chosen = 0, Chosen()
        self.stopped_by: str | None = None
        """Name of the signal that ended the run early, if one did."""
        self.first_step_s: float | None = None
        """Seconds from the command to the end of this start's first step."""
        self.host_times = HostTimes()
        self.memory = 0.0, 0.0
        """Peak of this rank, and what was taken of its device after the last step, in GiB."""
        self._pending: tuple[int, float] | None = None
        """Last step whose metrics are due to be written, and the epoch after it."""
        self._restore()
        self._first = self.step + 1
        self.execution = Execution(plan, device, self.optimizer, ranks, folder, self.chosen)
        self.capture, self.chosen = self.execution.capture, self.execution.chosen
        log.info(start_block(plan, self.corpus, device_name(device), self.execution.describe()))
        self.execution.compile_update(self.optimizer, self.model.segment_lists())
        self.step_log = StepLog(plan)
        self.rows = StepRows(
            min(train.log_interval, train.steps) + 2,  # those of the steps launched meanwhile
            (self.model.num_moe_layers, config.model.num_experts),
            device,
            planned=self.model.dispatcher is not None and self.model.dispatcher.capacity is not None,
            replicated=self.model.dispatcher is not None and plan.replica_slots > 0,
        )
        self.throughput = Throughput.of_run(plan, device)
        self.stop_flag = StopFlag(ranks)
        first_steps = self.capture.warmup_steps + 1 if self.capture else 1
        self.heartbeat = Heartbeat(config.launch.hang_timeout_s, first_steps)
        self.execute = self.optimizer.executor(self.execution.execute)
        compiled = self.execution.compiled
        micro_batches = micro_batches_of(
            plan,
            self.model,
            self.execute,
            mesh,
            overlap=self.execution.overlap,
            lane=compiled.lane if compiled and compiled.captures else None,
            deferring=compiled.deferring if compiled else None,
            capture=self.capture,
        )
        step = self.train_step = TrainStep(plan, self.optimizer, micro_batches, mesh, self.execution.backends)
        places = {**tensors_of(self.model), **self.optimizer.fixed_tensors()} if self.capture else {}
        own_folder = folder if ranks.is_first else None
        run = self._captured = CapturedRun(step, plan, self.capture, device, places, own_folder)
        ladder = receive_ladder(
            plan, mesh, ranks, self.model, device, self.capture, fused=self.execution.fuses
        )
        # A step is TrainStep, replayed by CapturedRun, run again by RetryingSteps where it found no room.
        self.steps = RetryingSteps(run, self.rows, self.optimizer.void, self.heartbeat, ladder, step.prepare)
        self.validation = Validation(train, self.corpus, micro_batches, mesh, self.heartbeat, ladder)
        self.trace: StepTrace | None = None
        """Recorder of the steps of ``profile.steps``; None where no such step is left."""
        if (steps := config.profile.steps) and self.step >= steps[-1]:
            log.info("profile.steps=%s: the run goes on after step %d, nothing is recorded", steps, self.step)
        elif steps:
            self.trace = StepTrace(config, folder, ranks, device, self.heartbeat, self.rows.clock)
        self.pipeline_profile: PipelineProfile | None = None
        if isinstance(micro_batches, Pipelined) and config.profile.pipeline:
            pipeline, clock = micro_batches.pipeline, self.rows.clock
            self.pipeline_profile = PipelineProfile(plan, pipeline, device, mesh, clock, folder, self.step)
        self.metrics: MetricsWriter | None = None
        """Writer of rank 0."""
        ranks.on_first(self._open_metrics)

    def run(self) -> bool:
        """Train to the last step, or until a signal asks to stop; return whether the run is finished."""
        log.info(self.throughput.describe(), extra=FILE_ONLY)
        with ExitStack() as stack:
            stop = stack.enter_context(StopSignal())
            garbage = stack.enter_context(GarbageCollection(self.config.host))
            stack.callback(self.corpus.bad_records.log_total, "this run's data")
            for end in (self.corpus.check, self.metrics, self.store, self.loader):
                if end is not None:
                    stack.callback(end.close)
            stack.callback(self._captured.release)
            stack.push(self.heartbeat.leave)
            if self.trace:
                stack.callback(self.trace.drop)
            stopped_by = self._loop(stop, garbage)
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
                if self.config.checkpoint.enabled
                else "; nothing is saved (checkpoint.enabled=false)",
            )
        return finished

    def _loop(self, stop: StopSignal, garbage: GarbageCollection) -> str | None:
        self.rows.clock.restart()
        while self.step < self.config.train.steps:
            if stopped_by := self.stop_flag.signal(stop.received):
                return stopped_by
            self.corpus.check.raise_damage()
            self._train_step()
            garbage.after_step(self.step)
        self.stop_flag.close()
        self.corpus.check.raise_damage()
        return None

    def _train_step(self) -> None:
        train, checkpoint = self.config.train, self.config.checkpoint
        self.heartbeat.step(self.step + 1)
        batches = itertools.islice(self.host_times.waited(self.loader), self.plan.num_micro_batches)
        with ExitStack() as recorded:
            for recorder in (self.pipeline_profile, self.trace):
                if recorder is not None:
                    recorded.enter_context(recorder.step(self.step + 1))
            self.steps(self.step + 1, batches)
        self.step += 1
        if self.first_step_s is None:
            torch.get_device_module(self.device).synchronize()
            self.first_step_s = seconds_since_command()
            self.host_times.take()  # which are of the start
            with self.rows.clock.paused():
                if self.ranks.is_first:
                    self.execution.report()
                self.execution.keep_code()
        self.progress.advance(self.step)
        self._report_pending()
        last = self.step == train.steps
        due = last or self.step == 1 or _due(self.step, train.val_interval)
        validates = train.val_batches > 0 and due
        saves = last or _due(self.step, checkpoint.interval)
        waits = validates or saves or self.capture is None
        if validates or saves or _due(self.step, train.log_interval):
            self._pending = self.step, self.loader.place.epochs
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

    def _flush(self) -> None:
        self.steps.settle()
        self._report_pending()
        if len(self.rows):
            self._pending = self.step, self.loader.place.epochs
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
                self._write(self.step, self.loader.place.epochs)
            self.heartbeat.slow(f"the checkpoint of step {self.step}")
            raise self.saves.after_skips(self.step, self._state(), int(read[-1].values["longest_skip"]))

    def _write(self, step: int, epoch: float) -> list[StepRow]:
        memory, per_step = self._peak_gib(), self.throughput.tokens_per_step
        read = self.rows.read(step)
        self.heartbeat.has_read()
        rows = [to_json(row, self.throughput, row.step * per_step, epoch, memory) for row in read]
        if rows[0]["step"] == self._first:
            rows[0]["start_s"] = self.first_step_s
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
            self.optimizer.restore_weights()  # a captured step begins with them
        if self.metrics:
            self.metrics.write([{"step": self.step, "val_loss": mean}])
        steps, of = self.config.train.steps, number_of(count, "micro-batch")
        log.info("step %d/%d  validation loss %.4f (%s)", self.step, steps, mean, of)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.optimizer.model_state(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "random": random_state(),
            **self.chosen._asdict(),
            "step": self.step,
        }

    def _save(self, *, wait: bool = False) -> None:
        self.heartbeat.slow(f"the checkpoint of step {self.step}")
        with self.host_times.of("checkpoint_s"):
            self.saves.save(self.step, self._state(), wait=wait)

    def _restore(self) -> None:
        store, state = self.store, self._state()
        source = None if store.latest() else self.config.checkpoint.resume_from
        if not store.latest():
            refuse_other_tokenizer(self.config, self.corpus.tokenizer)
        del state["experts"], state["fp8"], state["loader"]["contents"], state["optimizer"]["scales"]
        with named_source("resume_from", source):
            store = CheckpointStore.open_any(source) if source else store
            with explained_mismatch(store.folder, self.config.model):
                found = store.load(state)
        if found is None:
            self._import_weights()
            return
        self.saves.taken(store, found, state)
        self.step, self.chosen = state["step"], Chosen(state.get("experts", ""), state.get("fp8", {}))
        if self.step > (steps := self.config.train.steps):
            raise ConfigError(
                f"train.steps={steps}, but {store.folder} is at step {self.step} already; use more steps"
            )
        skipped = int(self.optimizer.skipped_in_row.item())
        if self.step == steps and skipped >= self.config.train.max_nonfinite:
            raise self.saves.diverged(self.step, skipped)  # no step is left that could show it again
        self.optimizer.restored(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        restore_random_state(state["random"])
        log.info("continuing after step %d of %s", self.step, store.folder)

    def _open_metrics(self) -> None:
        self.metrics = MetricsWriter(self.folder, self.config, self.step)

    def _import_weights(self) -> None:
        if folder := self.config.checkpoint.init_from:
            weights = self.optimizer.weights_to_fill()
            with named_source("init_from", folder):
                kind = load_weights(self.model, folder, weights, self.plan.layout, self.ranks.rank)
            self.optimizer.adopt(weights)
            if name := self.saves.not_finite(self._state()):
                raise ConfigError(f"checkpoint.init_from={folder}: its {name} has values that are not finite")
            log.info("weights taken from %s (%s)", folder, kind.value)

    def _peak_gib(self) -> float:
        earlier = self.pipeline_profile.earlier_peak_gib if self.pipeline_profile else 0.0
        return max(memory_gib(self.device), earlier)


class StopFlag:
    """Flag that tells the other ranks of a signal between two steps, and reads the flags of the time before.

    So nobody waits for a message: it had a whole step to arrive. It travels between the hosts, in a group
    of its own. Every rank builds it and calls it at the same points.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if ranks.size > 1 else None
        self._sent: tuple[Tensor, dist.Work] | None = None

    def signal(self, received: str | None) -> str | None:
        """Name of the signal to stop for, the same on all ranks; ``received`` is what this one got.

        It is a call later than ``received``; on one rank it is ``received``, at once.
        """
        if self._group is None:
            return received
        agreed = self.close()
        if agreed is None:
            flag = torch.tensor(signal.Signals[received] if received else 0, dtype=torch.int32)
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._sent = flag, work
        return agreed

    def close(self) -> str | None:
        """Wait for the last message, which every rank has sent; return the signal that it names."""
        if self._sent is None:
            return None
        (flag, work), self._sent = self._sent, None
        wait_for(work.wait)
        number = int(flag)
        return signal.Signals(number).name if number else None


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
