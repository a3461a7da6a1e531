"""Time that intervals cover."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that do not touch, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Time in which at least one of them is."""
    return sum(end - start for start, end in union(intervals))


def apart(intervals: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Time in which one of ``intervals`` is, and none of ``others``."""
    rest, total, i = union(others), 0.0, 0
    for start, end in union(intervals):
        while i < len(rest) and rest[i][1] <= start:
            i += 1
        at, j = start, i
        while j < len(rest) and rest[j][0] < end:
            total += max(0.0, rest[j][0] - at)
            at, j = max(at, rest[j][1]), j + 1
        total += max(0.0, end - at)
    return total
