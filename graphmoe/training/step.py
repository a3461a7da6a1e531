"""One optimizer step: forward, backward, reduction, update, metrics; its capture; its reruns."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.model.moe_segments import update_selection_bias
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.optim.base import StepOptimizer
from graphmoe.plan.experts import Load
from graphmoe.plan.forced_loads import NO_LOAD
from graphmoe.plan.plan import Plan
from graphmoe.runtime.capture import Capture, CapturedStep
from graphmoe.runtime.dispatch.ladder import ReceiveLadder
from graphmoe.runtime.launch.stamps import Heartbeat
from graphmoe.runtime.ranks import Mesh, sums
from graphmoe.segments import profiler_range
from graphmoe.training.micro_batches import MicroBatches, rooms_of
from graphmoe.training.reruns import Gate, Reruns
from graphmoe.training.step_rows import TRAINED, StepRows, device_row
from graphmoe.training.step_sums import ForcedLoads, StepSums, Totals


class TrainStep:
    """The device's work of a step: forward and backward, reductions, update, metrics.

    A step that overflowed a receive buffer is a no-op, and so are later ones until ``optimizer.void`` is
    zeroed. Consuming batches is the only host side effect, so a step can be captured.
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: StepOptimizer,
        micro_batches: MicroBatches,
        mesh: Mesh,
        backends: str = "",
    ) -> None:
        """``backends``: expert backends' names, which decide a replica's bytes in the metrics."""
        self.plan, self.optimizer, self.micro_batches, self.mesh = plan, optimizer, micro_batches, mesh
        self._replica_gb = plan.replica_bytes(backends) / 1e9
        self.model = model = micro_batches.model
        layers = [layer for stage in model.stages for layer in model.moe_layers(stage)]
        # routers of this rank by MoE layer index
        self.routers = dict(zip(layers, model.routers(), strict=True))
        self._capacities_of: tuple[Dispatcher, ...] = ()
        self._capacities_L2: Tensor
        self.gate = Gate(optimizer, mesh) if plan.train.rerun else None
        self._forced = ForcedLoads(plan, self.routers) if plan.moe.expert_load != NO_LOAD else None

    def prepare(self, step: int) -> None:
        """Write the forced expert loads of a step, counted from 1, outside of graphs."""
        if self._forced:
            self._forced.set(step)

    def __call__(self, batches: Iterable[Tensor]) -> Tensor:
        """Run micro-batches of token ids [micro_batch_size, seq_len + 1]; return the metrics in a tensor."""
        optimizer, scales = self.optimizer, self.optimizer.scales
        if scales:
            scales.begin()
        totals = self.forward_backward(batches)
        scalars = totals.scalars | self._overflow(totals)
        if self.gate:
            self.gate.before(scalars["loss"])
        with profiler_range("optimizer", "update"):
            result = optimizer.step(scalars["loss"])
            if scales:
                scales.update(result.finite)
        if self.gate:
            scalars |= self.gate.after(result.finite, result.grad_norm)
        if self.plan.model.selection_bias and not self.plan.model.lora_rank:  # frozen: no adapter holds it
            rate = self.plan.model.bias_update_rate
            for layer, router in self.routers.items():
                update_selection_bias(router.selection_bias, totals.counts_LE[layer], rate, result.finite)
        scalars |= {"grad_norm": result.grad_norm, "lr": result.lr, "skipped": 1 - result.finite}
        scalars |= {"skipped_total": optimizer.skipped, "longest_skip": optimizer.longest_skip}
        if result.max_logit is not None:
            scalars["max_logit"] = result.max_logit
        return device_row(scalars, totals.counts_LE, self.mesh.layout.ep, totals.received_L2)

    def forward_backward(self, batches: Iterable[Tensor]) -> Totals:
        """Run this rank's micro-batches; sum the results over ranks."""
        device = self.micro_batches.device
        added = StepSums(self.model, self.routers, device)
        weights, trained = None, dict[str, Tensor]()
        if self.plan.ignores_labels:
            batches = [tokens.to(device, non_blocking=True) for tokens in batches]
            # before the weights' gathers, which the same communicator may run in order
            weights, trained = self._loss_weights(batches)
        self.optimizer.start_gather()
        self.micro_batches.train(batches, added.add, weights)
        totals = added.reduce(self.plan, self.mesh)
        return totals._replace(scalars=totals.scalars | trained)

    def _loss_weights(self, batches: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        # The mean of micro-batches' weighted means is that over the trained tokens of the global batch.
        counts_MD = self.model.count_trained(batches)
        (trained_D,) = sums(self.mesh.group("dp"), counts_MD.sum(dim=0))
        weights_MD = counts_MD * (self.plan.global_micro_batches / trained_D.clamp_min(1))
        return weights_MD, {TRAINED[0]: trained_D[0]}

    def _overflow(self, totals: Totals) -> dict[str, Tensor]:
        # A layer that received more than its capacity makes the step a no-op.
        if totals.received_L2 is None:
            return {}
        dispatchers, void = self.model.dispatchers, self.optimizer.void
        if dispatchers[0].capacity is not None:
            if self._capacities_of != dispatchers:  # before any capture: each program runs uncaptured first
                self._capacities_of, self._capacities_L2 = dispatchers, rooms_of(dispatchers, void.device)
            void.copy_(torch.maximum(void, (totals.received_L2 > self._capacities_L2).any().float()))
        rows, slots = totals.received_L2.amax(dim=0).unbind()
        of_mean = slots / self.plan.balanced.slots
        load = {"receive_load": torch.maximum(rows / self.plan.balanced.rows, of_mean), "void": void.clone()}
        if self.plan.replica_slots:
            replica_gb = totals.scalars["replicas"] * self._replica_gb
            load |= {"planned_rank_load": of_mean, "replica_gb": replica_gb}
        return load


class _Launched(NamedTuple):
    """A launched step whose metrics the host has not checked yet."""

    step: int
    batches: list[Tensor]


class Steps:
    """Launches steps, captured as ``graph.scope`` says; queues metrics; reruns bad steps.

    The host checks a step's metrics after launching the next step. An overflowed or suspicious step and the
    one after it were no-ops, and both rerun on the same micro-batches. At the last level (no receive
    capacity) the host reads flags before the next launch, so that the next step can leave that level.
    """

    def __init__(
        self,
        step: TrainStep,
        rows: StepRows,
        heartbeat: Heartbeat,
        capture: Capture | None = None,
        ladder: ReceiveLadder | None = None,
        reruns: Reruns | None = None,
    ) -> None:
        self.step, self.rows, self._heartbeat = step, rows, heartbeat
        self._capture, self._ladder, self._reruns = capture, ladder, reruns
        self._captured: CapturedStep | None = None
        if capture is not None and step.plan.captures_step:
            self._captured = CapturedStep(step, step.micro_batches.device, capture)
        self._unconfirmed: deque[_Launched] = deque()

    def __call__(self, step: int, batches: Iterable[Tensor]) -> None:
        """Launch a step, counted from 1, and check all earlier ones."""
        if self._ladder is None and self._reruns is None:  # receive buffers hold any routing
            self.step.prepare(step)
            self.rows.append(step, self.run(batches))
        else:
            self._launch(_Launched(step, list(batches)))
            self.settle(but=1)

    def run(self, batches: Iterable[Tensor]) -> Tensor:
        """Run a step; return its metrics tensor, which the next replay overwrites."""
        if self._capture is None:
            return self.step(batches)
        if self._captured is not None:
            row = self._captured(batches)
        else:  # compiled units replay from their own graphs
            with self._capture.step():
                row = self.step(batches)
        if self._capture.is_first_replay:
            self._capture.publish()
        return row

    def settle(self, but: int = 0) -> None:
        """Check launched steps, except the last ``but``; rerun overflowed and suspicious ones."""
        while len(self._unconfirmed) > but:
            (step, batches), loads = self._unconfirmed[0], list[Load]()
            if self._ladder is not None:
                overflowed, loads = self.rows.received(step)
                if overflowed:
                    self._climb(step, loads, self._ladder)
                    continue
            if self._reruns is not None:
                values = self.rows.values(step)
                if not self._reruns.settles(step, batches, values, self._probe):
                    self._heartbeat.slow(f"step {step}, again since it is suspicious")
                    self._rerun()
                    continue
            self._unconfirmed.popleft()
            if self._ladder is not None and self._ladder.passed(step, loads):
                self._heartbeat.restart(f"the step after {step}, with more room")

    def _launch(self, launched: _Launched) -> None:
        if self._reruns is not None:
            self._reruns.launches(launched.step)
        self.rows.append(launched.step, self._run_copies(*launched))
        self._unconfirmed.append(launched)
        if self._ladder is not None and self._ladder.on_last:
            self.settle()

    def _run_copies(self, step: int, batches: Sequence[Tensor]) -> Tensor:
        # Pinned memory is only read; the CPU's stand-in for a graph overwrites its inputs.
        given = [tokens if tokens.is_pinned() else tokens.clone() for tokens in batches]
        self.step.prepare(step)
        return self.run(given)

    def _probe(self, step: int, batches: Sequence[Tensor]) -> dict[str, float]:
        self._heartbeat.slow(f"step {step}, again on other ranks")
        return self.rows.scalars(self._run_copies(step, batches))

    def _climb(self, step: int, loads: list[Load], ladder: ReceiveLadder) -> None:
        what = f"step {step}, again with more room"
        if ladder.climb(step, loads):
            self._heartbeat.restart(what)
        else:
            self._heartbeat.slow(what)  # several steps, of which the watch expects one
        self._rerun()

    def _rerun(self) -> None:
        again = [*self._unconfirmed]
        self._unconfirmed.clear()
        self.rows.drop(len(again))
        self.step.optimizer.void.zero_()
        for launched in again:
            self._launch(launched)
