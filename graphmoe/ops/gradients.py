"""A step's gradients, summed over micro-batches in fp32: the first stores, the others add.

Gradients that share their memory with others (`graphmoe.optim.shared_slots`) are reduced after each
micro-batch: then the first of the next micro-batch stores.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

PendingWeightGrads = list[Callable[[], object]]  # deferred wgrad calls, in the order of dgrad


class Gradient:
    """A parameter's gradient at a fixed address. Call `report_added` after writing ``total``.

    Before writing, ask `have_begun` whether to add.
    """

    def __init__(self, total: Tensor) -> None:
        self.total = total
        self.begun = False  # on the host, so nothing syncs: total holds a gradient of this step
        self.on_added: Callable[[], None] | None = None
        self.before_write: Callable[[], None] | None = None  # makes ``total`` this gradient's, if shared

    def add(self, value: Tensor) -> None:
        if have_begun([self]):
            self.total.add_(value)
        else:
            self.total.copy_(value)
        report_added([self])

    def fill(self) -> None:
        """Zero ``total`` if nothing was added in this step."""
        if not self.begun:
            self.total.zero_()
        self.begun = True

    def finish(self) -> None:
        """End the step: zero an unused ``total``, and let the next ``add`` overwrite it."""
        if self.before_write is None:  # else nothing reads it: its reduction was added to a shard
            self.fill()
        self.begun = False


def have_begun(gradients: Sequence[Gradient]) -> bool:
    """Return whether to add to each ``total``, as one holds a gradient; if so, zero the others.

    Else the caller stores. It must write to all of them, and report that.
    """
    for gradient in gradients:
        if gradient.before_write is not None:
            gradient.before_write()
    begun = any(gradient.begun for gradient in gradients)
    for gradient in gradients:
        if begun and not gradient.begun:
            gradient.total.zero_()
    return begun


def begin(gradients: Sequence[Gradient]) -> None:
    for gradient in gradients:
        gradient.begun = True


def report_added(gradients: Sequence[Gradient]) -> None:
    """Mark the gradients as begun and call each one's ``on_added``; all ``total`` must have been written."""
    # all were written before any is reported
    begin(gradients)
    for gradient in gradients:
        if gradient.on_added is not None:
            gradient.on_added()
