"""Ranges of a profile that are named by segments: what is launched inside one belongs to it.

A name is ``<unit>:<part>``, such as ``attn..moe_combine:F``. Parts are F, the forward, I and W, the gradients
of inputs and of weights, B, which is both in one graph, and others for what is no segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.profiler import record_function

_NOTHING = nullcontext()
_wanted = False


def ranged(unit: str, part: str) -> AbstractContextManager[object]:
    """A range around a block while `ranges_wanted`; else nothing, for a tenth of a microsecond."""
    return record_function(f"{unit}:{part}") if _wanted else _NOTHING


@contextmanager
def ranges_wanted() -> Iterator[None]:
    """Inside, on all threads, `ranged` makes ranges."""
    global _wanted
    before, _wanted = _wanted, True
    try:
        yield
    finally:
        _wanted = before
