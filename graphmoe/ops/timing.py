"""Moments on a device or the host, and timing of alternatives in turns, with cold caches."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

FLUSH_BYTES = 512 * 2**20  # twice the last-level cache of an MI300X; that of an H200 is 60 MB
WARM_UP_CALLS = 3  # the first compiles
MAX_CASE_S = 1.5  # fewer rounds, but at least MIN_ROUNDS, if all would take longer
MIN_ROUNDS = 3
MAX_FLUSHES = 32  # per call; if the host queues longer, the device waits

Call = Callable[[], object]
Moment = torch.cuda.Event | float
"""An event of the device's current stream, or the host's clock in seconds."""


def moment(device: torch.device) -> Moment:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Return the seconds between two moments of one clock; events must be complete."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3  # type: ignore


def time_in_turns(calls: Mapping[str, Call], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return each call's ms in each round. Calls must be warm; each round starts with another call."""
    if not calls:
        return {}
    if device.type != "cuda":
        return _times_of_host(calls, rounds)
    return _times_of_device(calls, rounds, device)


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the 10th, 50th and 90th percentiles, interpolated."""
    values = torch.tensor(samples, dtype=torch.float64)
    low, median, high = values.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return low, median, high


def turns(names: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
    """Yield the names in the order of each round: each starts with the next name."""
    for number in range(rounds):
        start = number % len(names)
        yield [*names[start:], *names[:start]]


def affordable(rounds: int, round_s: float) -> int:
    """Return the number of rounds, at most ``rounds``, that fit in `MAX_CASE_S`; at least `MIN_ROUNDS`."""
    return min(rounds, max(MIN_ROUNDS, int(MAX_CASE_S / max(round_s, 1e-9))))


def _times_of_host(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in turns(list(calls), rounds):
        for name in turn:
            started = time.perf_counter()
            calls[name]()
            samples[name].append((time.perf_counter() - started) * 1e3)
    return samples


def _times_of_device(calls: Mapping[str, Call], rounds: int, device: torch.device) -> dict[str, list[float]]:
    cache = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    flush_s = _seconds(cache.zero_, device)[1]
    flushes: dict[str, int] = {}
    round_s = 0.0
    for name, call in calls.items():
        host_s, device_s = _seconds(call, device)
        flushes[name] = min(1 + math.ceil(1.5 * host_s / flush_s), MAX_FLUSHES)
        round_s += device_s + flushes[name] * flush_s
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for turn in turns(list(calls), affordable(rounds, round_s)):
        for name in turn:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # also keeps the device busy while the host queues the call, so kernels are timed, not launches
            for _ in range(flushes[name]):
                cache.zero_()
            start.record()
            calls[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize(device)
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def _seconds(call: Call, device: torch.device) -> tuple[float, float]:
    """Return seconds until the second of two calls is queued, and until it is done."""
    for _ in range(2):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        queued = time.perf_counter()
        torch.cuda.synchronize(device)
        done = time.perf_counter()
    return queued - started, done - started
