"""Times of calls that take turns."""

from types import SimpleNamespace

import pytest
import torch

from graphmoe.ops import timing

CPU = torch.device("cpu")


def test_alternatives_take_turns_and_each_round_starts_with_another():
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    samples = timing.time_in_turns(calls, 4, CPU)
    assert "".join(order) == "abcbcacababc"
    assert {name: len(times) for name, times in samples.items()} == {"a": 4, "b": 4, "c": 4}


class FakeClock:
    """The time in seconds, which passes only when a call says so."""

    now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(elapsed_time=lambda end: (end.at - event.at) * 1e3)
        event.record = lambda: setattr(event, "at", self.now)
        return event


def test_device_times_are_those_between_events_and_slow_cases_take_fewer_rounds(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: clock.advance(0.001))
    monkeypatch.setattr(timing, "FLUSH_BYTES", 2**20)
    calls = {"short": lambda: clock.advance(0.001), "long": lambda: clock.advance(0.01)}
    samples = timing._times_of_device(calls, 6, CPU)
    assert samples == {"short": pytest.approx([1.0] * 6), "long": pytest.approx([10.0] * 6)}
    assert [timing.affordable(20, round_s) for round_s in (1e-6, 0.1, 60.0)] == [20, 15, 3]
    assert timing.affordable(2, 60.0) == 2


def test_the_spread_interpolates_percentiles():
    assert timing.spread([3.0, 1.0, 2.0]) == pytest.approx((1.2, 2.0, 2.8))
    assert timing.spread([5.0]) == (5.0, 5.0, 5.0)
