"""Lanes of all tables: no two micro-batches in flight share one, and there are no more than needed."""

from collections import Counter

import pytest

from graphmoe.plan.pipeline.actions import parts
from graphmoe.plan.pipeline.schedules import make_table
from graphmoe.runtime.pipeline.engine import lanes_of
from tests.plan.pipeline.test_transfers import TABLES


def of_ranks():
    """Each table that trains, with each of its ranks and the lanes there."""
    for table in TABLES:
        if any(action.kind != "F" for action in table.actions(0)):
            for rank in range(len(table.ranks)):
                yield table, rank, lanes_of(table, rank)


def in_flight(table, rank):
    """During each step, stages and micro-batches whose forward has begun and whose backward is not over."""
    left = Counter((action.stage, action.micro_batch) for action in table.actions(rank))
    begun: set[tuple[int, int]] = set()
    for step in table.ranks[rank]:
        begun |= {action[1:] for action in parts(step)}
        yield set(begun)
        for action in parts(step):
            left[action[1:]] -= 1
            if not left[action[1:]]:
                begun.remove(action[1:])


def test_a_lane_has_one_micro_batch_at_a_time_and_no_stage_has_more_than_it_keeps():
    for table, rank, lanes in of_ranks():
        most: Counter[int] = Counter()
        for now in in_flight(table, rank):
            assert len({(stage, lanes[stage, number]) for stage, number in now}) == len(now)
            most |= Counter(stage for stage, _ in now)
        used = Counter(stage for stage, _ in {(stage, lane) for (stage, _), lane in lanes.items()})
        assert used == most, (table.schedule, rank)


def test_the_first_micro_batch_of_each_stage_is_on_the_first_lane():
    for table, rank, lanes in of_ranks():
        for stage in table.placement.stages_of(rank):
            first = next(action for action in table.actions(rank) if action.stage == stage)
            assert lanes[stage, first.micro_batch] == 0


@pytest.mark.parametrize("schedule, wanted", [("gpipe", 6), ("1f1b", 3), ("zb1p", 3)])
def test_the_first_rank_has_as_many_lanes_as_activations(schedule, wanted):
    assert len({*lanes_of(make_table(schedule, 3, 6), 0).values()}) == wanted
