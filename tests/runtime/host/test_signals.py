"""Signals that ask a run to stop, in one process and in a launcher that passes them on."""

import contextlib
import os
import signal
import subprocess
import time

import pytest

from graphmoe.runtime.host import signals
from graphmoe.runtime.host.signals import NOTICES, SIGNALS, StopSignal, ends_at_signals, heard
from graphmoe.runtime.launch.elastic import _Forwarding


@pytest.fixture
def ended(monkeypatch) -> list[int]:
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
        send(signal.SIGUSR2)
        assert not ended
        send(signal.SIGINT)
    assert stop.received == "SIGUSR1" and ended == [130]


def test_a_signal_that_reaches_a_worker_twice_at_once_counts_once(monkeypatch, ended):
    monkeypatch.setenv(signals.ELASTIC, "x")
    monkeypatch.setattr("graphmoe.runtime.host.signals._heard._at", -2.0)
    with StopSignal() as stop:
        send(signal.SIGTERM, signal.SIGINT)
    assert stop.received == "SIGTERM" and not ended


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
    monkeypatch.setenv(signals.LAUNCHER_PID, str(os.getppid()))
    assert [*heard()] == [*SIGNALS]


def test_a_signal_whose_exception_was_dropped_stops_the_run_at_its_first_step():
    with ends_at_signals():
        with contextlib.suppress(KeyboardInterrupt):
            send(signal.SIGTERM)
        with StopSignal() as stop:
            assert stop.received == "SIGTERM"
    with StopSignal() as stop:
        assert stop.received is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_before_the_first_step_a_signal_raises_and_a_notice_does_not_end_the_tidying_up(number, ended):
    before, tidied = signal.getsignal(number), False
    with pytest.raises(signals.Interrupted, match=number.name) as interrupted, ends_at_signals():
        try:
            send(number)
        finally:
            send(signal.SIGHUP, signal.SIGUSR1)
            tidied = True
    assert tidied and not ended
    assert interrupted.value.status == 128 + number and signal.getsignal(number) is before


def test_the_launcher_passes_a_notice_on_once_and_ends_at_the_second_demand(ended):
    workers = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2)]
    with _Forwarding(["sleep", "60"]) as forwarding:
        while len(forwarding._workers()) < 2:  # a new process has no command line at once
            time.sleep(0.001)
        send(signal.SIGUSR1, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM)
        assert forwarding.received == "SIGUSR1" and not ended
        assert [worker.wait(5) for worker in workers] == [-signal.SIGTERM] * 2
        send(signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


def test_a_notice_that_submitit_waits_for_reaches_it_when_the_workers_are_done():
    told: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))
    try:
        with _Forwarding(["sleep", "60"]) as forwarding:
            send(signal.SIGUSR2)
            assert forwarding.received == "SIGUSR2" and not told
        assert told == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)
