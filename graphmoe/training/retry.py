"""Steps launched one ahead of the host's knowledge, and run again where they were void."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.model.transformer import Transformer
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.ops.symm import forget_graphs
from graphmoe.plan.experts import Load, experts_in_fp8, room_bytes
from graphmoe.plan.plan import Plan
from graphmoe.run.machine import memory_gib, reachable_bytes
from graphmoe.runtime.capture.capture import Capture
from graphmoe.runtime.capture.step import Step
from graphmoe.runtime.dispatch import bounded_dispatcher, make_room, planned_dispatcher
from graphmoe.runtime.dispatch.ladder import GROWTH, ReceiveLadder
from graphmoe.runtime.launch.stamps import Heartbeat
from graphmoe.runtime.ranks import Mesh, Ranks
from graphmoe.training.step_rows import StepRows

log = logging.getLogger(__name__)

SPARE = 1.03
"""Memory that torch's allocator holds over what is allocated at most: parts of blocks that fit nothing."""


class _Launched(NamedTuple):
    """A launched step that the host has not confirmed yet."""

    step: int
    batches: list[Tensor]


class RetryingSteps:
    """Runner of optimizer steps that keeps their rows.

    With a ladder it asks, once a step was launched, whether there was room for what arrived in the one
    before: by then the device has work for as long as the host waits. A step for which there was none has
    changed nothing, nor has the one after it. Both run again, on the same micro-batches, and nobody else
    learns of it. A step on the last rung is confirmed at once, so that the next need not run there.
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
        self._launch(_Launched(step, list(batches)), self._ladder)
        self.settle(but=1)

    def _launch(self, launched: _Launched, ladder: ReceiveLadder) -> None:
        # Pinned memory is read only; what stands for a graph on a CPU spoils what it is given.
        given = [tokens if tokens.is_pinned() else tokens.clone() for tokens in launched.batches]
        self._prepare(launched.step)
        self._rows.append(launched.step, self.run(given))
        self._open.append(launched)
        if ladder.on_last:
            self.settle()

    def settle(self, but: int = 0) -> None:
        """Confirm all launched steps but the last ``but``, before anybody reads their results."""
        while len(self._open) > but:
            assert self._ladder is not None
            step = self._open[0].step
            void, loads = self._rows.received(step)
            if void:
                self._restart(step, loads, self._ladder)
                continue
            self._open.popleft()
            if self._ladder.passed(step, loads):
                self._heartbeat.restart(f"the step after {step}, with more room")

    def _restart(self, step: int, loads: list[Load], ladder: ReceiveLadder) -> None:
        again = [*self._open]
        self._open.clear()
        self._rows.drop(len(again))
        what = f"step {step}, again with more room"
        if ladder.climb(step, loads):
            self._heartbeat.restart(what)
        else:
            self._heartbeat.slow(what)  # several steps, of which the watch expects one
        self._void.zero_()
        for launched in again:
            self._launch(launched, ladder)


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
    levels = levels_of(plan)
    if len(levels) == 1:
        return None

    def use(dispatchers: tuple[Dispatcher, ...], program: int | None) -> None:
        if capture and capture.use(program):  # first, so that graphs of another give back what they held
            forget_graphs()
        if program is not None:
            make_room(plan, mesh, max(dispatchers, key=lambda each: each.capacity or ()), device)
        model.use(dispatchers)

    def has_memory(now: tuple[Dispatcher, ...], then: tuple[Dispatcher, ...]) -> bool:
        more = _bytes(plan, then, fused=fused) - _bytes(plan, now, fused=fused)
        unused = capture.maker.pool_unused_bytes() if capture else 0
        found = ranks.gather(has_bytes(more, device, unused))
        if not all(found):
            log.warning("more room needs %.2f GiB, which not every rank has left", more / 2**30)
        return all(found)

    last, in_fp8 = bounded_dispatcher(plan, mesh), experts_in_fp8(plan.config)
    words = f"the counts of the host{', where experts are not in 8 bits' * in_fp8}"
    return ReceiveLadder(levels, last, model.num_moe_layers, use, has_memory, words)


def has_bytes(more: int, device: torch.device, pool_unused: int) -> bool:
    """Return whether a step may take so many bytes more than those so far, once the graphs' pool is gone.

    A step takes what it took at most so far; a replayed one, what lasts and all of the pool, of which
    ``pool_unused`` bytes hold nothing between steps. Graphs of more room are made when those before them have
    given theirs back, so what is in the pool now is theirs.
    """
    if device.type != "cuda":
        return True
    lasting = torch.cuda.memory_allocated(device)
    so_far = max(memory_gib(device) * 2**30, lasting + pool_unused)
    return SPARE * so_far + more <= reachable_bytes(device)


def levels_of(plan: Plan) -> list[Dispatcher]:
    """Return dispatchers with the receive budget, `GROWTH` times as much, and so on to the worst case."""
    found, factor = [planned_dispatcher(plan)], 1.0
    while plan.room(factor) != plan.worst:
        factor *= GROWTH
        found.append(planned_dispatcher(plan, factor))
    return found


def _bytes(plan: Plan, dispatchers: tuple[Dispatcher, ...], *, fused: bool) -> int:
    rooms = [each.capacity for each in dispatchers if each.capacity is not None]
    return room_bytes(rooms, plan.config.model, plan.layout, plan.dtype.itemsize, fused=fused)
