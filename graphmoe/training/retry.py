"""Steps launched one ahead of the host's knowledge, and run again where they were void."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.config.schema import Fp8Recipe
from graphmoe.model.transformer import Transformer
from graphmoe.plan.experts import Load, room_bytes
from graphmoe.plan.plan import Plan
from graphmoe.run.machine import free_bytes
from graphmoe.runtime.capture.capture import Capture
from graphmoe.runtime.capture.step import Step
from graphmoe.runtime.dispatch import bounded_dispatcher, make_room, planned_dispatcher
from graphmoe.runtime.dispatch.ladder import ReceiveLadder, Rung
from graphmoe.runtime.launch.stamps import Heartbeat
from graphmoe.runtime.ranks import Mesh, Ranks
from graphmoe.training.step_rows import StepRows


class _Launched(NamedTuple):
    """A launched step that the host has not confirmed yet."""

    step: int
    batches: list[Tensor]
    rung: Rung


class RetryingSteps:
    """Runner of optimizer steps that keeps their rows.

    With a ladder it asks, once a step was launched, whether there was room for what arrived in the one
    before: by then the device has work for as long as the host waits. A step for which there was none has
    changed nothing, nor has the one after it. Both run again on the next rung, on the same micro-batches,
    and nobody else learns of it.
    """

    def __init__(
        self,
        run: Step,
        rows: StepRows,
        void: Tensor,
        heartbeat: Heartbeat,
        ladder: ReceiveLadder | None,
        prepare: Callable[[int], None] = lambda step: None,
    ) -> None:
        """``void`` is the flag of `graphmoe.optim.base.StepOptimizer`; ``prepare`` comes before each step."""
        self.run, self._rows, self._void, self._heartbeat, self._ladder = run, rows, void, heartbeat, ladder
        self._prepare = prepare
        self._open: deque[_Launched] = deque()

    def __call__(self, step: int, batches: Iterable[Tensor]) -> None:
        """Launch the next step, and confirm all before it."""
        if self._ladder is None:
            self._prepare(step)
            self._rows.append(step, self.run(batches))
            return
        self._launch(_Launched(step, list(batches), self._ladder.rung))
        self.settle(but=1)

    def _launch(self, launched: _Launched) -> None:
        # Pinned memory is read only; what stands for a graph on a CPU spoils what it is given.
        given = [tokens if tokens.is_pinned() else tokens.clone() for tokens in launched.batches]
        self._prepare(launched.step)
        self._rows.append(launched.step, self.run(given))
        self._open.append(launched)

    def settle(self, but: int = 0) -> None:
        """Confirm all launched steps but the last ``but``, before anybody reads their results."""
        while len(self._open) > but:
            assert self._ladder is not None
            step, _, rung = self._open[0]
            values = self._rows.values(step)
            load = Load(int(values["received_rows"]), int(values["received_slots"]))
            if values["void"]:
                self._restart(step, load, rung, self._ladder)
            else:
                self._open.popleft()
                self._ladder.passed(step, load)

    def _restart(self, step: int, load: Load, too_small: Rung, ladder: ReceiveLadder) -> None:
        """Go on from before ``step``, with more room than a rung has."""
        again = [*self._open]
        self._open.clear()
        self._rows.drop(len(again))
        what = f"step {step}, again with more room"
        if ladder.climb(step, load, too_small):
            self._heartbeat.restart(what)
        else:
            self._heartbeat.slow(what)  # several steps, of which the watch expects one
        self._void.zero_()
        for launched in again:
            self._launch(launched._replace(rung=ladder.rung))


def receive_ladder(
    plan: Plan,
    mesh: Mesh,
    ranks: Ranks,
    model: Transformer,
    device: torch.device,
    capture: Capture | None,
    *,
    fused: bool,
) -> ReceiveLadder | None:
    """Return what makes more room where it is too little; None where there is always enough."""
    if model.dispatcher is None or model.dispatcher.capacity is None:
        return None
    rungs = rungs_of(plan, mesh, fused=fused)

    def use(rung: Rung) -> None:
        make_room(plan, mesh, rung.dispatcher, device)
        model.use(rung.dispatcher)
        if capture:
            capture.use(rung.number if rung.has_limit else None)

    def has_memory(num_bytes: int) -> bool:
        # Steps that warm up run beside the graphs, whose pool is as large as what they need.
        pool, idle = (capture.maker.pool_bytes(), capture.maker.pool_unused_bytes()) if capture else (0, 0)
        return all(ranks.gather(num_bytes + pool <= free_bytes(device) - idle))

    return ReceiveLadder(rungs, use, has_memory) if rungs else None


def rungs_of(plan: Plan, mesh: Mesh, *, fused: bool) -> list[Rung]:
    """Return rungs of the receive budget, twice as much, and no limit; none where the first is enough.

    ``fused`` is True where the experts run as one operation.
    """
    found: list[Rung] = []
    for words, factor in (("the receive budget", 1.0), ("twice the receive budget", 2.0)):
        room = plan.room(factor)
        dispatcher = planned_dispatcher(plan, factor)
        planned = dispatcher.capacity or room
        num_bytes = room_bytes(planned, plan.config.model, plan.layout, plan.dtype.itemsize, fused=fused)
        found.append(Rung(len(found), words, dispatcher, num_bytes))
        if room == plan.worst:
            break
    if len(found) == 1:
        return []
    precision = plan.config.precision
    in_fp8 = precision.fp8 is not Fp8Recipe.none and "experts" in precision.fp8_products
    words = f"the counts of the host{', where experts are not in 8 bits' * in_fp8}"
    return [*found, Rung(len(found), words, bounded_dispatcher(plan, mesh), 0)]
