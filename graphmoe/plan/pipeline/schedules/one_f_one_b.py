"""1F1B, interleaved 1F1B, GPipe, and forward-only tables.

Sources: Megatron-LM (arXiv 2104.04473), sections 2.2.1 and 2.2.2; GPipe (arXiv 1811.06965).
"""

from graphmoe.plan.pipeline import Action, Placement, Step, Table, Together
from graphmoe.plan.pipeline.check import FORWARD_ONLY, needs


def one_forward_one_backward(
    schedule: str,
    num_ranks: int,
    num_micro_batches: int,
    virtual_stages: int,
    *,
    overlap: bool = False,
    forwards_first: bool = False,
) -> Table:
    """Return a 1F1B table, interleaved if ``virtual_stages`` > 1; a GPipe table if ``forwards_first``."""
    ranks = []
    for rank in range(num_ranks):
        # an incomplete last round is a full one without the missing micro-batches: the order stays feasible,
        # and no longer than full rounds
        forwards, backwards = _turns(rank, num_ranks, num_micro_batches, virtual_stages)
        # In a single round the first ranks have fewer forwards than a whole warm-up: then all come first.
        warm_up = min(num_warm_up(rank, num_ranks, virtual_stages, overlap), len(forwards))
        if forwards_first:
            warm_up = len(forwards)
        steps: list[Step] = [*forwards[:warm_up]]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            steps += (Together(forward, backward),) if overlap else (forward, backward)
        steps += backwards[len(forwards) - warm_up :]
        ranks.append(tuple(kept for step in steps if (kept := without(step, num_micro_batches))))
    placement = Placement.loop(num_ranks, virtual_stages)
    return Table(schedule, placement, num_micro_batches, tuple(ranks))


def num_warm_up(rank: int, num_ranks: int, virtual_stages: int, overlap: bool) -> int:
    """Return the number of forwards before a rank's first F, B pair; interleaved, 2 more than the next's."""
    after = num_ranks - 1 - rank
    # a Together ends as a whole: with one more, as in 1F1B, neighbours would wait for each other; one more on
    # all ranks gives the last stage's pairs two different micro-batches
    if overlap:
        return 2 * after + (virtual_stages - 1) * num_ranks + 1
    return after if virtual_stages == 1 else 2 * after + (virtual_stages - 1) * num_ranks


def _turns(
    rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> tuple[list[Action], list[Action]]:
    stages = range(rank, num_ranks * virtual_stages, num_ranks)
    forwards: list[Action] = []
    backwards: list[Action] = []
    for first in range(0, num_micro_batches, num_ranks):
        numbers = range(first, first + num_ranks)
        forwards += [Action("F", stage, number) for stage in stages for number in numbers]
        backwards += [Action("B", stage, number) for stage in reversed(stages) for number in numbers]
    return forwards, backwards


def without(step: Step, num_micro_batches: int) -> Step | None:
    if isinstance(step, Action):
        return step if step.micro_batch < num_micro_batches else None
    left = [action for action in step if action.micro_batch < num_micro_batches]
    return step if len(left) == 2 else left[0] if left else None


def forward_only(placement: Placement, num_micro_batches: int) -> Table:
    """Return a table of forwards only, for evaluation of a model with this placement."""
    assert num_micro_batches > 0
    ranks: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    latest_first = [placement.stages_of(rank)[::-1] for rank in range(placement.num_ranks)]
    following = [0] * placement.num_stages
    done: set[Action] = set()
    while len(done) < placement.num_stages * num_micro_batches:
        ticked: set[Action] = set()
        for rank, steps in enumerate(ranks):
            # latest stage first, so that micro-batches near the loss finish first
            heads = [Action("F", stage, following[stage]) for stage in latest_first[rank]]
            ready = (
                head
                for head in heads
                if head.micro_batch < num_micro_batches and done.issuperset(needs(head, placement.num_stages))
            )
            if chosen := next(ready, None):
                steps.append(chosen)
                following[chosen.stage] += 1
                ticked.add(chosen)
        done |= ticked
    return Table(FORWARD_ONLY, placement, num_micro_batches, tuple(map(tuple, ranks)))


def zb1p(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> Table:
    """Return a ZB-H1 table: a third of 1F1B's bubble; each rank saves as much as the first rank of 1F1B."""
    assert virtual_stages == 1
    ranks = []
    for rank in range(num_ranks):
        warm_up = num_ranks - 1 - rank
        steps = [Action("F", rank, number) for number in range(min(warm_up, num_micro_batches))]
        for number in range(num_micro_batches + rank):
            if number + warm_up < num_micro_batches:
                steps.append(Action("F", rank, number + warm_up))
            if number < num_micro_batches:
                steps.append(Action("I", rank, number))
            # rank r delays wgrad by r micro-batches: earlier stages get their gradients sooner, for r more
            # saved activations
            if number >= rank:
                steps.append(Action("W", rank, number - rank))
        ranks.append(tuple(steps))
    return Table("zb1p", Placement.loop(num_ranks), num_micro_batches, tuple(ranks))
