"""A Chrome trace of torch's profiler (Kineto) as lists of what happened on the host and on the device.

Kineto links them by numbers: a call of CUDA's or HIP's runtime has a ``correlation``, and so has each kernel,
copy or memset that it launched; all of a graph have that of the graph's launch.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from graphmoe.config import ConfigError

FACTS = "graphmoe"
"""Key of what a run with profile.steps says of itself."""
STEP = "ProfilerStep#"
PROFILE_FOLDER = "profile"
"""Of the traces, in a run's folder."""
Thread = tuple[Any, Any]
DEVICE: dict[str, Literal["kernel", "memcpy", "memset"]] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
}


@dataclass(frozen=True)
class HostEvent:
    """An operation of torch, or a range that somebody named; times in microseconds."""

    name: str
    thread: Thread
    start: float
    end: float
    is_range: bool
    args: dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A call of the device's runtime or driver."""

    name: str
    thread: Thread
    start: float
    end: float
    correlation: int | None


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or memset of the device."""

    name: str
    kind: Literal["kernel", "memcpy", "memset"]
    start: float
    end: float
    stream: str
    correlation: int | None
    num_bytes: int | None = None
    """That it copies or sets; None for a kernel."""


@dataclass
class Trace:
    """What a trace holds, each list in the order of starts."""

    path: Path
    host: list[HostEvent] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    activities: list[Activity] = field(default_factory=list)
    steps: list[HostEvent] = field(default_factory=list)
    """Ranges of training steps, on the thread that runs them."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the run has said of itself; empty for a trace from elsewhere."""
    device: str | None = None
    """Name of the GPU."""


def trace_file(rank: int) -> str:
    """Name of a rank's trace."""
    return f"rank{rank}.trace.json.gz"


def rank_of(name: str) -> int | None:
    """The rank whose trace has this name; None for the name of another file."""
    digits = name.removeprefix("rank").partition(".")[0]
    rank = int(digits) if digits.isdecimal() else None
    return rank if rank is not None and name == trace_file(rank) else None


def read_trace(path: Path) -> Trace:
    """Read a ``.json`` or ``.json.gz``. *Raises* ConfigError for what is no trace."""
    document = _document(path)
    trace = Trace(path, facts=document.get(FACTS) or {})
    devices = document.get("deviceProperties") or []
    names = [device["name"] for device in devices if device.get("name")]
    trace.device = trace.facts.get("device") or (names[0] if names else None)
    for event in document["traceEvents"]:
        if event.get("ph") == "X" and "ts" in event:
            _add(trace, event)
    for events in (trace.host, trace.calls, trace.activities, trace.steps):
        events.sort(key=lambda event: (event.start, -event.end))
    return trace


def _document(path: Path) -> dict[str, Any]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            document = json.load(file)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"{path} is no whole trace: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ConfigError(f"{path} is no Chrome trace: it has no list traceEvents")
    return document


def _add(trace: Trace, event: dict[str, Any]) -> None:
    """Put one event where it belongs; most categories are of no use here."""
    category, args = event.get("cat", ""), event.get("args") or {}
    start = float(event["ts"])
    end = start + float(event.get("dur", 0.0))
    thread, name = (event.get("pid"), event.get("tid")), str(event.get("name", ""))
    if category in ("cpu_op", "user_annotation"):
        host = HostEvent(name, thread, start, end, category == "user_annotation", args)
        trace.host.append(host)
        if host.is_range and name.startswith(STEP):
            trace.steps.append(host)
    elif category.endswith(("_runtime", "_driver")):
        trace.calls.append(Call(name, thread, start, end, args.get("correlation")))
    elif category in DEVICE:
        stream = f"{args.get('device', event.get('pid'))}.{args.get('stream', event.get('tid'))}"
        kind, size = DEVICE[category], args.get("bytes")
        trace.activities.append(Activity(name, kind, start, end, stream, args.get("correlation"), size))
