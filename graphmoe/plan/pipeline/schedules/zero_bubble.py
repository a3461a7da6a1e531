"""1F1B whose weight gradients come later: they fill the time in which a rank would wait.

Source: "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2.1, schedule ZB-H1.
"""

from __future__ import annotations

from graphmoe.plan.pipeline.actions import Action, Placement, Table


def zb1p(num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> Table:
    """ZB-H1: a third of the bubble of 1F1B; all ranks keep as many activations as its first rank.

    Rank r is r micro-batches late with its weight gradients. The stages before it get their gradients the
    earlier, and it keeps r activations more than the num_ranks - r of 1F1B.
    """
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
            if number >= rank:
                steps.append(Action("W", rank, number - rank))
        ranks.append(tuple(steps))
    return Table("zb1p", Placement.loop(num_ranks), num_micro_batches, tuple(ranks))
