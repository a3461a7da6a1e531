"""The training loop: batches -> forward and backward -> optimizer step -> metrics -> checkpoints.

The host never waits for the device inside a step; it reads the metrics of the last steps at logging
steps, and only then learns of skipped steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint import CheckpointStore
from graphmoe.config import AuxLoss, ComputeDtype, ConfigError, RunConfig
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
from graphmoe.metrics import METRICS_FILE, MetricsWriter, Throughput, log_line, to_json
from graphmoe.model import build_model
from graphmoe.model.moe import ROUTER_STATS
from graphmoe.optim import Optimizer, update_selection_bias
from graphmoe.progress import Progress
from graphmoe.run_folder import cut_metrics
from graphmoe.signals import StopSignal
from graphmoe.step_rows import StepRows
from graphmoe.weights import explained_mismatch, load_weights
from runtime.host import GarbageCollection

log = logging.getLogger(__name__)

DTYPES = {ComputeDtype.bf16: torch.bfloat16, ComputeDtype.fp32: torch.float32}


class TrainingStopped(RuntimeError):
    """Training cannot go on; a checkpoint of the state before was saved."""


class Trainer:
    """Model, optimizer, data and checkpoints of one run, and the loop over them."""

    def __init__(self, config: RunConfig, folder: Path, progress: Progress) -> None:
        assert config.data.seq_len is not None
        self.config, self.folder, self.progress = config, folder, progress
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
        self.routers = self.model.routers()
        self.optimizer = Optimizer(self.model, config.optim, config.train)
        dtype = DTYPES[config.precision.compute]
        self.execution = Execution(config, dtype, self.device, self.optimizer)
        self.loader = Loader(
            self.corpus.train,
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.global_batch_size,
            prefetch=config.data.prefetch,
            pin_memory=self.device.type == "cuda",
        )
        self.store = CheckpointStore(folder / "checkpoints", config.checkpoint)
        self.rows = StepRows(
            min(config.train.log_interval, config.train.steps), len(self.routers), self.device
        )
        self.throughput = self._throughput()
        self.step = 0
        self.first_step_s: float | None = None
        self.stopped_by: str | None = None
        """Name of the signal that ended the run early, if one did."""

    def start(self) -> None:
        """Take over the state to start from, and open the metrics: the last that can be refused."""
        self.execute = self.execution.start(self.folder, self._restore())
        plain = to_plain(self.config)
        self.metrics = MetricsWriter(self.folder, self.config.log, self.config.run.name, self.step, plain)

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
            if self.step == 0:
                self._validate()
            self.rows.clock.restart()
            while self.step < self.config.train.steps and not stop.received:
                self._train_step()
                garbage.after_step(self.step)
            self._flush()
            finished = self.step >= self.config.train.steps
            if self.step not in self.store.latest():
                self._save(wait=True)
            self.store.wait()
        self.execution.write_report(self.folder)  # validation may have compiled after the first step
        if stop.received and not finished:
            self.stopped_by = stop.received
            log.warning(
                "%s: stopped after step %d%s",
                stop.received,
                self.step,
                ", which is saved; the same command goes on from there"
                if self.config.checkpoint.enabled
                else "",
            )
        return finished

    def _train_step(self) -> None:
        """One optimizer step, and what is due after it."""
        train, checkpoint = self.config.train, self.config.checkpoint
        scalars, counts_LE = self._accumulate(train.global_batch_size // train.micro_batch_size)
        result = self.optimizer.step(scalars["loss"])
        self._update_selection_bias(counts_LE, result.finite)
        scalars |= {"grad_norm": result.grad_norm, "lr": result.lr, "skipped": 1 - result.finite}
        scalars |= {"skipped_total": self.optimizer.skipped, "longest_skip": self.optimizer.longest_skip}
        self.step += 1
        self.rows.append(self.step, scalars, counts_LE)
        if self.first_step_s is None:
            self._synchronize()
            self.first_step_s = seconds_since_process_start()
            self.execution.report(self.folder)
        self.progress.advance(self.step)
        last = self.step == train.steps
        validates = train.val_batches > 0 and (last or _due(self.step, train.val_interval))
        saves = last or _due(self.step, checkpoint.interval)
        if validates or saves or len(self.rows) == train.log_interval:
            self._flush()
        if validates:
            self._validate()
        if saves:
            self._save(wait=last)
        if validates or saves:
            self.rows.clock.restart()

    def _accumulate(self, num_micro_batches: int) -> tuple[dict[str, Tensor], Tensor]:
        """Forward and backward of every micro-batch; mean losses and summed expert loads."""
        losses = torch.zeros(2 + len(ROUTER_STATS), device=self.device)
        counts_LE = torch.zeros(
            len(self.routers), self.config.model.num_experts, dtype=torch.int32, device=self.device
        )
        for _ in range(num_micro_batches):
            tokens = next(self.loader).to(self.device, non_blocking=True)
            output = self.model.loss(tokens[:, :-1], tokens[:, 1:], self.execute)
            (output.total / num_micro_batches).backward()
            stats = output.stats_L3.mean(dim=0) if self.routers else output.stats_L3.new_zeros(3)
            losses += torch.cat([output.cross_entropy[None], output.mtp[None], stats])
            counts_LE += output.counts_LE
            self._tell_routers(counts_LE)
        self._tell_routers(torch.zeros_like(counts_LE))
        names = ("loss", "mtp_loss", *ROUTER_STATS)
        return dict(zip(names, losses / num_micro_batches, strict=True)), counts_LE

    def _tell_routers(self, counts_LE: Tensor) -> None:
        """Give the step's counts so far to the balance loss over the global batch."""
        if self.config.model.aux_loss is AuxLoss.global_batch:
            for router, counts_E in zip(self.routers, counts_LE, strict=True):
                router.earlier_counts.copy_(counts_E)

    def _update_selection_bias(self, counts_LE: Tensor, finite: Tensor) -> None:
        if self.config.model.selection_bias:
            for router, counts_E in zip(self.routers, counts_LE, strict=True):
                update_selection_bias(
                    router.selection_bias, counts_E, self.config.model.bias_update_rate, finite
                )

    def _flush(self) -> None:
        """Read the metrics of the last steps, write them, and stop a run that keeps failing."""
        if not len(self.rows):
            return
        config, memory = self.config, memory_gib(self.device)
        per_step = self.throughput.tokens_per_step
        read = self.rows.read()
        epoch = self.loader.epochs
        rows = [to_json(row, self.throughput, row.step * per_step, epoch, memory) for row in read]
        self.metrics.write(rows)
        for row in rows:
            log.info(log_line(row, config.train.steps))
        if read[-1].values["longest_skip"] >= config.train.max_nonfinite:
            self._save(wait=True)
            saved = f"the last good weights are saved at step {self.step} in {self.store.folder}"
            raise TrainingStopped(
                f"{int(read[-1].values['longest_skip'])} steps in a row had a loss or gradient that is not "
                f"finite (train.max_nonfinite={config.train.max_nonfinite}); "
                f"{saved if config.checkpoint.enabled else 'nothing is saved (checkpoint.enabled=false)'}. "
                f"Try a lower optim.lr, more optim.warmup_steps or a smaller train.clip_grad_norm, or look "
                f"at the data around this step"
            )

    @torch.no_grad()
    def _validate(self) -> None:
        """Mean cross-entropy over the first validation batches, as a row of its own."""
        train = self.config.train
        if train.val_batches == 0 or self.corpus.val is None:
            return
        total, count = torch.zeros((), device=self.device), 0
        for tokens in self._validation_batches():
            tokens = tokens.to(self.device, non_blocking=True)
            total += self.model.loss(tokens[:, :-1], tokens[:, 1:], self.execute).cross_entropy
            count += 1
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
            cut_metrics(self.folder / METRICS_FILE, -1)
            self._import_weights()
            return ""
        self.step = state["step"]
        if self.step > self.config.train.steps:
            raise ConfigError(
                f"train.steps={self.config.train.steps}, but {store.folder} is at step {self.step} already; "
                f"use more steps"
            )
        self.optimizer.restored()
        self.loader.load_state_dict(state["loader"])
        restore_random_state(state["random"])
        dropped = cut_metrics(self.folder / METRICS_FILE, self.step or -1)  # step 0 validates again
        log.info(
            "continuing after step %d of %s (%d later metrics rows cut)", self.step, store.folder, dropped
        )
        return state.get("experts", "")

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
        return Throughput(tokens, flops, device_name(self.device), config.log.peak_tflops)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
