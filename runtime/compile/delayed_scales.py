"""Delayed scales: per-tensor fp8 scales from the amax history of earlier steps.

A current scale would need a second read of the tensor (Micikevicius et al., FP8 Formats for Deep Learning,
arXiv 2209.05433; history as in Transformer Engine). Each weight has two: for its GEMM's input (e4m3) and its
output's gradient (e5m2).

Suffixes: P scales, two per weight; S steps; W words, the first is used.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.ops.fp8 import FIRST_SCALE, GRADIENT, INPUT, fp8_dtype, scales_of, wide_dtype

STEPS = 16
WORDS = 4  # fp32 words per scale: graph inputs must be 16-byte aligned, else each call copies them
ROOM = 2.0  # headroom over amax; larger values saturate
SIDES = (INPUT, GRADIENT)


class DelayedScales:
    """Scales of this rank's weights and their history; equal on all ranks that share a layer.

    Fixed addresses; no device sync, except in `values`.
    """

    def __init__(self, weights: Mapping[str, Tensor], tokens: int, group: dist.ProcessGroup | None) -> None:
        """``tokens``: of a step, over which the loss is a mean; ``group``: the sharing ranks."""
        self._group = group
        self._sides = {f"{name}.{side}": (weight, side) for name, weight in weights.items() for side in SIDES}
        device, count = next(iter(weights.values())).device, len(weights) * len(SIDES)
        self._scale_PW, self._largest_PW = torch.zeros(2, count, WORDS, device=device)
        self.scale_P, self.largest_P = self._scale_PW[:, 0], self._largest_PW[:, 0]
        # the loss is a mean over tokens, so output gradients start smaller by about that factor
        first = FIRST_SCALE, FIRST_SCALE / 2 ** (tokens - 1).bit_length()
        self.scale_P.copy_(torch.tensor(first).repeat(len(weights)))
        self.history_SP = torch.zeros(STEPS, count, device=device)
        """Newest first; 0 if unknown."""

    def tensors(self) -> Iterator[tuple[tuple[Tensor, str], tuple[Tensor, Tensor]]]:
        """Yield each (weight, side) with its scale [1] and its amax [1] of this step."""
        for i, key in enumerate(self._sides.values()):
            yield key, (self._scale_PW[i, :1], self._largest_PW[i, :1])

    @torch.no_grad()
    def begin(self) -> None:
        # drops the amax of forwards that no update followed
        self._largest_PW.zero_()

    @torch.no_grad()
    def update(self, done: Tensor) -> None:
        """Set the next scales if the step was ``done`` (1.0). A collective."""
        if self._group is not None:
            dist.all_reduce(self._largest_PW, op=dist.ReduceOp.MAX, group=self._group)
        newest_P = self.largest_P.where(self.largest_P.isfinite(), 0.0)
        moved_SP = torch.cat([newest_P[None], self.history_SP[:-1]])
        # an overflowed or skipped step, or a tensor without amax, keeps its history
        self.history_SP.copy_(moved_SP.where((done > 0) & (newest_P > 0), self.history_SP))
        amax_P = self.history_SP.amax(0)
        held_P = (ROOM * amax_P).clamp(max=torch.finfo(torch.float32).max)  # the scale of inf is NaN
        sides = zip(held_P.view(-1, 2).unbind(-1), (fp8_dtype(), wide_dtype()), strict=True)
        scale_P = torch.stack([scales_of(*side)[0] for side in sides], -1).view(-1)
        self.scale_P.copy_(scale_P.where(amax_P > 0, self.scale_P))

    def values(self) -> dict[str, list[float]]:
        """Return scale and history by weight and side. Syncs with the device."""
        columns = torch.cat([self.scale_P[None], self.history_SP]).t().tolist()
        return dict(zip(self._sides, columns, strict=True))

    @torch.no_grad()
    def load(self, values: Mapping[str, list[float]]) -> None:
        """Restore `values`; others keep their state."""
        for i, name in enumerate(self._sides):
            if name in values:
                scale, *history = values[name]
                self.scale_P[i] = scale
                self.history_SP[:, i] = torch.tensor(history)
