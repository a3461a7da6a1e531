"""Room for rows that arrive at a rank: more in layers of a step that found too little.

Each MoE layer has a level of room, and the levels of all layers make a program with graphs of its own. Levels
only rise, so a program that is left is left for good. The last rung beside them has no limit, since the host
counts there, and no token is ever dropped.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from graphmoe.ops.dispatch import Dispatcher
from graphmoe.plan.experts import Load

log = logging.getLogger(__name__)

GROWTH = 1.25
"""Room of a level over that of the level below."""
MARGIN = 1.1
"""Room for a load over the load."""
WINDOW = 50
"""Steps: what happens once in as many is paid for as it comes."""
MOST_ALONE = 8
"""Programs in which some layers have more room than the one before gave them, and others have not."""


class ReceiveLadder:
    """Choose the room that steps run with. All ranks call it alike, with loads of all ranks.

    A step that found too little room is void and runs again. Layers in which its load and a tenth more do
    not fit rise to the first level where they do. So that few programs are made, all layers rise to the
    highest of these levels where the last rise is less than `WINDOW` steps ago, and once `MOST_ALONE` rises
    were of some layers only: a run has no more programs than `MOST_ALONE` plus the number of levels.

    Where a rank lacks the memory, the step runs on the last rung, slowly, and the step after it on planned
    room again. If more than one of the last `WINDOW` steps needed the last rung, the run stays there until
    one step in a row has fitted for every ten of the others, rounded up. So a load that does not fit once in
    50 steps makes one of these slow; and whatever the loads are, behind a step that needed it no more than 5
    are slow that would have fitted.
    """

    def __init__(
        self,
        levels: Sequence[Dispatcher],
        last: Dispatcher,
        num_layers: int,
        use: Callable[[tuple[Dispatcher, ...], int | None], None],
        has_memory: Callable[[tuple[Dispatcher, ...], tuple[Dispatcher, ...]], bool],
        last_words: str = "the counts of the host",
    ) -> None:
        """``levels`` rise to the worst case; ``last`` has no limit. Layers are all MoE layers of the model.

        ``use`` makes later steps run with these dispatchers of the layers, and their program's number, None
        on the last rung; the first level, number 0, is in use. ``has_memory`` returns whether every rank has
        the memory for the second dispatchers in place of the first; a collective.
        """
        assert last.capacity is None
        self._levels, self._last, self._last_words = levels, last, last_words
        self._use, self._has_memory = use, has_memory
        self._at = (0,) * num_layers
        self._program, self._alone = 0, 0
        self._risen = -WINDOW
        """Step of the last rise."""
        self._refused: set[tuple[int, ...]] = set()
        self.on_last = False
        """True where the next step runs on the last rung."""
        self._needed: set[int] = set()
        """Steps that needed the last rung, of the last `WINDOW` ones."""
        self._fitted = 0
        """Steps in a row on the last rung that would have fitted."""

    def climb(self, step: int, loads: Sequence[Load]) -> bool:
        """Make room for a void step, at which these loads of layers arrived; True if its program is new."""
        layer, load, room = self._tightest(loads)
        rises = self._rise(step, loads)
        if not rises:
            self.on_last, self._fitted = True, 0
            self._needed.add(step)
        log.warning(
            "step %d: %d rows and %d slots arrived at a rank in MoE layer %d, which has room for %d and %d; "
            "it runs again with %s",
            step,
            *load,
            layer,
            *room,
            self._words() if rises else self._last_words,
        )
        self._use_current()
        return rises

    def passed(self, step: int, loads: Sequence[Load]) -> bool:
        """Count a step that had room; True if the next one has a new program.

        After a step on the last rung the loads are exact, and layers in which they do not fit may rise.
        """
        if not self.on_last:
            return False
        fits = all(map(_fits, loads, self._rooms()))
        self._fitted = self._fitted + 1 if fits else 0
        if not fits:
            self._needed.add(step)
        self._needed = {each for each in self._needed if each > step - WINDOW}
        rises = not fits and self._rise(step, loads)
        if rises or self._fitted >= -(-(len(self._needed) - 1) // 10):
            self.on_last = False
            log.info("step %d: later steps run with %s", step, self._words())
            self._use_current()
        return rises

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """Let the block run with room for everything."""
        self._use((self._last,) * len(self._at), None)
        try:
            yield
        finally:
            self._use_current()

    def _rise(self, step: int, loads: Sequence[Load]) -> bool:
        """Give layers more room, if there is memory for it; returns whether they have it."""
        wanted = tuple(max(at, self._level_for(load)) for at, load in zip(self._at, loads, strict=True))
        if wanted == self._at:
            return False
        alike = (max(wanted),) * len(wanted)
        tries = [alike] if step - self._risen < WINDOW or self._alone >= MOST_ALONE else []
        tries += [wanted] if self._alone < MOST_ALONE else []
        found = next((each for each in tries if self._affords(each)), None)
        if found is None:
            return False
        self._alone += found != alike
        self._at, self._risen, self._program = found, step, self._program + 1
        self._refused.clear()
        return True

    def _affords(self, at: tuple[int, ...]) -> bool:
        if at not in self._refused and not self._has_memory(self._of(self._at), self._of(at)):
            self._refused.add(at)
        return at not in self._refused

    def _level_for(self, load: Load) -> int:
        more = Load(*(int(MARGIN * count) for count in load))
        fit = (level for level, room in enumerate(self._levels) if _fits(more, _capacity(room)))
        return next(fit, len(self._levels) - 1)

    def _tightest(self, loads: Sequence[Load]) -> tuple[int, Load, Load]:
        found = zip(range(len(loads)), loads, self._rooms(), strict=True)
        return max(found, key=lambda each: max(each[1].rows / each[2].rows, each[1].slots / each[2].slots))

    def _of(self, at: tuple[int, ...]) -> tuple[Dispatcher, ...]:
        return tuple(self._levels[level] for level in at)

    def _rooms(self) -> list[Load]:
        return [_capacity(dispatcher) for dispatcher in self._of(self._at)]

    def _use_current(self) -> None:
        if self.on_last:
            self._use((self._last,) * len(self._at), None)
        else:
            self._use(self._of(self._at), self._program)

    def _words(self) -> str:
        more, room = sum(level > 0 for level in self._at), max(self._rooms())
        if not more:
            return f"the receive budget ({room.rows} rows, {room.slots} slots)"
        layers = f"{more} of {len(self._at)} MoE layers"
        return f"more than the receive budget in {layers} (up to {room.rows} rows, {room.slots} slots)"


def _fits(load: Load, room: Load) -> bool:
    return load.rows <= room.rows and load.slots <= room.slots


def _capacity(dispatcher: Dispatcher) -> Load:
    assert dispatcher.capacity is not None
    return dispatcher.capacity
