"""A step's gradients, summed over micro-batches: the first stores, the others add.

Sums are fp32, or bf16 and rounded stochastically: to the nearest, small addends would be lost. Gradients
that share their memory with others (`graphmoe.optim.shared_slots`) are reduced after each micro-batch: then
the first of the next micro-batch stores.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Use = Literal["forward", "backward", "autograd"]
"""What reads a gathered parameter; autograd's backward reads it at the forward's address."""
PendingWeightGrads = list[Callable[[], object]]  # deferred wgrad calls, in the order of dgrad
PIECE_ELEMENTS = 2**24  # elements rounded at once by eager code, which bounds its temporary memory
_GOLDEN = -1640531535  # 2^32 divided by the golden ratio, odd


class Gradient:
    """A parameter's gradient at a fixed address. Call `report_added` after writing ``total``.

    Before writing, ask `have_begun` whether to add.
    """

    def __init__(self, total: Tensor, key: Tensor | None = None) -> None:
        """``key``: int32 [] on the device, if ``total`` is bf16: what the next sum is rounded by."""
        self.total, self.key = total, key
        self.begun = False  # on the host, so nothing syncs: total holds a gradient of this step
        self.on_added: Callable[[], None] | None = None
        self.before_write: Callable[[], None] | None = None  # makes ``total`` this gradient's, if shared
        self.gathers: Callable[[Use], None] | None = None  # the parameter, if its memory is shared
        self.weight_in_backward: Tensor | None = None  # the parameter's view there; None: the parameter

    def add(self, value: Tensor) -> None:
        if have_begun([self]):
            _add(self.total, value, self.key)
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


def rounded_sum(total: Tensor, value: Tensor, key: Tensor, number: int = 0, first_row: int = 0) -> Tensor:
    """Return bf16 ``total`` [..., L] + ``value``, rounded stochastically. No device sync.

    ``key``: int32 [], another for each sum. ``number`` separates sums of one key; ``first_row``: index of the
    first of these rows of L elements.
    """
    lanes = total.shape[-1]
    row = torch.arange(total.numel() // lanes, dtype=torch.int32, device=total.device) + first_row
    drawn = noise(mixed(row ^ (number + 1) * 0x3779B9)[:, None], lanes, key, 0)
    return to_bf16(total.float() + value.float(), drawn.view(total.shape))


def _add(total: Tensor, value: Tensor, key: Tensor | None) -> None:
    if key is None:
        total.add_(value)
        return
    lanes = total.shape[-1]
    rows, values, count = total.view(-1, lanes), value.reshape(-1, lanes), max(PIECE_ELEMENTS // lanes, 1)
    for first in range(0, len(rows), count):
        piece = rows[first : first + count]
        piece.copy_(rounded_sum(piece, values[first : first + count], key, first_row=first))
    key.add_(1)


def to_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down with the probabilities that make the mean exact.

    ``noise``: int32, uniform in [0, 2^16). Values that are not finite are kept.
    """
    bits = (x.view(torch.int32) + noise) & -65536
    return torch.where(torch.isfinite(x), bits.view(torch.float32), x).bfloat16()


def noise(origin: Tensor, lanes: int, step: Tensor, stream: int) -> Tensor:
    """Return int32 [..., lanes], uniform in [0, 2^16), for rows of ``origin`` [..., 1]. No device sync.

    ``step``: a scalar on the device. ``stream`` separates the tensors of one update.
    """
    key = mixed(step.to(torch.int32) * 16 + stream)
    lane = torch.arange(lanes, dtype=torch.int32, device=origin.device)
    return (mixed((origin ^ key) + lane * _GOLDEN) >> 16) & 0xFFFF


def mixed(h: Tensor) -> Tensor:
    """Return a hash of each int32 value: the finaliser of MurmurHash3 (A. Appleby)."""
    # products wrap; shifts are logical by the masks
    h = (h ^ ((h >> 16) & 0xFFFF)) * -2048144789
    h = (h ^ ((h >> 13) & 0x7FFFF)) * -1028477387
    return h ^ ((h >> 16) & 0xFFFF)


def gather_weights(gradients: Sequence[Gradient], use: Use) -> None:
    """Let the current stream wait until these gradients' parameters are readable. A collective."""
    for gather in dict.fromkeys(gradient.gathers for gradient in gradients):
        if gather is not None:
            gather(use)


def with_gathered_weights(
    gradients: Sequence[Gradient], run: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return the results of ``run``, which reads these gradients' parameters, and so does its backward."""
    sharded = [gradient for gradient in gradients if gradient.gathers is not None]
    gather_weights(sharded, "forward")
    results = run()
    places = [i for i, result in enumerate(results) if sharded and result.requires_grad]
    if not places:
        return results
    found = [*results]
    for i, result in zip(places, _Again.apply(sharded, *(results[i] for i in places)), strict=True):
        found[i] = result
    return tuple(found)


class _Again(torch.autograd.Function):
    """The identity, whose backward gathers the weights that the backwards behind it read."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Gradient], *results: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gather_weights(ctx.gradients, "autograd")
        return None, *gradients
