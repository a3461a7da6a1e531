"""Stages keep what they must only; no two micro-batches in flight share a lane."""

import weakref
from collections import Counter

import torch

from graphmoe.plan.pipeline import parts
from graphmoe.runtime.pipeline.channels import Spec
from graphmoe.runtime.pipeline.engine import Stage, lanes_of
from tests.plan.pipeline.test_transfers import TABLES

SPECS = (Spec((2, 3), torch.float64),)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.float64)


def test_what_is_received_and_not_read_has_a_gradient_of_zeros():
    stage = Stage(lambda number, received: ((received[0] * 2,), None), 2 * SPECS, SPECS)
    stage.forward(0, (ones(2, 3), ones(2, 3)))
    read, unread = stage.backward(0, (ones(2, 3),), weights=True)
    assert torch.equal(read, 2 * ones(2, 3)) and torch.equal(unread, torch.zeros(2, 3))


def test_what_is_sent_without_a_gradient_needs_none():
    stage = Stage(lambda number, received: ((ones(2, 3),), None), (), SPECS)
    stage.forward(0, ())
    assert stage.backward(0, (ones(2, 3),), weights=True) == () and not stage.kept


def test_what_was_sent_is_not_kept_where_its_backward_does_not_read_it():
    made = []

    def run(number, received):
        sent = received[0] * 2
        made.append(sent.untyped_storage().data_ptr())
        alive.append(weakref.ref(sent))
        return (sent,), None

    alive = []
    stage = Stage(run, SPECS, SPECS)
    (sent,) = stage.forward(0, (ones(2, 3),))
    assert sent.data_ptr() == made[0] and not sent.requires_grad, "it is the same memory"
    del sent
    assert alive[0]() is None
    stage.backward(0, (ones(2, 3),), weights=True)


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
