"""Stages keep what they must only; no two micro-batches in flight share a lane."""

import weakref
from collections import Counter

import torch

from graphmoe.plan.pipeline import parts
from graphmoe.runtime.pipeline.channels import Spec
from graphmoe.runtime.pipeline.engine import Stage, lanes_of
from tests.plan.pipeline.test_transfers import TABLES

SPECS, ONES = (Spec((2, 3), torch.float64),), torch.ones(2, 3, dtype=torch.float64)


def test_what_is_received_and_not_read_has_a_gradient_of_zeros():
    stage = Stage(lambda number, received: ((received[0] * 2,), None), 2 * SPECS, SPECS)
    stage.forward(0, (ONES, ONES))
    read, unread = stage.backward(0, (ONES,), weights=True)
    assert torch.equal(read, 2 * ONES) and torch.equal(unread, 0 * ONES)


def test_what_is_sent_without_a_gradient_needs_none():
    stage = Stage(lambda number, received: ((ONES,), None), (), SPECS)
    stage.forward(0, ())
    assert stage.backward(0, (ONES,), weights=True) == () and not stage.kept


def test_what_was_sent_is_not_kept_where_its_backward_does_not_read_it():
    def run(number, received):
        sent = received[0] * 2
        made[:] = sent.untyped_storage().data_ptr(), weakref.ref(sent)
        return (sent,), None

    made, stage = [], Stage(run, SPECS, SPECS)
    (sent,) = stage.forward(0, (ONES,))
    assert sent.data_ptr() == made[0] and not sent.requires_grad, "it is the same memory"
    del sent
    assert made[1]() is None
    stage.backward(0, (ONES,), weights=True)


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


def test_a_lane_has_one_micro_batch_at_a_time_and_begins_at_0():
    of_ranks = [(table, rank) for table in TABLES for rank in range(len(table.ranks))]
    for table, rank in of_ranks:
        if all(action.kind == "F" for action in table.actions(0)):
            continue
        lanes, most = lanes_of(table, rank), Counter[int]()
        for now in in_flight(table, rank):
            assert len({(stage, lanes[stage, number]) for stage, number in now}) == len(now)
            most |= Counter(stage for stage, _ in now)
        used = Counter(stage for stage, _ in {(stage, lane) for (stage, _), lane in lanes.items()})
        assert used == most, (table.schedule, rank)
        for stage in table.placement.stages_of(rank):
            first = next(action for action in table.actions(rank) if action.stage == stage)
            assert lanes[stage, first.micro_batch] == 0, "its wgrad overwrites the sums"
