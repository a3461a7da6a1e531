"""The training loop: batches -> forward and backward -> optimizer step -> metrics -> checkpoints.

Every rank of a job runs it alike, each on its micro-batches; rank 0 writes what the run's folder gets.
The host never waits for the device inside a step; it reads the metrics of the last steps at logging
steps, a step later where steps are captured, and only then learns of skipped steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.agreement import StopAgreement
from graphmoe.checkpoint import CheckpointStore
from graphmoe.config import ComputeDtype, ConfigError, RunConfig
from graphmoe.data import Corpus, Loader, first_batches, open_data
from graphmoe.entry import to_plain
from graphmoe.environment import (
    device_name,
    memory_gib,
    open_device,
    random_state,
    restore_random_state,
    seconds_since_process_start,
    seed_everything,
)
from graphmoe.execution import Execution
from graphmoe.flops import flops_per_token
from graphmoe.metrics import METRICS_FILE, MetricsWriter, NoMetrics, Throughput, log_line, to_json
from graphmoe.model import build_model
from graphmoe.optim import Optimizer
from graphmoe.progress import Progress
from graphmoe.run_folder import cut_metrics
from graphmoe.segments import FULL_ITERATION
from graphmoe.signals import StopSignal
from graphmoe.step_rows import PendingRows, StepRow, StepRows
from graphmoe.torch_compat import tensors_of
from graphmoe.train_step import TrainStep
from graphmoe.weights import explained_mismatch, load_weights
from graphmoe.world import World
from runtime.capture import Place
from runtime.captured_step import CapturedStep, Step
from runtime.host.tuning import GarbageCollection

log = logging.getLogger(__name__)

DTYPES = {ComputeDtype.bf16: torch.bfloat16, ComputeDtype.fp32: torch.float32}


class TrainingStopped(RuntimeError):
    """Training cannot go on; a checkpoint of the state before was saved."""


class Trainer:
    """Model, optimizer, data and checkpoints of one run, and the loop over them."""

    def __init__(
        self, config: RunConfig, folder: Path, progress: Progress, world: World | None = None
    ) -> None:
        """A collective of all ranks, as all that follows."""
        assert config.data.seq_len is not None
        self.config, self.folder, self.progress = config, folder, progress
        self.world = world or World()
        self.device = open_device(config.run.device)
        seed_everything(config.train.seed, config.precision, self.device)
        self.corpus: Corpus = open_data(
            config.data, seq_len=config.data.seq_len, vocab_size=config.model.vocab_size
        )
        self.model = build_model(
            config.model,
            device=self.device,
            dtype=DTYPES[config.precision.compute],
            seed=config.train.seed,
            execution=config.moe,
        )
        self.optimizer = Optimizer(self.model, config.optim, config.train)
        dtype = DTYPES[config.precision.compute]
        self.execution = Execution(config, dtype, self.device, self.optimizer, self.world)
        self.loader = Loader(
            self.corpus.train,
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.global_batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
            prefetch=config.data.prefetch,
            pin_memory=self.device.type == "cuda",
        )
        self.store = CheckpointStore(folder / "checkpoints", config.checkpoint)
        self.rows = StepRows(
            min(config.train.log_interval, config.train.steps), len(self.model.routers()), self.device
        )
        self.throughput = self._throughput()
        self.agreement = StopAgreement(self.world)
        self._pending: tuple[PendingRows, float] | None = None
        """Metrics on their way to the host, and the epoch of the last of them."""
        self.step = 0
        self.first_step_s: float | None = None
        self.stopped_by: str | None = None
        """Name of the signal that ended the run early, if one did."""

    def start(self) -> None:
        """Take over the state to start from, and open the metrics: the last that can be refused."""
        self.execute = self.execution.start(self.folder, self._restore())
        self.train_step = TrainStep(self.config, self.model, self.optimizer, self.execute, self.world)
        self._run_step: Step = self._captured(self.train_step)
        self.metrics: MetricsWriter = NoMetrics()
        self.world.on_first(self._open_metrics)

    def run(self) -> bool:
        """Train to the last step, or until a signal asks to stop; whether the run is finished."""
        log.info(self.throughput.describe())
        with ExitStack() as stack:
            stop = stack.enter_context(StopSignal())
            garbage = stack.enter_context(GarbageCollection(self.config.host))
            stack.callback(self.corpus.bad_records.log_total, "this run's data")
            stack.callback(self.metrics.close)
            stack.callback(self.store.close)
            stack.callback(self.loader.close)
            stack.callback(self._release_graph)
            if self.step == 0:
                self._validate()
            signal = self._loop(stop, garbage)
            self._flush()
            finished = self.step >= self.config.train.steps
            if self.step not in self.store.latest():
                self._save(wait=True)
            self.store.wait()
            self.execution.keep_code()
            if self.world.is_first:
                self.execution.write_report(self.folder)  # validation may have compiled after the first step
        capture = self.execution.capture
        if capture and not capture.ready:
            log.warning(
                "graph.scope=%s captured nothing: the run did %d steps, and "
                "graph.warmup_steps=%d run uncaptured first",
                capture.report.scope,
                capture.steps,
                capture.warmup_steps,
            )
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
        """Steps up to the last, or to a signal at any rank, whose name is returned."""
        self.rows.clock.restart()
        while self.step < self.config.train.steps:
            if signal := self.agreement.signal(stop.received):
                return signal
            self._train_step()
            garbage.after_step(self.step)
        self.agreement.close()
        return None

    def _train_step(self) -> None:
        """One optimizer step, and what is due after it."""
        train, checkpoint = self.config.train, self.config.checkpoint
        batches = (next(self.loader) for _ in range(self.train_step.num_micro_batches))
        row = self._run_step(batches)
        self._report_capture()
        self.step += 1
        self.rows.append(self.step, row)
        if self.first_step_s is None:
            self._synchronize()
            self.first_step_s = seconds_since_process_start()
            if self.world.is_first:
                self.execution.report(self.folder)
            self.execution.keep_code()
        self.progress.advance(self.step)
        self._report_pending()
        last = self.step == train.steps
        validates = train.val_batches > 0 and (last or _due(self.step, train.val_interval))
        saves = last or _due(self.step, checkpoint.interval)
        if validates or saves or len(self.rows) == train.log_interval:
            self._pending = self.rows.hand_over(), self.loader.epochs
        if validates or saves or self.execution.capture is None:
            self._report_pending()
        if validates:
            self._validate()
        if saves:
            self._save(wait=last)
        if validates or saves:
            self.rows.clock.restart()

    def _captured(self, step: TrainStep) -> Step:
        """The step, or what replays it or parts of it from graphs."""
        capture = self.execution.capture
        if capture is None:
            return step
        capture.watch(self._at_fixed_addresses())
        if self.device.type == "cpu":
            scope = capture.report.scope
            log.info("a CPU has no graphs: graph.scope=%s calls its functions on static buffers", scope)
        if self.config.graph.scope == FULL_ITERATION:
            return CapturedStep(step, self.device, capture)

        def run(batches: Iterable[Tensor]) -> Tensor:
            with capture.step():
                return step(batches)

        return run

    def _release_graph(self) -> None:
        """Drop the graph of a captured step: NCCL ends only after the last graph that holds its sums."""
        self._run_step = self.train_step

    def _at_fixed_addresses(self) -> dict[str, Place]:
        """Weights, buffers, gradients and the optimizer's state: graphs use them without being given them."""
        optimizer = self.optimizer
        places: dict[str, Place] = {**tensors_of(self.model)}
        for name, weight in zip(optimizer.names, optimizer.weights, strict=True):
            places[f"the gradient of {name}"] = vars(optimizer.gradient_of(weight)), "total"
        for name, value in vars(optimizer).items():
            if isinstance(value, Tensor):
                places[f"the optimizer's {name.lstrip('_')}"] = vars(optimizer), name
        return places

    def _report_capture(self) -> None:
        """Write capture_report.json when the first captured step was launched."""
        capture = self.execution.capture
        if capture and capture.steps == capture.warmup_steps + 1:
            capture.report.pool_bytes = capture.maker.pool_bytes()
            if self.world.is_first:
                capture.report.write(self.folder)
            log.info(capture.report.line())
            if isinstance(self.config.graph.scope, str):
                return  # a word stands for segments that a model may lack; the report has them
            for segment, reason in capture.report.not_captured.items():
                log.warning("graph.scope names %s, which is not captured: %s", segment, reason)

    def _flush(self) -> None:
        """Report the metrics of all steps so far."""
        self._report_pending()
        if len(self.rows):
            self._pending = self.rows.hand_over(), self.loader.epochs
            self._report_pending()

    def _report_pending(self) -> None:
        """Write the metrics that were handed over, if any were, and stop a run that keeps failing.

        A captured step is launched before those of the step before it are read, so that the device has
        work meanwhile.
        """
        if self._pending is None:
            return
        config, (pending, epoch), self._pending = self.config, self._pending, None
        read = self._write(pending, epoch)
        if read[-1].values["longest_skip"] >= config.train.max_nonfinite:
            if len(self.rows):
                self._write(self.rows.hand_over(), self.loader.epochs)
            self._save(wait=True)
            raise self._diverged(int(read[-1].values["longest_skip"]))

    def _diverged(self, skipped: int) -> TrainingStopped:
        config = self.config
        saved = f"the weights before them are saved at step {self.step} in {self.store.folder}"
        return TrainingStopped(
            f"{skipped} steps in a row had a loss or gradient that is not finite "
            f"(train.max_nonfinite={config.train.max_nonfinite}); "
            f"{saved if config.checkpoint.enabled else 'nothing is saved (checkpoint.enabled=false)'}. "
            f"Try a lower optim.lr, more optim.warmup_steps or a smaller train.clip_grad_norm, or look "
            f"at the data around this step"
        )

    def _write(self, pending: PendingRows, epoch: float) -> list[StepRow]:
        """Write metrics and log them; returns them as read."""
        memory, per_step = memory_gib(self.device), self.throughput.tokens_per_step
        read = pending.read()
        rows = [to_json(row, self.throughput, row.step * per_step, epoch, memory) for row in read]
        self.metrics.write(rows)
        for row in rows:
            log.info(log_line(row, self.config.train.steps))
        return read

    @torch.no_grad()
    def _validate(self) -> None:
        """Mean cross-entropy over the first validation batches, as a row of its own."""
        train = self.config.train
        if train.val_batches == 0 or self.corpus.val is None:
            return
        total, count = torch.zeros((), device=self.device), 0
        for count, tokens in enumerate(self._validation_batches(), start=1):
            if (count - 1) % self.world.size == self.world.rank:  # dealt out among ranks
                tokens = tokens.to(self.device, non_blocking=True)
                total += self.model.loss(tokens[:, :-1], tokens[:, 1:], self.execute).cross_entropy
        (total,) = self.world.sums(total)
        loss = total.item() / count
        self.metrics.write([{"step": self.step, "val_loss": loss}])
        log.info("step %d/%d  validation loss %.4f (%d micro-batches)", self.step, train.steps, loss, count)

    def _validation_batches(self) -> Iterator[Tensor]:
        assert self.corpus.val is not None
        return first_batches(
            self.corpus.val, self.config.train.val_batches, self.config.train.micro_batch_size
        )

    def _state(self) -> dict[str, Any]:
        """All that the next step depends on; tensors are the live ones."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "random": random_state(),
            "experts": self.execution.experts,
            "step": self.step,
        }

    def _save(self, *, wait: bool = False) -> None:
        if self.config.checkpoint.enabled:
            self.store.save(self.step, self._state(), wait=wait)

    def _restore(self) -> str:
        """Continue from this folder's newest whole checkpoint, or from checkpoint.resume_from.

        Returns the backends of the experts that the checkpoint's run used, or nothing.
        """
        store, state = self.store, self._state()
        if not store.latest() and self.config.checkpoint.resume_from:
            store = CheckpointStore.open_any(self.config.checkpoint.resume_from)
        del state["experts"]  # absent before a checkpoint kept it; what only the checkpoint has is added
        with explained_mismatch(store.folder, self.config.model):
            found = store.load(state)
        if found is None:
            self._cut_metrics(-1)
            self._import_weights()
            return ""
        self.step = state["step"]
        if self.step > self.config.train.steps:
            raise ConfigError(
                f"train.steps={self.config.train.steps}, but {store.folder} is at step {self.step} already; "
                f"use more steps"
            )
        skipped = int(self.optimizer.skipped_in_row.item())
        if self.step == self.config.train.steps and skipped >= self.config.train.max_nonfinite:
            raise self._diverged(skipped)  # no step is left that could show it again
        self.optimizer.restored()
        self.loader.load_state_dict(state["loader"])
        restore_random_state(state["random"])
        dropped = self._cut_metrics(self.step or -1)  # step 0 validates again
        log.info(
            "continuing after step %d of %s (%d later metrics rows cut)", self.step, store.folder, dropped
        )
        return state.get("experts", "")

    def _cut_metrics(self, step: int) -> int:
        return self.world.on_first(lambda: cut_metrics(self.folder / METRICS_FILE, step))

    def _open_metrics(self) -> None:
        name, plain = self.config.run.name, to_plain(self.config)
        self.metrics = MetricsWriter(self.folder, self.config.log, name, self.step, plain)

    def _import_weights(self) -> None:
        """Start from the weights of checkpoint.init_from, if it names any."""
        folder = self.config.checkpoint.init_from
        if folder:
            kind = load_weights(self.model, folder, into=self.optimizer.main_weights())
            self.optimizer.publish()
            log.info("weights taken from %s (%s)", folder, kind.value)

    def _throughput(self) -> Throughput:
        config = self.config
        assert config.data.seq_len is not None
        tokens = config.train.global_batch_size * config.data.seq_len
        flops = flops_per_token(config.model, config.data.seq_len).total
        name, peak = device_name(self.device), config.log.peak_tflops
        return Throughput(tokens, flops, name, peak, self.world.size)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
