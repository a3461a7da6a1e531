"""Captures of a call, and two proofs that it does not wait for the device: no sync, a host back in time."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
SLEEP_MS, HOST_MS = 200.0, 20.0
"""Sleep of the device, and the time in which the host must queue its work behind that."""


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    """Let torch raise where it waits for the device inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_host_is_back_while_the_device_sleeps(call: Callable[[], object]) -> None:
    """Queue a sleep on the device and then ``call``, three times; the best of three must be in time.

    The best, since the limit is for waiting, not for a busy host. ``call`` must be warm.
    """
    cycles, host_ms = int(SLEEP_MS * _cycles_per_ms()), []
    for _ in range(3):
        torch.cuda.synchronize()
        awake = torch.cuda.Event()
        torch.cuda._sleep(cycles)
        awake.record()
        start = time.perf_counter()
        call()
        host_ms.append((time.perf_counter() - start) * 1e3)
        assert not awake.query(), "the host waited until the device woke up"
    torch.cuda.synchronize()
    assert min(host_ms) < HOST_MS, host_ms


def assert_never_waits(call: Callable[[], object]) -> None:
    call()
    with syncs_are_errors():
        call()
    assert_host_is_back_while_the_device_sleeps(call)


def assert_repeats(call: Callable[[], Sequence[Tensor]]) -> None:
    first = call()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, call(), strict=True))


def assert_replays(
    call: Callable[[], Sequence[Tensor]],
    changes: Iterable[object],
    check: Callable[[Sequence[Tensor]], None] = lambda results: None,
) -> None:
    """Capture a call, and check that a replay behind each change gives the bits of another call then."""
    graph, captured = capture(call)
    for change in changes:
        graph.replay()
        for actual, wanted in zip(captured, call(), strict=True):
            assert torch.equal(actual, wanted), change
        check(captured)


def capture(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = call()
    return graph, results


@dataclass
class Replayed:
    """Results of a captured graph's replay, and of the same calls before, uncaptured."""

    captured: list[Tensor]
    plain: list[Tensor]


def captured(run: Callable[[], list[Tensor]], change: Callable[[int], None]) -> Replayed:
    """Warm up on one input, capture on it, replay on another; the host must not wait for the device."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        torch.cuda.set_sync_debug_mode("error")
        run()
        torch.cuda.set_sync_debug_mode("default")
        change(1)
        plain = [tensor.clone() for tensor in run()]
        change(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = run()
        change(1)
        graph.replay()
    torch.cuda.synchronize()
    return Replayed([tensor.cpu() for tensor in results], [tensor.cpu() for tensor in plain])


def _cycles_per_ms() -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    torch.cuda.synchronize()
    return 20_000_000 / start.elapsed_time(end)
