"""Delayed scales: what products with one scale for a whole tensor read gets its scale from the steps before.

A scale of the tensor itself would be known only when all of it is there, and storing it would read it twice
(Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; the history is that of Transformer
Engine). Two scales belong to each weight: of its product's input (e4m3), and of the gradient of its output
(e5m2, as there).

Suffixes: P scales, two of each weight; S steps; W words, of which the first counts.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops.fp8 import GRADIENT, INPUT, fp8_dtype, scales_of, wide_dtype
from graphmoe.ops.fp8_linear import FIRST_SCALE

STEPS = 16
"""Steps whose largest numbers a scale looks at."""
WORDS = 4
"""Numbers of 16 bytes, of which the addresses of a graph's inputs are to be multiples; else each call copies
them."""
ROOM = 2.0
"""Factor of the largest of them for which a scale has room; more becomes that."""
SIDES = (INPUT, GRADIENT)


class DelayedScales:
    """Scales of this rank's weights, the same on all ranks that share a layer, and their history.

    Tensors keep their addresses. No device sync, but in `values`.
    """

    def __init__(self, weights: Mapping[str, Tensor], tokens: int, group: dist.ProcessGroup | None) -> None:
        """``tokens`` are those of a step, over which the loss is a mean; ``group`` has the sharing ranks."""
        self._group = group
        self._sides = {f"{name}.{side}": (weight, side) for name, weight in weights.items() for side in SIDES}
        device, count = next(iter(weights.values())).device, len(weights) * len(SIDES)
        self._scale_PW, self._largest_PW = torch.zeros(2, count, WORDS, device=device)
        self.scale_P, self.largest_P = self._scale_PW[:, 0], self._largest_PW[:, 0]
        """Scales of this step, and largest numbers of it so far on this rank."""
        first = FIRST_SCALE, FIRST_SCALE / 2 ** (tokens - 1).bit_length()
        self.scale_P.copy_(torch.tensor(first).repeat(len(weights)))
        self.history_SP = torch.zeros(STEPS, count, device=device)
        """Largest numbers of the last steps, newest first; 0 of one that is not known."""

    def tensors(self) -> Iterator[tuple[tuple[Tensor, str], tuple[Tensor, Tensor]]]:
        """Yield each weight and side with its scale [1] and what takes up its largest number [1]."""
        for i, key in enumerate(self._sides.values()):
            yield key, (self._scale_PW[i, :1], self._largest_PW[i, :1])

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step: what forwards without an update have read counts for nothing."""
        self._largest_PW.zero_()

    @torch.no_grad()
    def update(self, done: Tensor) -> None:
        """Set the next scales of what was stored in this step, if it was ``done`` (1.0). A collective."""
        if self._group is not None:
            dist.all_reduce(self._largest_PW, op=dist.ReduceOp.MAX, group=self._group)
        newest_P = self.largest_P.where(self.largest_P.isfinite(), 0.0)
        moved_SP = torch.cat([newest_P[None], self.history_SP[:-1]])
        self.history_SP.copy_(moved_SP.where((done > 0) & (newest_P > 0), self.history_SP))
        amax_P = self.history_SP.amax(0)
        held_P = (ROOM * amax_P).clamp(max=torch.finfo(torch.float32).max)  # the scale of inf is NaN
        sides = zip(held_P.view(-1, 2).unbind(-1), (fp8_dtype(), wide_dtype()), strict=True)
        scale_P = torch.stack([scales_of(*side)[0] for side in sides], -1).view(-1)
        self.scale_P.copy_(scale_P.where(amax_P > 0, self.scale_P))

    def values(self) -> dict[str, list[float]]:
        """Return scale and history of each, by the name of the weight and the side. Waits for the device."""
        columns = torch.cat([self.scale_P[None], self.history_SP]).t().tolist()
        return dict(zip(self._sides, columns, strict=True))

    @torch.no_grad()
    def load(self, values: Mapping[str, list[float]]) -> None:
        """Take over what `values` returned; what it has not keeps its state."""
        for i, name in enumerate(self._sides):
            if name in values:
                scale, *history = values[name]
                self.scale_P[i] = scale
                self.history_SP[:, i] = torch.tensor(history)
