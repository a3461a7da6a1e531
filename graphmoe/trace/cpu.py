"""A trace without a GPU: time of the host in ranges and operations, each without what is inside it."""

from __future__ import annotations

from collections import defaultdict

from graphmoe.trace.events import Trace
from graphmoe.trace.names import unit_and_part
from graphmoe.trace.owners import NOBODY, Owner, Owners, self_times, step_of
from graphmoe.trace.summary import OTHER, SegmentTime, Summary, calls_of, largest


def of_cpu(trace: Trace, owners: Owners, num_kernels: int) -> Summary:
    """Summarise ranges and operations."""
    steps = len(trace.steps)
    whole = sum(step.end - step.start for step in trace.steps)
    spent = _spent_in_ranges(trace, owners)
    times: dict[Owner, list[tuple[str, float, float | None]]] = defaultdict(list)
    for index, own in self_times(trace):
        event, place = trace.host[index], owners.host[index]
        if step_of(trace.steps, event.start) is None:
            continue
        owner = owners.of(place)
        times[OTHER if owner == NOBODY else owner].append((event.name, own, None))
        if place.sequence is not None and owner != NOBODY:  # an eager backward is in no range
            spent[owner] += own
    spent[OTHER] = max(whole - sum(spent.values()), 0.0)
    calls = calls_of(trace)
    segments = [
        SegmentTime(
            owner.unit,
            owner.part,
            calls[owner] / steps,
            time / steps / 1e3,
            None,
            largest(times[owner], steps, num_kernels),
        )
        for owner, time in sorted(spent.items(), key=lambda pair: -pair[1])
    ]
    return Summary(
        trace=str(trace.path),
        device=trace.device,
        on="cpu",
        facts=trace.facts,
        num_steps=steps,
        step_ms=whole / steps / 1e3,
        segments=segments,
    )


def _spent_in_ranges(trace: Trace, owners: Owners) -> dict[Owner, float]:
    """Microseconds in each range of ours, without those in ranges inside it."""
    spent: dict[Owner, float] = defaultdict(float)
    for event, around in zip(trace.host, owners.around, strict=True):
        named = unit_and_part(event.name) if event.is_range else None
        if named and step_of(trace.steps, event.start) is not None:
            spent[Owner(*named)] += event.end - event.start
            if around.owner != NOBODY:
                spent[around.owner] -= event.end - event.start
    return spent
