"""One table of tolerances by dtype, as relative L2 error against an fp64 reference.

The error is ||actual - expected|| / ||expected||, so it does not grow with the number of elements.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Largest relative L2 error of a result and of a gradient."""

    forward: float
    gradient: float


TOLERANCES = {
    # Unit roundoff 1.1e-16, times the few hundred additions of a dot product or softmax.
    torch.float64: Tolerance(forward=1e-13, gradient=1e-13),
    # Unit roundoff 6e-8; partial sums lose about sqrt(terms), and a GPU orders them its own way.
    torch.float32: Tolerance(forward=3e-6, gradient=1e-5),
    # Unit roundoff 3.9e-3 on the output alone; a gradient rounds its inputs and one intermediate too.
    torch.bfloat16: Tolerance(forward=5e-3, gradient=1e-2),
}


def relative_error(actual, expected, *, terms=1.0):
    """Return ||actual - expected|| / ||expected||, computed in fp64.

    Where ``expected`` is zero because its terms cancel, the error is relative to ``terms``, their norm.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    expected = expected.detach().double()
    norm = float(expected.norm())
    error = float((actual.detach().to(expected) - expected).norm())
    return error / (norm if norm > 1e-12 * terms else terms)


def assert_forward_close(actual, expected):
    error, limit = relative_error(actual, expected), TOLERANCES[actual.dtype].forward
    assert error <= limit, f"relative L2 error {error:.1e} is over {limit:.1e}"


def assert_gradient_close(actual, expected, *, terms=1.0):
    """Check a gradient by the table's row for its own dtype; ``terms`` as in `relative_error`."""
    error, limit = relative_error(actual, expected, terms=terms), TOLERANCES[actual.dtype].gradient
    assert error <= limit, f"relative L2 error {error:.1e} is over {limit:.1e}"
