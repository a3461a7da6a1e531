"""Signals that the launching process passes on to its workers."""

import os
import signal
import subprocess
import time

from graphmoe.runtime.launch.elastic import _Forwarding


def test_the_launcher_passes_a_notice_on_once_and_ends_at_the_second_demand(monkeypatch):
    workers = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2)]
    ended: list[int] = []
    monkeypatch.setattr("graphmoe.runtime.launch.elastic.os._exit", ended.append)
    with _Forwarding(["sleep", "60"]) as forwarding:
        while len(forwarding._workers()) < 2:  # a new process has no command line at once
            time.sleep(0.001)
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert forwarding.received == "SIGUSR1" and not ended
        assert [worker.wait(5) for worker in workers] == [-signal.SIGTERM] * 2
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


def test_a_notice_that_submitit_waits_for_reaches_it_when_the_workers_are_done():
    told: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))
    try:
        with _Forwarding(["sleep", "60"]) as forwarding:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert forwarding.received == "SIGUSR2" and not told
        assert told == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)
