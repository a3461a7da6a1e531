"""A suspicious step runs again twice: on the same ranks, then on another replica of the model.

A step is suspicious if its loss or gradient norm is not finite, or its loss exceeds `Reruns.limit`. A replica
is the smallest set of ranks that compute a loss together. `Gate` holds the update of a suspicious step, so it
runs again from the same state, as a step that overflowed its receive buffers.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.config.schema import DpShard
from graphmoe.model.transformer import LossOutput, Transformer
from graphmoe.optim.base import StepOptimizer, norm_of
from graphmoe.plan.plan import Plan
from graphmoe.run.machine import place_of
from graphmoe.runtime.launch.failures import DeviceFault
from graphmoe.runtime.ranks import Mesh, Ranks, sums
from graphmoe.training.step_rows import OWN

log = logging.getLogger(__name__)

WINDOW, LEAST = 64, 16  # losses that set the limit, and fewest of them
FLOOR = 0.01  # least spread of losses, over their median
# Relative difference of equal losses: kernels may add in any order, most differently when a run diverges. The
# loss of a rank that alone lifts the mean of all beyond the limit differs more.
ROUNDING = 0.05
LARGEST = 1.8e19  # norm whose square is finite in fp32
Probe = Callable[[int, Sequence[Tensor]], dict[str, float]]  # step, batches -> metrics, without an update


class Gate:
    """Holds a suspicious step on the device: it and the step after it are no-ops. No device sync."""

    def __init__(self, optimizer: StepOptimizer, mesh: Mesh) -> None:
        self._optimizer, self._mesh = optimizer, mesh
        self._limit, self._holds = (torch.ones_like(optimizer.void) for _ in range(2))
        self._counters: list[tuple[Tensor, Tensor]] = []  # each with its value before the step

    def set(self, limit: float, *, holds: bool) -> None:
        """Set the largest loss of the steps launched next, and whether any are held; outside of graphs."""
        self._limit.fill_(limit)
        self._holds.fill_(float(holds))

    @torch.no_grad()
    def before(self, loss: Tensor) -> None:
        """Make the update a no-op if the loss is too large."""
        optimizer = self._optimizer
        # summed, since a fault may change the loss of one rank, and all must agree on the verdict
        (high,) = sums(self._mesh.group("world"), (~(loss <= self._limit)).float())
        optimizer.void.copy_(torch.maximum(optimizer.void, (high > 0) * self._holds))
        counters = optimizer.skipped, optimizer.skipped_in_row, optimizer.longest_skip
        self._counters = [(counter, counter.clone()) for counter in counters]

    @torch.no_grad()
    def after(self, finite: Tensor, grad_norm: Tensor) -> dict[str, Tensor]:
        """Hold a step that was not applied, uncounted; return this rank's gradient norm before sums."""
        held, optimizer = (1 - finite) * self._holds, self._optimizer
        for counter, old in self._counters:
            counter.copy_(torch.where(held > 0, old, counter))
        self._counters = []  # of a graph's pool, if captured
        optimizer.void.copy_(torch.maximum(optimizer.void, held))
        if self._mesh.group("world") is None:
            return {OWN[1]: grad_norm}
        own = optimizer.own_gradients()
        return {OWN[1]: norm_of(own) if own else torch.zeros_like(grad_norm)}


class Own(NamedTuple):
    """A rank's results of a step before sums over ranks."""

    loss: float
    grad: float  # norm; 0 if the rank does not keep its gradients

    @property
    def badness(self) -> tuple[bool, bool, float]:
        return not math.isfinite(self.loss), not self.grad < LARGEST, self.loss

    def is_like(self, other: Self) -> bool:
        """Compare losses, and whether they and the gradients are finite."""
        alike = self.badness[:2] == other.badness[:2]
        return alike and (self.badness[0] or math.isclose(self.loss, other.loss, rel_tol=ROUNDING))


