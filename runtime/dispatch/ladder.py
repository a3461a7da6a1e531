"""Room for rows that arrive at a rank: more after a step that found too little, less later.

Rungs are programs that compute the same step and differ in room. The last rung has no limit, so no token is
ever dropped.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from graphmoe.ops.dispatch import Dispatcher
from graphmoe.plan.experts import Load

log = logging.getLogger(__name__)

CALM_STEPS = 50
"""Number of steps in a row after which a lower rung is taken again, if it had room for all of them.

A step without room costs two more, so a load that comes and goes around the budget costs 4% of the time,
where the next rung is as fast.
"""


@dataclass(frozen=True)
class Rung:
    """Room for rows that arrive, and the dispatcher that brings them."""

    number: int
    words: str
    """Description for the log."""
    dispatcher: Dispatcher
    num_bytes: int
    """Memory of what grows with the room."""

    @property
    def has_limit(self) -> bool:
        """Return whether there is a room to plan; only then graphs can hold it."""
        return self.dispatcher.capacity is not None

    def takes(self, load: Load) -> bool:
        """Return whether there is room for a load."""
        room = self.dispatcher.capacity
        return room is None or (load.rows <= room.rows and load.slots <= room.slots)


class ReceiveLadder:
    """Choose the rung that steps run on. All ranks call it alike, with loads of all ranks."""

    def __init__(
        self, rungs: Sequence[Rung], use: Callable[[Rung], None], has_memory: Callable[[int], bool]
    ) -> None:
        """``use`` makes later steps run on a rung; the first one is in use.

        ``has_memory`` says whether every rank has so many bytes left; a collective.
        """
        assert not rungs[-1].has_limit
        self._rungs, self._use, self._has_memory = rungs, use, has_memory
        self._at = 0
        self._used = {0}
        self._calm: list[Load] = []
        """Loads of the last steps in a row that a lower rung has room for."""

    @property
    def rung(self) -> Rung:
        """Rung of the next step."""
        return self._rungs[self._at]

    def climb(self, step: int, load: Load, too_small: Rung) -> bool:
        """Take the next higher rung that has memory; returns True if it was never used before.

        ``step`` ran on ``too_small`` and is void, since this ``load`` arrived at a rank.
        """
        room = too_small.dispatcher.capacity
        assert room is not None
        self._at, self._calm = self._above(too_small), []
        is_new = self._at not in self._used
        self._used.add(self._at)
        log.warning(
            "step %d: %d rows and %d slots arrived at a rank, and %s has room for %d and %d; it runs again "
            "with %s%s",
            step,
            *load,
            too_small.words,
            *room,
            self.rung.words,
            self._room(),
        )
        self._use(self.rung)
        return is_new

    def passed(self, step: int, load: Load) -> None:
        """Count a step with this load; after `CALM_STEPS` take the lowest rung with room for each of them."""
        lower = [rung for rung in self._rungs[: self._at] if rung.number in self._used]
        if not any(rung.takes(load) for rung in lower):
            self._calm = []
            return
        self._calm.append(load)
        if len(self._calm) < CALM_STEPS:
            return
        fit = [rung for rung in lower if all(map(rung.takes, self._calm))]
        if not fit:
            self._calm.pop(0)
            return
        left, self._at, self._calm = self.rung, fit[0].number, []
        log.info(
            "step %d: the last %d steps had room in %s, which takes the place of %s%s",
            step,
            CALM_STEPS,
            self.rung.words,
            left.words,
            self._room(),
        )
        self._use(self.rung)

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """Let the block run with room for everything."""
        self._use(self._rungs[-1])
        try:
            yield
        finally:
            self._use(self.rung)

    def _above(self, below: Rung) -> int:
        for rung in self._rungs[below.number + 1 : -1]:
            if rung.number in self._used or self._has_memory(rung.num_bytes):
                return rung.number
            log.warning(
                "%s needs %.2f GiB, which not every rank has left", rung.words, rung.num_bytes / 2**30
            )
        return self._rungs[-1].number

    def _room(self) -> str:
        room = self.rung.dispatcher.capacity
        return "" if room is None else f" ({room.rows} rows, {room.slots} slots)"
