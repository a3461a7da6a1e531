"""Tables on a V: each rank has one stage of the way to the last rank and one of the way back.

Sources: "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 6, for ZB-V; "Pipeline Parallelism
with Controllable Memory" (arXiv 2405.15362), sections 2 and 3, for V-half, V-min and the way in which all
three are made: a building block says when each rank does what for one micro-batch, the next micro-batch
follows as much later as one keeps a rank busy, and the gaps at both ends are squeezed out. The times of the
blocks and the squeezing are derived here. Both count F, I and W as equally long: with other costs the tables
run, with a larger bubble.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.pipeline.actions import Action, Kind, Placement, Table
from runtime.pipeline.dependencies import needs

PERIOD = 6
"""F, I and W of two stages: how much later each micro-batch follows, in times of one of them."""


class Block(NamedTuple):
    """The times of one micro-batch, in legs: forward there and back, backward there and back."""

    steps: tuple[int, int, int, int]
    """From rank to rank, on each leg. A rank keeps less, the shorter their sum."""
    waits: tuple[int, int, int]
    """Between legs. They keep a rank's four actions apart, of whichever micro-batch; which ones do depends on
    the length of legs."""


FAST = Block((1, 1, 5, 1), (0, 1, 1))


def zbv(num_ranks: int, num_micro_batches: int, virtual_stages: int = 2) -> Table:
    """ZB-V: ends when the last rank has waited for its first forward only, and keeps what 1F1B keeps.

    That holds for as many micro-batches as ranks, or more.
    """
    assert virtual_stages == 2
    return _table("zbv", num_ranks, num_micro_batches, FAST, limit=2 * num_ranks)


def v_half(num_ranks: int, num_micro_batches: int, virtual_stages: int = 2) -> Table:
    """V-half: half of the activations of 1F1B, and one more."""
    assert virtual_stages == 2
    block = Block((1, 2, 1, 2), (0, 0, 1) if num_ranks % 2 else (0, 3, 1))
    return _table("v_half", num_ranks, num_micro_batches, block, limit=num_ranks + 2)


def v_min(num_ranks: int, num_micro_batches: int, virtual_stages: int = 2) -> Table:
    """V-min: a third of the activations of 1F1B, and up to two more."""
    assert virtual_stages == 2
    if num_ranks % 3 == 1:
        block, extra = Block((1, 1, 1, 1), (0, 0, 2)), 3
    else:
        block, extra = Block((1, 1, 1, 1), (2, 2, 2)), 4
    limit = 2 * (num_ranks // 3) + extra
    return _table("v_min", num_ranks, num_micro_batches, block, limit)


def _table(schedule: str, num_ranks: int, num_micro_batches: int, block: Block, limit: int) -> Table:
    """``limit`` is the most activations of virtual stages that a rank may keep."""
    if 2 * num_micro_batches <= limit:
        block = FAST  # all activations fit at once
    times = _times(num_ranks, block)
    ranks = [_Rank(times[rank], num_micro_batches, min(limit, 2 * num_ranks)) for rank in range(num_ranks)]
    done: set[Action] = set()
    while any(rank.waiting or rank.owed for rank in ranks):
        ticked = [action for rank in ranks if (action := rank.take(done, 2 * num_ranks))]
        assert ticked, f"{schedule} of {num_ranks} ranks keeps more than {limit}"
        done.update(ticked)
    steps = tuple(tuple(rank.steps) for rank in ranks)
    return Table(schedule, Placement.folded(num_ranks), num_micro_batches, steps)


Work = tuple[Kind, int]
"""F or I, and the stage."""


def _times(num_ranks: int, block: Block) -> list[dict[Work, int]]:
    """By rank: when it does F and I of its two stages for micro-batch 0."""
    stages = range(2 * num_ranks)
    way: list[Work] = [("F", stage) for stage in stages]
    way += [("I", stage) for stage in reversed(stages)]
    times: list[dict[Work, int]] = [{} for _ in range(num_ranks)]
    time = 0
    for number, (kind, stage) in enumerate(way):
        leg, place = divmod(number, num_ranks)
        if number:
            time += block.steps[leg] if place else 1 + block.waits[leg - 1]
        times[min(stage, 2 * num_ranks - 1 - stage)][kind, stage] = time
    assert all(len({time % PERIOD for time in of_rank.values()}) == 4 for of_rank in times)
    return times


@dataclass
class _Rank:
    """One rank while its steps are chosen, one in each unit of time."""

    times: dict[Work, int]
    num_micro_batches: int
    limit: int
    waiting: dict[Work, int] = field(default_factory=dict)
    """The micro-batch that comes next; work that is over is left out."""
    owed: deque[Action] = field(default_factory=deque)
    """Weight gradients whose turn has not come."""
    kept: int = 0
    steps: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = dict.fromkeys(self.times, 0)

    def take(self, done: set[Action], num_stages: int) -> Action | None:
        """Adds the step of this unit of time, if there is one that what is done allows.

        That is the next one of the block, else a weight gradient, else one that comes later in the block.
        """
        action = next(self._possible(done, num_stages), None)
        if action is None:
            return None
        self.steps.append(action)
        if action.kind == "W":
            self.owed.popleft()
            self.kept -= 1
            return action
        work = action.kind, action.stage
        self.waiting[work] += 1
        if self.waiting[work] == self.num_micro_batches:
            del self.waiting[work]
        if action.kind == "F":
            self.kept += 1
        else:
            self.owed.append(action._replace(kind="W"))
        return action

    def _possible(self, done: set[Action], num_stages: int) -> Iterator[Action]:
        by_time = sorted(self.waiting, key=self._time)
        yield from self._ready(by_time[:1], done, num_stages, is_next=True)
        yield from self.owed
        yield from self._ready(by_time[1:], done, num_stages, is_next=False)

    def _ready(
        self, works: list[Work], done: set[Action], num_stages: int, *, is_next: bool
    ) -> Iterator[Action]:
        for kind, stage in works:
            action = Action(kind, stage, self.waiting[kind, stage])
            fits = kind == "I" or self._fits(action, is_next)
            if fits and done.issuperset(needs(action, num_stages)):
                yield action

    def _time(self, work: Work) -> int:
        return self.times[work] + PERIOD * self.waiting[work]

    def _fits(self, forward: Action, is_next: bool) -> bool:
        """Whether a forward may be kept now.

        One that is not next must leave room for all forwards before it: the block's own order stays possible,
        so the ranks never end up with no room for what the others wait for.
        """
        before = 0
        if not is_next:
            time = self._time(("F", forward.stage))
            earlier = (self._time(work) for work in self.waiting if work[0] == "F")
            before = sum(max(0, -(-(time - first) // PERIOD)) for first in earlier)
        return self.kept + before < self.limit
