"""A step's gradients, summed over its micro-batches in fp32: the first stores, the others add."""

from collections.abc import Callable, Sequence

from torch import Tensor

PendingWeightGrads = list[Callable[[], object]]
"""Calls of W that backwards have left to their caller, in the order of I."""


class Gradient:
    """One parameter's gradient. ``total`` keeps its address; the optimizer's update may scale it.

    A caller that writes into ``total`` without ``add`` calls `report_added`.
    """

    def __init__(self, total: Tensor) -> None:
        self.total = total
        self.begun = False
        """True where ``total`` holds anything of this step; a flag of the host, so nothing waits for it."""
        self.on_added: Callable[[], None] | None = None
        """Called each time that something was stored in ``total`` or added to it."""

    def add(self, value: Tensor) -> None:
        """Add a micro-batch's gradient, of any dtype."""
        if self.begun:
            self.total.add_(value)
        else:
            self.total.copy_(value)
        report_added([self])

    def fill(self) -> None:
        """Set ``total`` to zero if nothing was added so far; more may be added."""
        if not self.begun:
            self.total.zero_()
        self.begun = True

    def finish(self) -> None:
        """End the step: zeros where no micro-batch gave anything; the next ``add`` stores."""
        self.fill()
        self.begun = False


def have_begun(gradients: Sequence[Gradient]) -> bool:
    """Return whether any has begun; then set the others to zero, so that all can be added to."""
    begun = any(gradient.begun for gradient in gradients)
    for gradient in gradients:
        if begun and not gradient.begun:
            gradient.total.zero_()
    return begun


def begin(gradients: Sequence[Gradient]) -> None:
    """Let what comes later in the step be added to each ``total``."""
    for gradient in gradients:
        gradient.begun = True


def report_added(gradients: Sequence[Gradient]) -> None:
    """Report that each ``total`` has more of this step; all were written before any is reported."""
    begin(gradients)
    for gradient in gradients:
        if gradient.on_added is not None:
            gradient.on_added()
