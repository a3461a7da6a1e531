"""Step times of a trace: GPU kernels by the segments that launched them, or host time.

Floors are lower bounds of kernel times: 16-bit GEMMs by shape, copies and memsets by bytes. Traces have no
shapes of fused kernels and of graph launches.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from graphmoe.config.schema import ConfigError
from graphmoe.plan.costs.hardware import CARDS, device_words, peak_tflops
from graphmoe.run.files import STEP
from graphmoe.segments import FULL_ITERATION
from graphmoe.trace.events import (
    LAUNCH,
    NOBODY,
    Activity,
    HostEvent,
    Owner,
    Owners,
    Place,
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
NAME_LENGTH = 200
# operations, and the index of their first matrix input
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::_grouped_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
_HALF = ("c10::BFloat16", "c10::Half")
_ELEMENT_BYTES = 2
# (words of the device's name, TB/s) by NVIDIA's and AMD's data sheets, for devices without projected rates.
# Specific names are first, and include variants of a projected card, whose name they contain.
_OTHER_BANDWIDTHS: tuple[tuple[str, float], ...] = (
    ("MI350X", 8.0),
    ("H100 PCIE", 2.0),
    ("H100 NVL", 3.9),
    ("H20", 4.0),
    ("A100 80GB PCIE", 1.935),
    ("A100 80GB", 2.039),
    ("L40S", 0.864),
)
# shares that name a wall: of the device's memory, and of the step
_FULL, _LOST = 0.95, 0.05
_MANY_LAUNCHES = 100  # per step; the host launches a step of one graph in fewer
Launches = Mapping[int | None, tuple[HostEvent, Place]]  # host calls and their places, by correlation


@dataclass(frozen=True)
class Kernel:
    """Times of a kernel, copy or memset of a segment, or of a CPU operation; per step."""

    name: str
    calls: float
    ms: float
    floor_ms: float | None  # least time on this device, if known


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
    streams: dict[str, float] = field(default_factory=dict)
    segments: list[SegmentTime] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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


def wall_of(summary: Summary, memory: float | None = None) -> Wall | None:
    """Return what limits the step of a GPU; None for a trace of a CPU.

    ``memory``: the run's peak as a share of the device's memory, if known.
    """
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
            f"the whole step is one graph (graph.scope={FULL_ITERATION}), whose kernels name no segment; "
            f"they are listed by kernel. graph.scope=layer separates segments"
        )
    if any(".." in unit for unit in units):
        notes.append("a row such as attn..mlp is a compiled unit: its kernels are fused over its segments")
    return [*notes, *[f"{UNKNOWN.unit}: kernels whose launch is not in the trace"] * (UNKNOWN.unit in units)]


def _of_cpu(trace: Trace, owners: Owners, num_kernels: int) -> Summary:
    steps = len(trace.steps)
    whole = sum(step.end - step.start for step in trace.steps)
    spent = _spent_in_ranges(trace, owners)
    times: dict[Owner, list[tuple[str, float, float | None]]] = defaultdict(list)
    for event, place, inner in zip(trace.host, owners.host, owners.inner_us, strict=True):
        if event.is_range or step_of(trace.steps, event.start) is None:
            continue
        own = max(event.end - event.start - inner, 0.0)
        owner = owners.of(place)
        times[OTHER if owner == NOBODY else owner].append((event.name, own, None))
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
    steps, places = len(trace.steps), zip(trace.calls, owners.calls, strict=True)
    launches: Launches = {c.correlation: (c, place) for c, place in places if c.correlation is not None}
    owned: dict[Owner, list[Activity]] = defaultdict(list)
    for activity in trace.activities:
        owned[_owner(trace, owners, launches.get(activity.correlation))].append(activity)
    inside = [a for owner, found in owned.items() if owner is not BETWEEN for a in found]
    if not inside:
        raise ConfigError(f"{trace.path} has no kernel that a step launched")
    summary = _whole_steps(trace, min(a.start for a in inside), max(a.end for a in inside))
    floors = _floors(trace.activities, launches, Device.of(trace))
    calls = _calls_of(trace)
    for owner, found in owned.items():
        times = [(a.name, a.end - a.start, floors.get(id(a))) for a in found]
        segment = SegmentTime(
            *owner,
            calls[owner] / steps,
            length((a.start, a.end) for a in found) / steps / 1e3,
            length((a.start, a.end) for a in found if is_communication(a)) / steps / 1e3,
            largest(times, steps, num_kernels),
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
    by_stream: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for activity in running:
        by_stream[activity.stream].append((activity.start, activity.end))
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


def _launching(trace: Trace) -> list[HostEvent]:
    found: list[HostEvent] = []
    ends: dict[Thread, float] = defaultdict(lambda: -math.inf)
    for call in trace.calls:
        launches = LAUNCH.match(call.name) and step_of(trace.steps, call.start) is not None
        if launches and call.start >= ends[call.thread]:
            found.append(call)
            ends[call.thread] = call.end
    return found


def _owner(trace: Trace, owners: Owners, found: tuple[HostEvent, Place] | None) -> Owner:
    if found is None:
        return UNKNOWN
    call, place = found
    if step_of(trace.steps, call.start) is None:
        return BETWEEN
    owner = owners.of(place)
    return OTHER if owner == NOBODY else owner


def _floors(activities: Sequence[Activity], launches: Launches, device: Device) -> dict[int, float | None]:
    # microseconds by the id of an activity; an operation's are those of the longest kernel that it launched
    floors: dict[int, float | None] = {id(activity): device.of_activity(activity) for activity in activities}
    launched: dict[int, tuple[HostEvent, list[Activity]]] = {}
    for activity in activities:
        found = launches.get(activity.correlation)
        operation = found[1].operation if found else None
        if operation is not None and activity.kind == "kernel":
            launched.setdefault(id(operation), (operation, []))[1].append(activity)
    for operation, kernels in launched.values():
        longest = max(kernels, key=lambda kernel: kernel.end - kernel.start)
        floors[id(longest)] = device.of_operation(operation)
    return floors


def _calls_of(trace: Trace) -> Counter[Owner]:
    ranges = (e for e in trace.host if e.is_range and step_of(trace.steps, e.start) is not None)
    return Counter(owner for event in ranges if (owner := unit_and_part(event.name)))


def largest(times: Iterable[tuple[str, float, float | None]], steps: int, count: int) -> list[Kernel]:
    """Sum (name, microseconds, lower bound or None) of equal names; return the ``count`` largest."""
    by_name: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for name, took, floor in times:
        by_name[name].append((took, floor))
    found = []
    for name, each in by_name.items():
        floors = [floor for _, floor in each if floor is not None]
        known = sum(floors) / steps / 1e3 if len(floors) == len(each) else None
        total = sum(took for took, _ in each) / steps / 1e3
        found.append(Kernel(name[:NAME_LENGTH], len(each) / steps, total, known))
    return sorted(found, key=lambda kernel: -kernel.ms)[:count]


@dataclass(frozen=True)
class Device:
    """Peaks of a device; None for an unknown one."""

    flops_per_us: float | None  # FLOPs of 16-bit GEMMs
    bytes_per_us: float | None

    @classmethod
    def of(cls, trace: Trace) -> Device:
        name = trace.device or ""
        peak = trace.facts.get("peak_tflops") or peak_tflops(name)
        bandwidth = _tb_per_s(name)
        return cls(peak * 1e6 if peak else None, bandwidth * 1e6 if bandwidth else None)

    def of_activity(self, activity: Activity) -> float | None:
        """Return the least microseconds of a memset or a copy within the device, None for others."""
        if activity.num_bytes is None or self.bytes_per_us is None:
            return None
        if activity.kind == "memset":
            return activity.num_bytes / self.bytes_per_us
        return 2 * activity.num_bytes / self.bytes_per_us if "DtoD" in activity.name else None

    def of_operation(self, operation: HostEvent) -> float | None:
        """Return the least microseconds of a 16-bit GEMM, None for others."""
        shape = product_shape(operation)
        if shape is None or self.flops_per_us is None:
            return None
        flops, num_elements = shape
        moved = num_elements * _ELEMENT_BYTES / self.bytes_per_us if self.bytes_per_us else 0.0
        return max(flops / self.flops_per_us, moved)


def product_shape(operation: HostEvent) -> tuple[float, float] | None:
    """Return FLOPs and elements moved of a 16-bit GEMM; None for others."""
    first = _PRODUCTS.get(operation.name)
    dims, types = operation.args.get("Input Dims"), operation.args.get("Input type")
    if first is None or not dims or not types or len(dims) < first + 2:
        return None
    left, right = dims[first : first + 2]
    if not all(kind in _HALF for kind in types[first : first + 2]) or not _is_product(left, right):
        return None
    if len(left) == 2 and len(right) == 3:  # rows of one matrix, each group times a matrix of its own
        made = [left[0], right[2]]
    elif operation.name == "aten::_grouped_mm" and len(left) == 2:  # groups of columns: one result each
        return 2.0 * left[0] * left[1] * right[1], float(math.prod(left) + math.prod(right))
    else:
        made = [*left[:-1], right[-1]]
    elements = math.prod(left) + math.prod(right) + math.prod(made)
    return 2.0 * math.prod(made) * left[-1], float(elements)


def _tb_per_s(device_name: str) -> float | None:
    words = device_words(device_name)
    if "MIG" in words:
        return None
    of_cards = ((card.name, card.hbm_tb_per_s) for card in CARDS.values())
    known = (*_OTHER_BANDWIDTHS, *of_cards)
    return next((tb_per_s for needed, tb_per_s in known if words.issuperset(needed.split())), None)


def _is_product(left: Sequence[int], right: Sequence[int]) -> bool:
    fit = len(left) in (2, 3) and len(right) in (2, 3) and len(left) <= len(right)
    return fit and all(type(size) is int for size in (*left, *right)) and left[-1] == right[-2]
