"""Bytes of live tensors by kind, and the moment of their peak.

Counted are tensors, and what our operations take for themselves (`inside.py`). A real allocator
rounds up and leaves gaps, and libraries hold memory of their own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from graphmoe.ops.linear_cross_entropy import rows_per_chunk
from graphmoe.runtime.torch_compat import storage_of

INSIDE = "inside"
"""The kind of what an operation takes for itself."""


class MemoryLog:
    """Memory of tensors from their first sight to their end. Views of one memory count once."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        """Live bytes by kind."""
        self.held: dict[str, int] = {}
        """Bytes of ``hold``."""
        self.peak: dict[str, int] = {}
        """The same when their sum was largest."""
        self.by_segment: dict[str, int] = {}
        """Live bytes that the forward made, by the segment that made them."""
        self.peak_by_segment: dict[str, int] = {}
        self.peak_phase = ""
        self.peaks: dict[str, int] = {}
        """Largest sum in each phase."""
        self._live: dict[int, tuple[str, str, int]] = {}
        self._total = 0

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count these tensors, which are there all the time, as of this kind; before anything is seen."""
        for tensor in tensors:
            self._add(tensor, kind)
        self.held = dict(self.now)

    def saw(self, result: Any, phase: str, segment: str = "") -> None:
        """Count the result of a segment's operation; new memory is of the phase's kind."""
        if isinstance(result, Tensor):
            self._add(result, phase, segment)
        elif isinstance(result, list | tuple):
            for item in result:
                self.saw(item, phase, segment)
            return
        self._note(phase)

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    def borrowed(self, size: int, phase: str) -> None:
        """Count bytes that were there beside all live ones, and are gone."""
        self._change(INSIDE, size)
        self._note(phase)
        self._change(INSIDE, -size)

    def _note(self, phase: str) -> None:
        if self._total > self.peaks.get(phase, -1):
            self.peaks[phase] = self._total
            if self._total > self.peak_bytes:
                self.peak, self.peak_phase = dict(self.now), phase
                self.peak_by_segment = dict(self.by_segment)

    def _add(self, tensor: Tensor, kind: str, segment: str = "") -> None:
        key, storage = storage_of(tensor)
        if key in self._live:
            return
        size = storage.nbytes()
        self._live[key] = kind, segment, size
        self._change(kind, size, segment)
        weakref.finalize(storage, self._end, key).atexit = False

    def _end(self, key: int) -> None:
        kind, segment, size = self._live.pop(key)
        self._change(kind, -size, segment)

    def _change(self, kind: str, size: int, segment: str = "") -> None:
        self.now[kind] = self.now.get(kind, 0) + size
        self._total += size
        if kind == "forward":
            self.by_segment[segment] = self.by_segment.get(segment, 0) + size


def bytes_inside(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operation of ours takes on a GPU while it runs: nobody sees its tensors."""
    namespace, _, name = func.name().partition("::")
    return _OF_OURS[name](*args) if namespace == "graphmoe" and name in _OF_OURS else 0


def _logits(h_TD: Tensor, w_VD: Tensor, *_: Any) -> int:
    """The logits of a chunk (graphmoe/ops/linear_cross_entropy_kernels.py)."""
    tokens, vocabulary, size = h_TD.shape[0], w_VD.shape[0], h_TD.element_size()
    return min(rows_per_chunk(tokens, vocabulary, size), tokens) * vocabulary * size


def _expert_rows(x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, _: Tensor, slot_R: Tensor, *__: Any) -> int:
    """Activations and results of the rows, before their sum (graphmoe/ops/grouped_mlp/triton_steps.py)."""
    return slot_R.shape[0] * (w_down.shape[1] + w_down.shape[2]) * x_TD.element_size()


def _expert_row_gradients(dy_TD: Tensor, h_RH: Tensor, *_: Any) -> int:
    """Gradients of the rows, before their sum."""
    return h_RH.shape[0] * dy_TD.shape[1] * dy_TD.element_size()


def _gathered(x: Tensor, axis: str, size: int, dim: int) -> int:
    """The parts one behind the other, where they do not lie so in the result."""
    return size * _bytes(x) if math.prod(x.shape[:dim]) > 1 else 0


def _scattered(x: Tensor, axis: str, size: int, dim: int) -> int:
    """The same of a sum."""
    return _bytes(x) if math.prod(x.shape[:dim]) > 1 else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_OF_OURS: dict[str, Callable[..., int]] = {
    "linear_cross_entropy": _logits,
    "grouped_mlp": _expert_rows,
    "grouped_mlp_dgrad": _expert_row_gradients,
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
}
