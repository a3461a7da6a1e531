"""Stage: what it sends has no history, what comes back is complete, it keeps what it must only."""

import weakref

import torch

from graphmoe.runtime.pipeline.channels import Spec
from graphmoe.runtime.pipeline.stages import Stage

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
