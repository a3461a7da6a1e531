"""All forwards before the first backward, and tables that have forwards only."""

from __future__ import annotations

from graphmoe.plan.pipeline.actions import Action, Placement, Table
from graphmoe.plan.pipeline.check import FORWARD_ONLY
from graphmoe.plan.pipeline.dependencies import needs


def gpipe(num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> Table:
    """Each rank keeps the activations of all micro-batches (GPipe, arXiv 1811.06965, section 2.3)."""
    assert virtual_stages == 1
    numbers = range(num_micro_batches)
    ranks = tuple(
        tuple(Action(kind, rank, number) for kind in ("F", "B") for number in numbers)
        for rank in range(num_ranks)
    )
    return Table("gpipe", Placement.loop(num_ranks), num_micro_batches, ranks)


def forward_only(like: Table | Placement, num_micro_batches: int) -> Table:
    """The table that evaluates a model with the stages where ``like`` has them.

    Each rank does what is ready, the latest stage first: what is near the loss leaves the pipeline.
    """
    placement = like.placement if isinstance(like, Table) else like
    assert num_micro_batches > 0
    ranks: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    latest_first = [placement.stages_of(rank)[::-1] for rank in range(placement.num_ranks)]
    following = [0] * placement.num_stages
    done: set[Action] = set()
    while len(done) < placement.num_stages * num_micro_batches:
        ticked: set[Action] = set()
        for rank, steps in enumerate(ranks):
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
