"""Stamps of a worker's progress with time limits, by which a hang is told from slow work.

A collective stalls all ranks where one does not join it, so a time is needed after which none may come. It
is known by experience only: the longest step so far. Steps before that compile and measure kernels.
"""

from __future__ import annotations

import math
import time
from types import TracebackType

from graphmoe.runtime.launch.stamps import SLOW_S, put_stamp

TIMES_LONGEST = 3.0
"""Factor over the longest known time of a kind of work, after which it counts as hung."""


class Heartbeat:
    """Stamp at each step, validation and checkpoint of a run. No device sync.

    A device works behind the host, which waits for it where it reads metrics. So the host knows how long a
    step may take at most once it has read those of steps that did not compile.
    """

    def __init__(self, hang_timeout_s: int | None, first_steps: int) -> None:
        """``first_steps`` compile, measure or capture."""
        self._timeout_s = math.inf if hang_timeout_s is None else float(hang_timeout_s)
        self._first_steps, self._begun, self._step = first_steps, 0, 0
        self._longest: dict[str, float] = {}
        """Seconds, of each kind of work that is known."""
        self._kind, self._since = "", 0.0
        self._has_read = False

    def step(self, number: int) -> None:
        """Stamp the begin of a step."""
        self._end()
        self._begun, self._step = self._begun + 1, number
        self._begin("step", f"step {number}", known=self._has_read)

    def has_read(self) -> None:
        """Note that the host has waited for the device, in the step that was begun last."""
        self._has_read = self._begun > self._first_steps

    def restart(self, what: str) -> None:
        """Stamp the begin of steps that may compile, as the first ones did."""
        self.slow(what)
        self._begun, self._has_read = 0, False

    def validation(self) -> None:
        """Stamp the begin of a validation; the first one may compile."""
        self._end()
        self._begin("validation", f"the validation after step {self._step}", "validation" in self._longest)

    def slow(self, what: str) -> None:
        """Stamp the begin of work that waits for disks."""
        self._end()
        self._begin("slow", what, known=False)

    def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stamp the end of the loop; an error must not take long to get out."""
        self._end()
        what = "the end of the run" if error is None else f"what follows {type(error).__name__}: {error}"
        self._begin("end", what, known=error is not None)

    def _begin(self, kind: str, words: str, known: bool) -> None:
        self._kind, self._since = kind, time.monotonic()
        longest = self._longest.get(kind, 0.0)
        limit_s = max(self._timeout_s, TIMES_LONGEST * longest) if known else SLOW_S
        put_stamp(words, limit_s, self._step)

    def _end(self) -> None:
        """Remember how long the work took that was begun last, unless it compiled steps."""
        if self._kind != "step" or self._begun > self._first_steps:
            took = time.monotonic() - self._since
            self._longest[self._kind] = max(took, self._longest.get(self._kind, 0.0))
