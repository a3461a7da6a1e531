"""Tape: the gradients of what a micro-batch has received are autograd's, whoever reads it."""

import torch

from graphmoe.runtime.overlap.runner import Backward, Overlap
from graphmoe.runtime.overlap.tape import Tape


def ran(read: list[int], received: list[torch.Tensor]) -> Tape:
    """A tape whose backward is over: of a unit for each number, which reads what was received there."""
    tape = Tape(torch.zeros((), requires_grad=True))
    given = tape.receive(received)
    total = torch.zeros((), dtype=torch.float64)
    for number in read:
        (y,) = tape.run("attn", False, [given[number]], lambda own, later: [own[0].square()])
        total = total + (number + 1) * y.sum()
    tape.start([total])
    Overlap(torch.device("cpu")).run_backward(Backward(tape))
    return tape


def test_gradients_of_all_units_that_read_the_same_are_added():
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    of_x, of_y = ran([0, 1, 0], [x, y]).gradients_of_received()
    torch.testing.assert_close(of_x, 2 * 2 * x, rtol=1e-15, atol=0)
    torch.testing.assert_close(of_y, 2 * 2 * y, rtol=1e-15, atol=0)


def test_what_is_received_and_not_read_has_a_gradient_of_zeros():
    x, y = torch.ones(2, 3, dtype=torch.float64), torch.ones(4, dtype=torch.bfloat16)
    of_x, of_y = ran([0], [x, y]).gradients_of_received()
    assert torch.equal(of_x, 2 * x)
    assert torch.equal(of_y, torch.zeros_like(y)) and of_y.dtype == y.dtype
