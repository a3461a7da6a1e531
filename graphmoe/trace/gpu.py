"""A trace with a GPU: its kernels, and the segments that launched them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from graphmoe.config.schema import ConfigError
from graphmoe.trace.events import Activity, Call, HostEvent, Thread, Trace
from graphmoe.trace.floors import Device
from graphmoe.trace.owners import NOBODY, Owner, Owners, Place, is_communication, is_launch, step_of
from graphmoe.trace.summary import BETWEEN, OTHER, UNKNOWN, SegmentTime, Summary, calls_of, largest

Interval = tuple[float, float]
Launches = Mapping[int | None, tuple[Call, Place]]
"""Calls of the host and their places, by correlation."""


def of_gpu(trace: Trace, owners: Owners, num_kernels: int) -> Summary:
    """Summarise kernels, copies and memsets. *Raises* ConfigError where no step launched any."""
    steps, launches = len(trace.steps), _launches(trace, owners)
    owned: dict[Owner, list[Activity]] = defaultdict(list)
    for activity in trace.activities:
        owned[_owner(trace, owners, launches.get(activity.correlation))].append(activity)
    inside = [a for owner, found in owned.items() if owner is not BETWEEN for a in found]
    if not inside:
        raise ConfigError(f"{trace.path} has no kernel that a step launched")
    summary = _whole_steps(trace, min(a.start for a in inside), max(a.end for a in inside))
    floors = _floors(trace.activities, launches, Device.of(trace))
    calls = calls_of(trace)
    for owner, found in owned.items():
        times = [(a.name, a.end - a.start, floors.get(id(a))) for a in found]
        segment = SegmentTime(
            owner.unit,
            owner.part,
            calls[owner] / steps,
            length(map(_interval, found)) / steps / 1e3,
            length(_interval(a) for a in found if is_communication(a)) / steps / 1e3,
            largest(times, steps, num_kernels),
        )
        summary.segments.append(segment)
    summary.segments.sort(key=lambda segment: -segment.ms)
    return summary


def _whole_steps(trace: Trace, begin: float, end: float) -> Summary:
    """The numbers of the steps together, whose kernels run from ``begin`` to ``end``."""
    steps = len(trace.steps)
    running = [a for a in trace.activities if a.end > begin and a.start < end]
    messages = [_interval(a) for a in running if is_communication(a)]
    kernels = [_interval(a) for a in running if a.kind == "kernel" and not is_communication(a)]
    busy = length((max(a.start, begin), min(a.end, end)) for a in running)
    exposed, launching = apart(messages, kernels), _launching(trace)
    by_stream: dict[str, list[Interval]] = defaultdict(list)
    for activity in running:
        by_stream[activity.stream].append(_interval(activity))
    return Summary(
        trace=str(trace.path),
        device=trace.device,
        on="gpu",
        facts=trace.facts,
        num_steps=steps,
        step_ms=(end - begin) / steps / 1e3,
        idle=1 - busy / (end - begin),
        exposed_ms=exposed / steps / 1e3,
        hidden_ms=(length(messages) - exposed) / steps / 1e3,
        launch_ms=sum(call.end - call.start for call in launching) / steps / 1e3,
        launches=len(launching) / steps,
        streams={name: length(each) / steps / 1e3 for name, each in sorted(by_stream.items())},
    )


def _launches(trace: Trace, owners: Owners) -> Launches:
    pairs = zip(trace.calls, owners.calls, strict=True)
    return {call.correlation: (call, place) for call, place in pairs if call.correlation is not None}


def _launching(trace: Trace) -> list[Call]:
    """The calls inside steps that launch kernels or graphs, without those inside another on their thread."""
    found: list[Call] = []
    ends: dict[Thread, float] = {}
    for call in trace.calls:
        if not is_launch(call.name) or step_of(trace.steps, call.start) is None:
            continue
        if call.start >= ends.get(call.thread, -math.inf):
            found.append(call)
            ends[call.thread] = call.end
    return found


def _interval(activity: Activity) -> Interval:
    return activity.start, activity.end


def _owner(trace: Trace, owners: Owners, found: tuple[Call, Place] | None) -> Owner:
    if found is None:
        return UNKNOWN
    call, place = found
    if step_of(trace.steps, call.start) is None:
        return BETWEEN
    owner = owners.of(place)
    return OTHER if owner == NOBODY else owner


def _floors(activities: Iterable[Activity], launches: Launches, device: Device) -> dict[int, float]:
    """Microseconds by the id of an activity; an operation's go to the longest kernel that it launched."""
    floors: dict[int, float] = {}
    longest: dict[int, Activity] = {}
    operations: dict[int, HostEvent] = {}
    for activity in activities:
        own = device.of_activity(activity)
        if own is not None:
            floors[id(activity)] = own
        found = launches.get(activity.correlation)
        operation = found[1].operation if found else None
        if operation is not None and activity.kind == "kernel":
            operations[id(operation)] = operation
            before = longest.get(id(operation))
            if before is None or activity.end - activity.start > before.end - before.start:
                longest[id(operation)] = activity
    for key, activity in longest.items():
        of_operation = device.of_operation(operations[key])
        if of_operation is not None:
            floors[id(activity)] = of_operation
    return floors


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
