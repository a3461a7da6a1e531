"""Segment and torch operation of each host launch.

The segment is that of the innermost graphmoe range on the thread. In an eager backward it is that of the
forward operation that autograd's sequence number names.
"""

import bisect
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from graphmoe.trace.events import Activity, HostEvent, Thread, Trace

_AUTOGRAD = "autograd::engine::evaluate_function"
_COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|rocshmem|deep_ep|mori::|multimem|one_shot_all_reduce|two_shot_all_reduce"
    r"|PtoP|PeerToPeer|symm_mem"
    # kernels of graphmoe.ops.symm that wait for other ranks, or access their memory
    r"|^(records|receive|pull|put|way_back|sum)_kernel",
    re.IGNORECASE,
)
_LAUNCH = re.compile(r"^(cuda|cu|hip)[A-Za-z]*Launch")
# graphmoe ranges, without torch's process groups, such as gloo:send, which last until a message arrives
_RANGE = re.compile(r"(?!(?:gloo|nccl|ucc|mpi):)([a-z_]+(?:\.\.[a-z_]+)?):([A-Za-z]+)")


class Owner(NamedTuple):
    """Unit and its part, such as attn and F; empty outside graphmoe ranges."""

    unit: str
    part: str


NOBODY = Owner("", "")


class Place(NamedTuple):
    owner: Owner = NOBODY
    # forward operation whose gradient this computes, if no graphmoe range is nearer
    sequence: int | None = None
    operation: HostEvent | None = None


class Owners(NamedTuple):
    """Segment, part and operation of each host event and call, in the order of the trace's lists."""

    host: list[Place]
    calls: list[Place]
    around: list[Place]  # place around each host event
    inner_us: list[float]  # microseconds of operations and graphmoe ranges directly inside each host event
    of_sequence: dict[int, Owner]

    def of(self, place: Place) -> Owner:
        if place.sequence is None:
            return place.owner
        forward = self.of_sequence.get(place.sequence)
        return Owner(forward.unit, "B") if forward else NOBODY


def owners_of(trace: Trace) -> Owners:
    num_host = len(trace.host)
    places = [Place()] * num_host, [Place()] * len(trace.calls), [Place()] * num_host
    owners = Owners(*places, [0.0] * num_host, {})
    by_thread: dict[Thread, list[tuple[HostEvent, int]]] = defaultdict(list)
    for listed in (trace.host, trace.calls):
        for index, event in enumerate(listed):
            by_thread[event.thread].append((event, index))
    for events in by_thread.values():
        nest: list[tuple[float, Place, int]] = []  # end, place, index to which nested time counts
        for event, index in sorted(events, key=lambda pair: (pair[0].start, -pair[0].end)):
            while nest and nest[-1][0] <= event.start:
                nest.pop()
            _, outer, counts = nest[-1] if nest else (0.0, Place(), -1)
            if event.is_call:
                owners.calls[index] = outer
                continue
            owners.around[index], place = outer, _inside(event, outer)
            owners.host[index] = place
            if not event.is_range or unit_and_part(event.name):
                if counts >= 0:
                    owners.inner_us[counts] += event.end - event.start
                counts = index
            nest.append((event.end, place, counts))
            sequence = event.args.get("Sequence number", -1)
            if sequence >= 0 and place.sequence is None and place.owner.part == "F":
                owners.of_sequence[sequence] = place.owner  # the last one has the autograd node
    return owners


def step_of(steps: Sequence[HostEvent], time: float) -> int | None:
    """Return the index of the step that contains a host time."""
    number = bisect.bisect_right([step.start for step in steps], time) - 1
    return number if number >= 0 and time <= steps[number].end else None


def _inside(event: HostEvent, outer: Place) -> Place:
    if event.is_range:
        named = unit_and_part(event.name)
        return Place(named) if named else outer
    if event.name.startswith(_AUTOGRAD) and "Sequence number" in event.args:
        return Place(NOBODY, event.args["Sequence number"], event)
    return Place(outer.owner, outer.sequence, event)


def is_communication(activity: Activity) -> bool:
    return bool(_COMMUNICATION.search(activity.name))


def is_launch(name: str) -> bool:
    return bool(_LAUNCH.match(name))


def unit_and_part(name: str) -> Owner | None:
    """Return unit and part of a graphmoe range, or None."""
    match = _RANGE.fullmatch(name)
    return Owner(match[1], match[2]) if match else None
