"""Host and device events of a Chrome trace by torch's profiler (Kineto), and the segments that own them.

A device runtime call has the ``correlation`` of each kernel, copy or memset that it launched, also through a
graph. An event belongs to the innermost graphmoe range on its thread; in an eager backward, to the forward
operation that autograd's sequence number names.
"""

import bisect
import gzip
import io
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import msgspec
import psutil

from graphmoe.config.arguments import near_path
from graphmoe.config.schema import ConfigError
from graphmoe.config.untrusted import FileError, decoded, read_bytes
from graphmoe.run.files import PROFILE_FOLDER, STEP, trace_file

LARGEST_TRACE = 4 << 30
MEMORY_PER_BYTE = 10  # bytes of memory for a byte of a trace
BYTES_PER_EVENT = 20  # the profiler writes at least 60 for an event with its args, which are two objects
Thread = tuple[Any, Any]
HOST, RUNTIME = ("cpu_op", "user_annotation"), ("_runtime", "_driver")
Kind = Literal["kernel", "memcpy", "memset"]
DEVICE: dict[str, Kind] = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_ELEMENT_BYTES = {  # by the names that torch gives dtypes of collectives
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("Half", "BFloat16"), 2),
    **{"Float": 4, "Int": 4, "Double": 8, "Long": 8},
}
_AUTOGRAD = "autograd::engine::evaluate_function"
_COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|rocshmem|deep_ep|mori::|multimem|one_shot_all_reduce|two_shot_all_reduce"
    r"|PtoP|PeerToPeer|symm_mem"
    # kernels of graphmoe.ops.symm that wait for other ranks, or access their memory
    r"|^(records|receive|pull|put|way_back|sum)_kernel",
    re.IGNORECASE,
)
LAUNCH = re.compile(r"^(cuda|cu|hip)[A-Za-z]*Launch")
# graphmoe ranges, without torch's process groups, such as gloo:send, which last until a message arrives
_RANGE = re.compile(r"(?!(?:gloo|nccl|ucc|mpi):)([a-z_]+(?:\.\.[a-z_]+)?):([A-Za-z]+)")


_Args = TypedDict(
    "_Args",
    {
        "correlation": int | None,
        "bytes": int | None,
        "Collective name": str,
        "In msg nelems": int,
        "Out msg nelems": int,
        "dtype": str,
        "Process Group Ranks": Any,
        "device": int | str,
        "stream": int | str,
        "Sequence number": int,
    },
    total=False,
)


class HostEvent(NamedTuple):
    """An operation, a named range, or a device runtime call; times in microseconds."""

    name: str
    thread: Thread
    start: float
    end: float
    args: _Args
    is_range: bool = False
    is_call: bool = False

    @property
    def correlation(self) -> int | None:
        return self.args.get("correlation")


class Activity(NamedTuple):
    name: str
    kind: Kind
    start: float
    end: float
    stream: str
    correlation: int | None
    num_bytes: int | None = None  # of a copy, a memset, or a collective's larger side
    message: tuple[str, str] | None = None  # a collective's name and ranks, if no graph launched it


@dataclass
class Trace:
    """Events of a trace, each list sorted by start."""

    path: Path
    host: list[HostEvent] = field(default_factory=list)
    calls: list[HostEvent] = field(default_factory=list)
    activities: list[Activity] = field(default_factory=list)
    # ranges of training steps, on the thread that runs them
    steps: list[HostEvent] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    device: str | None = None
    # (segment, part, names of nodes) of a whole step's graph, in the order of its capture
    graph: list[tuple[str, str, list[str]]] = field(default_factory=list)
    # ms per step of forward, dgrad and wgrad by segment, for each kind of layer
    floors: list[dict[str, tuple[float, float, float]]] = field(default_factory=list)
    base_us: float = 0.0  # added to all times, the clock of the host


def traces_of(runs: Sequence[Path], rank: int | None) -> list[Path]:
    """Return the trace of one rank of each run, by default the lowest that all have. *Raises* ConfigError."""
    of_runs = [recorded(run) for run in runs]
    if rank is None:
        rank = min(set.intersection(*map(set, of_runs)), default=None)
    if rank is None:
        pairs = zip(runs, of_runs, strict=True)
        there = ", ".join(f"{run} has rank {listed(found)}" for run, found in pairs)
        raise ConfigError(
            f"no rank has a trace in every run: {there}; record the same profile.ranks, or use trace="
        )
    for run, found in zip(runs, of_runs, strict=True):
        if rank not in found:
            there = f"there are those of {listed(found)} (profile.ranks)"
            raise ConfigError(f"rank={rank} has no trace in {run}; {there}")
    return [found[rank] for found in of_runs]


def recorded(run: Path) -> dict[int, Path]:
    if not run.is_dir():
        raise ConfigError(f"run={run} is not a folder; name a run, or use trace=<file>{near_path(run)}")
    found = {}
    for path in (run / PROFILE_FOLDER).glob("rank*"):
        digits = path.name.removeprefix("rank").partition(".")[0]
        if digits.isdecimal() and path.name == trace_file(int(digits)):
            found[int(digits)] = path
    if not found:
        raise ConfigError(f"{run} has no trace; a run with profile.steps=[10,12] writes one")
    return found


def listed(found: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(found)))


