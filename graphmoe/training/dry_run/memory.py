"""How many bytes live tensors have, by what they are, and the moment at which they are most.

Counted are tensors, and what our operations take for themselves (`inside.py`). A real allocator
rounds up and leaves gaps, and libraries hold memory of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from graphmoe.runtime.torch_compat import storage_of

INSIDE = "inside"
"""The kind of what an operation takes for itself."""


class MemoryLog:
    """Follows the memory of tensors from their first sight to their end. Views of one memory count once."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        """Live bytes by kind."""
        self.held: dict[str, int] = {}
        """Those of ``hold``."""
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
        """What an operation of a segment returned; new memory is of the phase's kind."""
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
        """So many bytes were there beside all that is, and are gone."""
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
