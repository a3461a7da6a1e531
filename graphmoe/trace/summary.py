"""Step times of a trace: GPU kernels by the segments that launched them, or host time.

Floors are least times by the FLOPs and bytes of the projection; a run writes them into its trace.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from graphmoe.config.schema import ConfigError
from graphmoe.run.files import STEP
from graphmoe.segments import FULL_ITERATION
from graphmoe.trace.events import (
    LAUNCH,
    NOBODY,
    Activity,
    HostEvent,
    Owner,
    Owners,
    Thread,
    Trace,
    is_communication,
    owners_of,
    step_of,
    unit_and_part,
)

OTHER = Owner("(no segment)", "")  # owner of kernels launched in a step outside all ranges
BETWEEN = Owner("(between steps)", "")
UNKNOWN = Owner("(unknown)", "")  # owner of kernels whose launch is not in the trace
_WHOLE = Owner(FULL_ITERATION, "replay")  # of a graph whose kernels cannot be named
_FIGURES = {"F": (0,), "update": (0,), "I": (1,), "W": (2,), "B": (1, 2)}  # of a floor, by part
NAME_LENGTH = 200
# shares that name a wall: of the device's memory, and of the step
_FULL, _LOST = 0.95, 0.05
_MANY_LAUNCHES = 100  # per step; the host launches a step of one graph in fewer


@dataclass(frozen=True)
class Kernel:
    """Times of a kernel, copy or memset of a segment, or of a CPU operation; per step."""

    name: str
    calls: float
    ms: float


@dataclass(frozen=True)
class SegmentTime:
    """Time per step of one part of a segment or compiled unit, such as its forward."""

    segment: str
    part: str
    calls: float
    ms: float  # time in which any of its kernels runs; on a CPU, host time in its range
    communication_ms: float | None
    kernels: list[Kernel]
    floor_ms: float | None = None  # least time by the projection's FLOPs and bytes, if known


@dataclass
class Summary:
    """All numbers of a trace; times are milliseconds per step."""

    trace: str
    device: str | None
    on: str
    facts: dict[str, Any]
    num_steps: int
    step_ms: float  # time from the first kernel's start to the last one's end; on a CPU, host time in steps
    idle: float | None = None  # share of ``step_ms`` in which the GPU is idle
    exposed_ms: float | None = None  # communication without a concurrent kernel
    hidden_ms: float | None = None  # communication with a concurrent kernel
    launch_ms: float | None = None  # host time in calls that launch kernels or graphs
    launches: float | None = None
    streams: dict[str, float] = field(default_factory=dict)  # busy ms of compute, copy and other
    segments: list[SegmentTime] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wall: Wall | None = None  # what limits the step; None on a CPU

    @property
    def kinds(self) -> str:
        return "kernels" if self.on == "gpu" else "operations"


def summarise(trace: Trace, num_kernels: int) -> Summary:
    """Summarise a trace. *Raises* ConfigError if it has no steps, or a GPU that no step used."""
    if not trace.steps:
        raise ConfigError(f"{trace.path} has no steps (ranges named {STEP}...); profile.steps records them")
    owners = owners_of(trace)
    summary = (_of_gpu if trace.activities else _of_cpu)(trace, owners, num_kernels)
    summary.segments.sort(key=lambda segment: -segment.ms)
    summary.notes += _notes(summary)
    summary.wall = wall_of(summary)
    return summary


@dataclass(frozen=True)
class Wall:
    """What limits a step, with the figures that say so; shares are 0 to 1, None if unknown."""

    name: Literal["memory", "exchange", "host", "compute"]
    why: str
    memory: float | None  # peak of the run, as a share of the device's memory
    idle: float
    launches: float
    exposed: float  # exposed communication, as a share of the step
    row: str | None = None  # segment and part with the largest time over its floor
    over_ms: float | None = None  # time of ``row`` over its floor


def wall_of(summary: Summary) -> Wall | None:
    """Return what limits the step of a GPU; None for a trace of a CPU."""
    memory = summary.facts.get("memory")
    if summary.idle is None or summary.exposed_ms is None or summary.launches is None:
        return None
    exposed = summary.exposed_ms / summary.step_ms if summary.step_ms else 0.0
    known = [(s.ms - s.floor_ms, f"{s.segment}:{s.part}") for s in summary.segments if s.floor_ms is not None]
    over, row = max(known, default=(None, None))
    name: Literal["memory", "exchange", "host", "compute"] = "compute"
    why = f"GPU idle {summary.idle:.1%}, communication exposed {exposed:.1%}"
    if memory is not None and memory > _FULL:
        name, why = "memory", f"the run's peak is {memory:.1%} of the device's memory"
    elif summary.launches > _MANY_LAUNCHES and summary.idle > max(_LOST, exposed):
        name, why = "host", f"GPU idle {summary.idle:.1%} with {summary.launches:.0f} launches in a step"
    elif exposed > _LOST:
        name, why = "exchange", f"communication is exposed for {exposed:.1%} of the step"
    elif over is not None:
        why += f"; {row} is {over:.3f} ms over its floor"
    return Wall(name, why, memory, summary.idle, summary.launches, exposed, row, over)


def length(intervals: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def _notes(summary: Summary) -> list[str]:
    units = {segment.segment for segment in summary.segments}
    notes = []
    if summary.on == "cpu":
        notes.append(
            "this trace has no GPU: times are the host's. A row's time beyond its operations is Python, and "
            "with several ranks waiting for each other"
        )
    if FULL_ITERATION in units:
        notes.append(
            f"kernels of the step's graph (graph.scope={FULL_ITERATION}) name no segment, since the trace "
            f"has no list of its nodes, or another one; graph.scope=layer separates segments"
        )
    if any(".." in unit for unit in units):
        notes.append("a row such as attn..mlp is a compiled unit: its kernels are fused over its segments")
    return [*notes, *[f"{UNKNOWN.unit}: kernels whose launch is not in the trace"] * (UNKNOWN.unit in units)]


def _of_cpu(trace: Trace, owners: Owners, num_kernels: int) -> Summary:
    steps = len(trace.steps)
    whole = sum(step.end - step.start for step in trace.steps)
    spent = _spent_in_ranges(trace, owners)
    times: dict[Owner, list[tuple[str, float]]] = defaultdict(list)
    for event, place, inner in zip(trace.host, owners.host, owners.inner_us, strict=True):
        if event.is_range or step_of(trace.steps, event.start) is None:
            continue
        own = max(event.end - event.start - inner, 0.0)
        owner = owners.of(place)
        times[_named(owner)].append((event.name, own))
        if place.sequence is not None and owner != NOBODY:  # an eager backward is in no range
            spent[owner] += own
    spent[OTHER] = max(whole - sum(spent.values()), 0.0)
    calls = _calls_of(trace)
    summary = Summary(str(trace.path), trace.device, "cpu", trace.facts, steps, whole / steps / 1e3)
    for owner, time in spent.items():
        kernels = largest(times[owner], steps, num_kernels)
        each_ms, each_calls = time / steps / 1e3, calls[owner] / steps
        summary.segments.append(SegmentTime(*owner, each_calls, each_ms, None, kernels))
    return summary


def _spent_in_ranges(trace: Trace, owners: Owners) -> dict[Owner, float]:
    spent: dict[Owner, float] = defaultdict(float)
    for event, around in zip(trace.host, owners.around, strict=True):
        named = unit_and_part(event.name) if event.is_range else None
        if named and step_of(trace.steps, event.start) is not None:
            spent[named] += event.end - event.start
            spent[around.owner] -= event.end - event.start
    spent.pop(NOBODY, None)
    return spent


def _of_gpu(trace: Trace, owners: Owners, num_kernels: int) -> Summary:
    steps, launches = len(trace.steps), dict[int | None, Owner]()
    for call, place in zip(trace.calls, owners.calls, strict=True):
        if call.correlation is not None:
            is_inside = step_of(trace.steps, call.start) is not None
            launches[call.correlation] = _named(owners.of(place)) if is_inside else BETWEEN
    owned: dict[Owner, list[Activity]] = defaultdict(list)
    for activity in trace.activities:
        owned[launches.get(activity.correlation, UNKNOWN)].append(activity)
    for owner, found in _by_node(trace, owned.pop(_WHOLE, [])).items():
        owned[owner] += found
    inside = [a for owner, found in owned.items() if owner is not BETWEEN for a in found]
    if not inside:
        raise ConfigError(f"{trace.path} has no kernel that a step launched")
    summary = _whole_steps(trace, min(a.start for a in inside), max(a.end for a in inside))
    calls, least = _calls_of(trace), _floors(trace, owned)
    for owner, found in owned.items():
        times = ((a.name, a.end - a.start) for a in found)
        segment = SegmentTime(
            *owner,
            calls[owner] / steps,
            length((a.start, a.end) for a in found) / steps / 1e3,
            length((a.start, a.end) for a in found if is_communication(a)) / steps / 1e3,
            largest(times, steps, num_kernels),
            least.get(owner) or None,
        )
        summary.segments.append(segment)
    return summary


def _whole_steps(trace: Trace, begin: float, end: float) -> Summary:
    steps = len(trace.steps)
    running = [a for a in trace.activities if a.end > begin and a.start < end]
    messages = [(a.start, a.end) for a in running if is_communication(a)]
    kernels = [(a.start, a.end) for a in running if a.kind == "kernel" and not is_communication(a)]
    busy = length((max(a.start, begin), min(a.end, end)) for a in running)
    exposed, launching = length(messages + kernels) - length(kernels), _launching(trace)
    by_kind: dict[str, list[tuple[float, float]]] = {"compute": [], "copy": [], "other": []}
    for a in running:
        is_copy = a.kind == "memcpy" or is_communication(a)
        by_kind["copy" if is_copy else "compute" if a.kind == "kernel" else "other"].append((a.start, a.end))
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
        streams={name: length(each) / steps / 1e3 for name, each in by_kind.items()},
    )


def _launching(trace: Trace) -> list[HostEvent]:
    found: list[HostEvent] = []
    ends: dict[Thread, float] = defaultdict(lambda: -math.inf)
    for call in trace.calls:
        launches = LAUNCH.match(call.name) and step_of(trace.steps, call.start) is not None
        if launches and call.start >= ends[call.thread]:
            found.append(call)
            ends[call.thread] = call.end
    return found


def _named(owner: Owner) -> Owner:
    return OTHER if owner == NOBODY else owner


def _calls_of(trace: Trace) -> Counter[Owner]:
    ranges = (e for e in trace.host if e.is_range and step_of(trace.steps, e.start) is not None)
    calls = Counter(owner for event in ranges if (owner := unit_and_part(event.name)))
    for unit, part, _ in trace.graph if calls[_WHOLE] else ():
        calls[Owner(unit, part)] += calls[_WHOLE]
    return calls


def largest(times: Iterable[tuple[str, float]], steps: int, count: int) -> list[Kernel]:
    """Sum (name, microseconds) of equal names; return the ``count`` largest."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, took in times:
        by_name[name].append(took)
    found = [
        Kernel(n[:NAME_LENGTH], len(each) / steps, sum(each) / steps / 1e3) for n, each in by_name.items()
    ]
    return sorted(found, key=lambda kernel: -kernel.ms)[:count]


