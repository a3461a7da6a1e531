"""Stage: what it sends has no history, what comes back is complete, it keeps what it must only."""

import weakref
from contextlib import contextmanager

import pytest
import torch

from graphmoe.runtime.pipeline.channels import Spec
from graphmoe.runtime.pipeline.stages import Stage

SPECS = (Spec((2, 3), torch.float64),)


def stage_of(run, **named):
    return Stage(run, SPECS, SPECS, **named)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.float64)


def test_gradients_are_those_of_loss_and_sent_tensors_together():
    w = ones(3, 3).requires_grad_()
    stage = stage_of(lambda number, received: ((received[0] @ w,), received[0].square().sum()))
    x = torch.randn(2, 3, dtype=torch.float64)
    (sent,) = stage.forward(0, (x,))
    assert not sent.requires_grad and not x.requires_grad and torch.equal(sent, (x @ w).detach())
    (gradient,) = stage.backward(0, (2 * ones(2, 3),), weights=True)
    assert torch.equal(gradient, 2 * ones(2, 3) @ w.detach().T + 2 * x)
    assert torch.equal(w.grad, x.T @ (2 * ones(2, 3)))


def test_what_is_received_and_not_read_has_a_gradient_of_zeros():
    stage = Stage(lambda number, received: ((received[0] * 2,), None), 2 * SPECS, SPECS)
    stage.forward(0, (ones(2, 3), ones(2, 3)))
    read, unread = stage.backward(0, (ones(2, 3),), weights=True)
    assert torch.equal(read, 2 * ones(2, 3)) and torch.equal(unread, torch.zeros(2, 3))


def test_what_is_sent_without_a_gradient_needs_none():
    stage = Stage(lambda number, received: ((ones(2, 3),), None), (), SPECS)
    stage.forward(0, ())
    assert stage.backward(0, (ones(2, 3),), weights=True) == () and not stage.kept


def test_micro_batches_in_flight_do_not_disturb_each_other():
    stage = stage_of(lambda number, received: ((received[0] * (number + 1),), None))
    for number in range(3):
        stage.forward(number, (ones(2, 3),))
    assert stage.kept == {0, 1, 2}
    for number in range(3):
        assert torch.equal(stage.backward(number, (ones(2, 3),), weights=True)[0], (number + 1) * ones(2, 3))
    assert not stage.kept


@contextmanager
def deferring(later):
    later += [lambda: ran.append("first"), lambda: ran.append("second")]
    yield


ran: list[str] = []


@pytest.mark.parametrize("weights", [True, False])
def test_work_that_a_backward_leaves_is_done_in_w_in_order(weights):
    ran.clear()
    stage = stage_of(lambda number, received: (received, None), deferring=deferring)
    stage.forward(0, (ones(2, 3),))
    stage.backward(0, (ones(2, 3),), weights=weights)
    assert stage.kept == (set() if weights else {0}) and (len(ran) == 2) == weights
    if not weights:
        stage.backward_weights(0)
    assert ran == ["first", "second"] and not stage.kept


def test_what_was_sent_is_not_kept_where_its_backward_does_not_read_it():
    made = []

    def run(number, received):
        sent = received[0] * 2
        made.append(sent.untyped_storage().data_ptr())
        alive.append(weakref.ref(sent))
        return (sent,), None

    alive = []
    stage = stage_of(run)
    (sent,) = stage.forward(0, (ones(2, 3),))
    assert sent.data_ptr() == made[0], "it is the same memory"
    del sent
    assert alive[0]() is None
    stage.backward(0, (ones(2, 3),), weights=True)


def test_without_gradients_nothing_is_kept():
    stage = stage_of(lambda number, received: (received, None), deferring=deferring)
    with torch.no_grad():
        stage.forward(0, (ones(2, 3),))
        stage.forward(0, (ones(2, 3),))
    assert not stage.kept