class Reruns:
    """Verdicts on suspicious steps. All ranks make the same calls, in the order of steps."""

    def __init__(
        self, plan: Plan, ranks: Ranks, model: Transformer, gate: Gate, device: torch.device
    ) -> None:
        self._plan, self._ranks, self._gate = plan, ranks, gate
        self._here = f"rank {ranks.rank} on {place_of(device)}"
        layout, fault = plan.layout, plan.train.inject_fault
        size, every = layout.size("stage"), range(layout.size("world"))
        of_replica = math.lcm(layout.size("cp_tp"), layout.size("ep_etp"))  # ranks in a stage
        self._replica = [rank % size // of_replica for rank in every]
        # the rank of the next replica whose batches each rank runs
        self._sources = [rank // size * size + (rank % size + of_replica) % size for rank in every]
        self._losses = deque[float](maxlen=WINDOW)
        self._first: tuple[int, Own] | None = None  # a suspicious step and its first results
        self._accepted = 0  # step whose next run is not held
        self._fault = InjectedFault(fault, model) if fault else None

    def limit(self) -> float:
        """Return the largest loss of the next step that is not suspicious."""
        factor = self._plan.train.spike_factor
        if not factor or len(self._losses) < LEAST:
            return math.inf
        middle = statistics.median(self._losses)
        spread = statistics.median(abs(loss - middle) for loss in self._losses)
        return middle + factor * max(spread, FLOOR * abs(middle))

    def launches(self, step: int) -> None:
        """Prepare a run of a step, outside of graphs."""
        self._gate.set(self.limit(), holds=step != self._accepted)
        if self._fault:
            again = step == self._accepted or (self._first is not None and step == self._first[0])
            self._fault.set(step, self._ranks.rank, self._ranks.rank, again=again)

    def settles(self, step: int, batches: Sequence[Tensor], values: dict[str, float], probe: Probe) -> bool:
        """Return whether a step's last run is final; if not, launch it again. Collective if suspicious.

        *Raises* DeviceFault if a rank's results are wrong repeatedly.
        """
        loss, norm, suspicious = values["loss"], values["grad_norm"], values["skipped"] > 0
        if step == self._accepted or not (suspicious or self._first):
            self._finish(loss)
            return True
        own, words = _own(values), f"loss {loss:.4g} (limit {self.limit():.4g}), gradient norm {norm:.3g}"
        if self._first is None:
            self._first = step, own
            log.warning("step %d is suspicious, and runs again: %s", step, words)
            return False
        runs: list[tuple[Own, Own, str]] = self._ranks.gather((self._first[1], own, self._here))
        changed = [place for first, second, place in runs if not first.is_like(second)]
        if not suspicious:
            cause = f"a transient fault of {_one_of(changed)}" if changed else "rounding, or an unknown rank"
            log.warning("step %d ran again, %s: %s; the run continues", step, words, cause)
            self._finish(loss)
            return True
        if changed:
            raise self._faulty(step, changed, "differ from run to run")
        finite = math.isfinite(loss) and norm < LARGEST
        verdict = self._elsewhere(step, batches, runs, probe, spikes=finite)
        fate = "its update is applied" if finite else "it is skipped"
        log.warning("step %d gave the same again, %s: %s; %s", step, words, verdict, fate)
        self._first, self._accepted = None, step
        if finite:  # losses that stay high would all run again
            self._losses.clear()
        return False

    def _elsewhere(
        self,
        step: int,
        batches: Sequence[Tensor],
        runs: list[tuple[Own, Own, str]],
        probe: Probe,
        *,
        spikes: bool,
    ) -> str:
        here, plan = [second for _, second, _ in runs], self._plan
        worst = max(range(len(here)), key=lambda rank: here[rank].badness)
        if not any(self._replica):
            return "one replica of the model cannot tell data from device"
        shards_gradients = plan.optim.grad_shard or plan.parallel.dp_shard is not DpShard.zero1
        if shards_gradients and not spikes and math.isfinite(here[worst].loss):
            return "gradients of single ranks, which would tell data from device, are not kept"
        if self._fault:
            self._fault.set(step, self._ranks.rank, self._sources[self._ranks.rank], again=True)
        there: list[Own] = self._ranks.gather(_own(probe(step, self._swapped(batches))))
        checked = {
            r: self._sources.index(r) for r, n in enumerate(self._replica) if n == self._replica[worst]
        }
        if wrong := [runs[rank][2] for rank, by in checked.items() if not here[rank].is_like(there[by])]:
            raise self._faulty(step, wrong, "are not those of another rank with the same batches")
        size, other = plan.train.micro_batch_size, runs[checked[worst]][2]
        first = plan.layout.index("dp", worst) * size
        rows = f"{first} to {first + size - 1} of each {plan.layout.dp * size} of the global batch"
        text = f"so did {other} with the batches of rank {worst}"
        return f"{text}, so it is in the data (sequences {rows}) or the weights"

    def _swapped(self, batches: Sequence[Tensor]) -> list[Tensor]:
        rank, group, own = self._ranks.rank, self._ranks.group, torch.stack([*batches]).cpu()
        received = torch.empty_like(own)
        work = dist.isend(own, self._sources.index(rank), group=group)
        dist.recv(received, self._sources[rank], group=group)
        assert work is not None
        work.wait()
        return [*received]

    def _finish(self, loss: float) -> None:
        self._first, self._accepted = None, 0
        if math.isfinite(loss):
            self._losses.append(loss)

    def _faulty(self, step: int, places: list[str], how: str) -> DeviceFault:
        text = (
            f"step {step}: suspicious results of {_one_of(places)} {how}: the device is faulty. Nothing is "
            f"saved; the same command without that device resumes from the newest checkpoint"
        )
        return DeviceFault(text, here=self._here in places)


class InjectedFault:
    """Fault of ``train.inject_fault``: multiplies a rank's losses in a step, in captured steps too."""

    def __init__(self, words: str, model: Transformer) -> None:
        kind, rank, step, *factor = words.split(":")
        self._kind, self._rank, self._step = kind, int(rank), int(step)
        self._factor = float(factor[0]) if factor else math.nan
        self._scale = scale = torch.ones((), device=next(model.parameters()).device)
        whole = model.stage

        def stage(*arguments: Any) -> LossOutput:
            found = whole(*arguments)
            if not torch.is_grad_enabled():
                return found
            return found._replace(total=found.total * scale, cross_entropy=found.cross_entropy * scale)

        model.stage = stage  # type: ignore[method-assign, assignment]
        log.warning("TRAIN.INJECT_FAULT=%s IS ON: results of that step are wrong. This is for tests", words)

    def set(self, step: int, rank: int, source: int, *, again: bool) -> None:
        """Set the factor of a run on ``rank`` with the batches of rank ``source``, outside of graphs."""
        at = {"transient": rank if not again else -1, "persistent": rank, "data": source}[self._kind]
        self._scale.fill_(self._factor if step == self._step and at == self._rank else 1.0)


def _own(values: dict[str, float]) -> Own:
    return Own(*(values[name] for name in OWN))


def _one_of(places: Sequence[str]) -> str:
    return places[0] if len(places) == 1 else f"one of {'; '.join(places)}"