def _by_node(trace: Trace, replayed: Sequence[Activity]) -> dict[Owner, list[Activity]]:
    # Kernels of replays of a whole step's graph, by the segments that were captured. On any number of streams
    # runs of one name start in the order of its nodes. A run without a node belongs to what starts before it.
    nodes: dict[str, list[Owner]] = defaultdict(list)
    for unit, part, names in trace.graph:
        for name in names:
            nodes[name].append(_named(Owner(unit, part)))
    found: dict[Owner, list[Activity]] = defaultdict(list)
    for replay in {activity.correlation for activity in replayed}:
        runs: dict[str, list[Activity]] = defaultdict(list)
        for a in (a for a in replayed if a.correlation == replay):
            runs[a.kind if a.kind != "kernel" else a.name if a.name in nodes else ""].append(a)
        known = {
            id(a): owner
            for name, of_name in runs.items()
            if len(of_name) == len(nodes.get(name, ()))
            for a, owner in zip(of_name, nodes[name], strict=True)
        }
        owner = _WHOLE
        for a in (a for a in replayed if a.correlation == replay):
            owner = known.get(id(a), owner)
            found[owner].append(a)
    return found


def _floors(trace: Trace, rows: Iterable[Owner]) -> dict[Owner, float]:
    # least ms per step of rows, each a segment or a compiled unit of neighbours such as a..b
    found: dict[Owner, float] = defaultdict(float)
    parts: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        parts[row.unit].append(row.part)
    for layer in trace.floors:
        left = set(layer)
        for unit, segments in sorted(_segments(parts, [*layer]), key=lambda pair: -len(pair[1])):
            if left.issuperset(segments):  # "attn" of a dense layer may be in its "attn..mlp"
                left -= {*segments}
                for part in parts[unit]:
                    if part in _FIGURES:
                        found[Owner(unit, part)] += sum(layer[s][i] for s in segments for i in _FIGURES[part])
    return found


def _segments(units: Iterable[str], layer: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    for unit in units:
        first, _, last = unit.partition("..")
        if first in layer and (last or first) in layer:
            yield unit, layer[layer.index(first) : layer.index(last or first) + 1]
