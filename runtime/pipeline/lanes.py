"""Lanes: which of a stage's graphs and buffers each micro-batch uses, while others are in flight."""

from __future__ import annotations

from graphmoe.plan.pipeline.actions import Table, parts

Lanes = dict[tuple[int, int], int]
"""By stage and micro-batch, from 0."""


def lanes_of(table: Table, rank: int) -> Lanes:
    """The lowest lane of the stage that is free at the forward of each micro-batch.

    A micro-batch has its lane up to the last part of its backward. A stage has as many lanes as micro-batches
    in flight there at once, and the first micro-batch of a step is on lane 0.
    """
    steps = [parts(step) for step in table.ranks[rank]]
    last = {(a.stage, a.micro_batch): time for time, actions in enumerate(steps) for a in actions}
    found: Lanes = {}
    free_from: dict[int, list[int]] = {}
    for time, actions in enumerate(steps):
        for kind, stage, micro_batch in actions:
            if kind != "F":
                continue
            times = free_from.setdefault(stage, [])
            lane = next((lane for lane, since in enumerate(times) if since <= time), len(times))
            if lane == len(times):
                times.append(0)
            times[lane] = last[stage, micro_batch] + 1
            found[stage, micro_batch] = lane
    return found