class _Device(msgspec.Struct):
    name: str | None = None


class Facts(TypedDict, total=False):
    rank: int
    num_ranks: int
    steps: list[int]
    device: str | None
    host: str
    experts_on: list[int]
    memory: float
    graph: list[tuple[str, str, list[str]]]
    floors: list[dict[str, tuple[float, float, float]]]


class _Event(msgspec.Struct):
    ph: str = ""
    ts: float | None = None
    dur: float | None = None
    cat: str | None = None
    name: str | int | float | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")  # decoded for known categories only


class _Document(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815 (its name there)
    deviceProperties: list[_Device] | None = None  # noqa: N815
    graphmoe: Facts | None = None
    baseTimeNanoseconds: int = 0  # noqa: N815 (its name there)


def read_trace(path: Path) -> Trace:
    """Read a ``.json`` or ``.json.gz``. *Raises* ConfigError for an invalid trace."""
    document = decoded(_content(path), _Document, str(path))
    trace = Trace(path, facts={**(document.graphmoe or {})}, base_us=document.baseTimeNanoseconds / 1e3)
    trace.graph, trace.floors = (trace.facts.pop(name, []) for name in ("graph", "floors"))
    names = (device.name for device in document.deviceProperties or [] if device.name)
    trace.device = trace.facts.get("device") or next(names, None)
    for number, event in enumerate(document.traceEvents):
        if event.ph == "X" and event.ts is not None:
            _add(trace, event, event.ts, f"{path}: traceEvents[{number}]")
    for events in (trace.host, trace.calls, trace.activities, trace.steps):
        events.sort(key=lambda event: (event.start, -event.end))
    return trace


def _content(path: Path) -> bytes:
    largest = min(LARGEST_TRACE, psutil.virtual_memory().available // MEMORY_PER_BYTE)
    content = read_bytes(path, largest)
    try:
        if path.suffix == ".gz":
            found = bytearray()
            with gzip.open(io.BytesIO(content)) as file:
                while len(found) <= largest and (block := file.read(2**26)):
                    found += block
            content = bytes(found)
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{path} is not a complete trace: {error}") from error
    if len(content) > largest:
        raise FileError(f"{path} has more than {largest:,} bytes; record fewer steps")
    if content.count(b"{") * BYTES_PER_EVENT > max(len(content), 2**20):
        raise FileError(f"{path} has more events than a profiler writes in {len(content):,} bytes")
    return content


def _add(trace: Trace, event: _Event, start: float, where: str) -> None:
    category = event.cat or ""
    if category not in HOST and category not in DEVICE and not category.endswith(RUNTIME):
        return
    args = decoded(bytes(event.args), _Args | None, f"{where}.args") or _Args()
    end = start + (event.dur or 0.0)
    if not math.isfinite(start + end):
        raise FileError(f"{where}: ts={event.ts} and dur={event.dur} are not valid times")
    thread, name = (event.pid, event.tid), str(event.name or "")
    if category in HOST:
        host = HostEvent(name, thread, start, end, args, is_range=category == "user_annotation")
        trace.host.append(host)
        if host.is_range and name.startswith(STEP):
            trace.steps.append(host)
    elif category in DEVICE:
        stream = f"{args.get('device', event.pid)}.{args.get('stream', event.tid)}"
        trace.activities.append(_activity(args, name, DEVICE[category], start, end, stream))
    else:
        trace.calls.append(HostEvent(name, thread, start, end, args, is_call=True))


def _activity(known: _Args, name: str, kind: Kind, start: float, end: float, stream: str) -> Activity:
    size, message = known.get("bytes"), None
    if "Collective name" in known:
        message = known["Collective name"], str(known.get("Process Group Ranks", ""))
        elements = max(known.get("In msg nelems", 0), known.get("Out msg nelems", 0))
        size = elements * _ELEMENT_BYTES.get(known.get("dtype", ""), 0) or None
    return Activity(name, kind, start, end, stream, known.get("correlation"), size, message)


class Owner(NamedTuple):
    """Segment or compile unit and its part, such as attn and F (forward); empty outside graphmoe ranges."""

    unit: str
    part: str


NOBODY = Owner("", "")


class Place(NamedTuple):
    owner: Owner = NOBODY
    # forward operation whose gradient this computes, if no graphmoe range is nearer
    sequence: int | None = None


class Owners(NamedTuple):
    """Segment and part of each host event and call, in the order of the trace's lists."""

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
    """Return the index of the step that contains a host time, or None."""
    number = bisect.bisect_right([step.start for step in steps], time) - 1
    return number if number >= 0 and time <= steps[number].end else None


def _inside(event: HostEvent, outer: Place) -> Place:
    if event.is_range:
        named = unit_and_part(event.name)
        return Place(named) if named else outer
    if event.name.startswith(_AUTOGRAD) and "Sequence number" in event.args:
        return Place(NOBODY, event.args["Sequence number"])
    return outer


def is_communication(activity: Activity) -> bool:
    return bool(_COMMUNICATION.search(activity.name))


def unit_and_part(name: str) -> Owner | None:
    """Return the segment or compile unit and the part that a graphmoe range names; None for other ranges."""
    match = _RANGE.fullmatch(name)
    return Owner(match[1], match[2]) if match else None
