"""Steps launched one ahead of what the host knows of them; those that were void run again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from graphmoe.plan.receive_budget import Load
from graphmoe.runtime.capture.step import Step
from graphmoe.runtime.dispatch.ladder import ReceiveLadder, Rung
from graphmoe.training.heartbeat import Heartbeat
from graphmoe.training.step_rows import StepRows


class _Launched(NamedTuple):
    """A step of which the host does not know yet whether it counts."""

    step: int
    batches: list[Tensor]
    rung: Rung


class RetryingSteps:
    """Runs optimizer steps and keeps their rows.

    With a ladder it asks, once a step was launched, whether there was room for what arrived in the one
    before: by then the device has work for as long as the host waits. A step for which there was none has
    changed nothing, nor has the one after it. Both run again on the next rung, on the same micro-batches,
    and nobody else learns of it.
    """

    def __init__(
        self, run: Step, rows: StepRows, void: Tensor, heartbeat: Heartbeat, ladder: ReceiveLadder | None
    ) -> None:
        """``void`` is the flag of `graphmoe.optim.base.StepOptimizer`."""
        self._run, self._rows, self._void, self._heartbeat, self._ladder = run, rows, void, heartbeat, ladder
        self._open: deque[_Launched] = deque()

    def __call__(self, step: int, batches: Iterable[Tensor]) -> None:
        """Launch the next step. All before it count when this returns."""
        if self._ladder is None:
            self._rows.append(step, self._run(batches))
            return
        self._launch(_Launched(step, list(batches), self._ladder.rung))
        self._confirm(but=1)

    def settle(self) -> None:
        """Return when all steps that were launched count: before anybody reads what they have made."""
        self._confirm(but=0)

    def _launch(self, launched: _Launched) -> None:
        # Pinned memory is read only; what stands for a graph on a CPU spoils what it is given.
        given = [tokens if tokens.is_pinned() else tokens.clone() for tokens in launched.batches]
        self._rows.append(launched.step, self._run(given))
        self._open.append(launched)

    def _confirm(self, but: int) -> None:
        """Ask for all launched steps but so many of the last."""
        while len(self._open) > but:
            assert self._ladder is not None
            step, _, rung = self._open[0]
            values = self._rows.values(step)
            load = Load(int(values["received_rows"]), int(values["received_slots"]))
            if values["void"]:
                self._run_again(step, load, rung, self._ladder)
            else:
                self._open.popleft()
                self._ladder.passed(step, load)

    def _run_again(self, step: int, load: Load, too_small: Rung, ladder: ReceiveLadder) -> None:
        """Go on from before ``step``, with more room than a rung has."""
        again = [*self._open]
        self._open.clear()
        self._rows.drop(len(again))
        what = f"step {step}, again with more room"
        if ladder.climb(step, load, too_small):
            self._heartbeat.anew(what)
        else:
            self._heartbeat.slow(what)  # several steps, of which the watch expects one
        self._void.zero_()
        for launched in again:
            self._launch(launched._replace(rung=ladder.rung))
