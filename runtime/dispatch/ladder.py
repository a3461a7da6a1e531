"""Receive capacity levels: an overflowed step is repeated with more capacity in its fullest layers.

A program is one level for each MoE layer, with captured graphs of its own. Levels only rise, so a program is
never used again later. Last comes the unlimited dispatcher, for which the host counts rows: no token is ever
dropped.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from graphmoe.ops.dispatch import Dispatcher
from graphmoe.plan.experts import Load

log = logging.getLogger(__name__)

# from one level to the next
GROWTH = 1.25
# of a chosen level over the load
MARGIN = 1.1
# Steps; a rarer overflow is just repeated
WINDOW = 50
# Most rises of some layers only
MOST_ALONE = 8


class ReceiveLadder:
    """Chooses the receive capacity of later steps. All ranks make the same calls, with maximum loads.

    A layer rises to the first level with `MARGIN` over its load. All layers rise to the highest such level if
    the last rise is less than `WINDOW` steps ago, or after `MOST_ALONE` rises of some layers: a run has at
    most `MOST_ALONE` programs plus the number of levels.

    If a rank lacks the memory, the step runs without a limit, slowly. If n of the last `WINDOW` steps needed
    that, the run stays there until (n - 1) / 10 steps in a row, rounded up, would have fitted: at most 5.
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
        """``levels`` rise to the worst case; ``last`` has no limit. The first level, program 0, is in use.

        ``use`` sets each layer's dispatcher and the program, None for ``last``. ``has_memory``: whether all
        ranks can replace the first dispatchers by the second; a collective. ``last_words`` describe ``last``.
        """
        assert last.capacity is None
        self._levels, self._last, self._last_words = levels, last, last_words
        self._use, self._has_memory = use, has_memory
        self._at = (0,) * num_layers
        self._program, self._alone = 0, 0
        self._risen = -WINDOW  # step of the last rise
        self._refused: set[tuple[int, ...]] = set()
        self.on_last = False  # for the next step
        self._needed: set[int] = set()  # recent steps that needed the last dispatcher
        self._fitted = 0  # steps in a row on it that would have fitted

    def climb(self, step: int, loads: Sequence[Load]) -> bool:
        """Raise capacity for an overflowed step with these loads by layer; True if the program changes."""
        layer, load, room = self._tightest(loads)
        rises = self._rise(step, loads)
        if not rises:
            self.on_last, self._fitted = True, 0
            self._needed.add(step)
        log.warning(
            "step %d: %d rows and %d slots arrived at a rank in MoE layer %d, over its capacity of %d and "
            "%d; the step runs again with %s",
            step,
            *load,
            layer,
            *room,
            self._words() if rises else self._last_words,
        )
        self._use_current()
        return rises

    def passed(self, step: int, loads: Sequence[Load]) -> bool:
        """Count a step without overflow; True if the next one has a new program."""
        if not self.on_last:
            return False
        fits = all(map(_fits, loads, self._rooms()))
        self._fitted = self._fitted + 1 if fits else 0
        if not fits:
            self._needed.add(step)
        self._needed = {each for each in self._needed if each > step - WINDOW}
        # without a limit the loads are exact
        rises = not fits and self._rise(step, loads)
        if rises or self._fitted >= -(-(len(self._needed) - 1) // 10):
            self.on_last = False
            log.info("step %d: later steps run with %s", step, self._words())
            self._use_current()
        return rises

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """Run the block with the unlimited dispatcher."""
        self._use((self._last,) * len(self._at), None)
        try:
            yield
        finally:
            self._use_current()

    def _rise(self, step: int, loads: Sequence[Load]) -> bool:
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
