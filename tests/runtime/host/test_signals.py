"""Signals that ask a run to stop, in one process."""

import contextlib
import os
import signal

import pytest

from graphmoe.runtime.host.signals import (
    ELASTIC,
    LAUNCHER_PID,
    NOTICES,
    SIGNALS,
    Interrupted,
    StopSignal,
    ends_at_signals,
    heard,
)


def test_a_signal_that_reaches_a_worker_twice_at_once_counts_once(monkeypatch):
    monkeypatch.setenv(ELASTIC, "x")
    monkeypatch.setattr("graphmoe.runtime.host.signals._heard._at", -2.0)
    with StopSignal() as stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert stop.received == "SIGTERM"


@pytest.fixture
def ended(monkeypatch) -> list[int]:
    """The statuses with which a handler would have ended this process."""
    statuses: list[int] = []
    monkeypatch.setattr("graphmoe.runtime.host.signals.os._exit", statuses.append)
    return statuses


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [*SIGNALS, *NOTICES])
def test_each_signal_that_asks_to_stop_is_remembered(number, ended):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        send(number)
    assert stop.received == number.name and not ended and signal.getsignal(number) is before


def test_notices_never_end_a_process_at_once_and_a_second_demand_does(ended):
    with StopSignal() as stop:
        send(signal.SIGUSR1, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM)  # as Slurm does at the end
        assert not ended
        send(signal.SIGUSR2)
        assert not ended
        send(signal.SIGINT)
    assert stop.received == "SIGUSR1" and ended == [130]


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_at_signals(), StopSignal() as stop:
            send(signal.SIGHUP)
        assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_workers_leave_notices_to_their_launcher(monkeypatch):
    assert [*heard()] == [*SIGNALS, *NOTICES]
    monkeypatch.setenv(LAUNCHER_PID, str(os.getppid()))
    assert [*heard()] == [*SIGNALS]


def test_a_signal_whose_exception_was_dropped_stops_the_run_at_its_first_step():
    with ends_at_signals():
        with contextlib.suppress(KeyboardInterrupt):
            send(signal.SIGTERM)
        with StopSignal() as stop:
            assert stop.received == "SIGTERM"
    with StopSignal() as stop:
        assert stop.received is None


def test_a_notice_that_comes_again_before_the_first_step_does_not_end_the_tidying_up():
    tidied = False
    with pytest.raises(Interrupted), ends_at_signals():
        try:
            send(signal.SIGHUP)
        finally:
            send(signal.SIGHUP)
            send(signal.SIGUSR1)
            tidied = True
    assert tidied


def test_outside_the_steps_a_signal_raises_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM") as interrupted, ends_at_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert interrupted.value.status == 143 and signal.getsignal(signal.SIGTERM) is before
