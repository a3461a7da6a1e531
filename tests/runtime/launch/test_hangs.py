"""Hangs are told from slow work, the rank is named, and torch's flight recorder is asked."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from graphmoe.runtime.launch import failures, hangs
from graphmoe.runtime.launch.failures import NAME, ask_for_dumps, dumps_since, set_flight_recorder
from graphmoe.runtime.launch.hangs import HangWatch, watching
from graphmoe.runtime.launch.stamps import SLOW_S, STAMPS, Heartbeat
from tests.runs import ROOT

WORKER = """
import sys, time
from graphmoe.runtime.launch.stamps import begin_stamps, put_stamp, wait_for
begin_stamps()
put_stamp("step 3", float(sys.argv[1]), 3)
exec(compile(f"print('there', flush=True); {sys.argv[3]}", sys.argv[2], "exec"))
"""


def test_work_has_a_limit_once_the_time_of_its_kind_is_known(monkeypatch):
    found: list[tuple[str, float]] = []
    name = "graphmoe.runtime.launch.stamps.put_stamp"
    monkeypatch.setattr(name, lambda phase, limit_s, step: found.append((phase, limit_s)))
    beat = Heartbeat(45, first_steps=1)
    error = RuntimeError("the cause")
    for now, call, words, expected in (
        (0, beat.validation, (), ("the validation after step 0", SLOW_S)),
        (20, beat.step, (1,), ("step 1", SLOW_S)),  # compiles for five minutes
        (320, beat.step, (2,), ("step 2", SLOW_S)),  # whose metrics nobody reads
        (321, beat.step, (3,), ("step 3", SLOW_S)),
        (322, beat.step, (4,), ("step 4", 45)),
        (323, beat.validation, (), ("the validation after step 4", 60)),
        (324, beat.restart, ("step 4, with more room",), ("step 4, with more room", SLOW_S)),
        (624, beat.step, (5,), ("step 5", SLOW_S)),
        (924, beat.step, (6,), ("step 6", SLOW_S)),
        (925, beat.step, (7,), ("step 7", 45)),
        (926, beat.leave, (RuntimeError, error, None), ("what follows RuntimeError: the cause", 45)),
    ):
        monkeypatch.setattr("time.monotonic", lambda now=now: float(now))
        call(*words)
        assert found[-1] == expected
        if call == beat.step and words != (2,):
            beat.has_read()


@pytest.fixture
def logs(tmp_path) -> Path:
    for name in ("stamps", "logs"):
        (tmp_path / name).mkdir()
    return tmp_path / "logs"


@pytest.fixture
def stamps(logs) -> Path:
    return logs.with_name("stamps")


@pytest.fixture
def workers(stamps) -> Iterator:
    started = []

    def start(rank: int, file: str, limit_s: float, call: str = "time.sleep(600)") -> subprocess.Popen[str]:
        environment = {**os.environ, STAMPS: str(stamps), "RANK": str(rank), "PYTHONPATH": str(ROOT)}
        words, pipe = [sys.executable, "-c", WORKER, str(limit_s), file, call], subprocess.PIPE
        started.append(subprocess.Popen(words, env=environment, stdout=pipe, text=True, process_group=0))
        assert started[-1].stdout.readline() == "there\n"
        return started[-1]

    yield start
    for worker in started:
        worker.kill()
        worker.wait()


def watched(stamps: Path, logs: Path, worker: subprocess.Popen[str], timeout_s: float) -> failures.Failure:
    watch = HangWatch(stamps, timeout_s)
    while worker.poll() is None:
        watch.look("job/0", logs)
    first = failures.first_failure({}, logs, "job/0")
    assert first is not None
    return first


def test_the_hanging_rank_that_waits_for_nobody_is_named(stamps, logs, workers):
    both = [workers(0, "/x/sums.py", 0.2, "wait_for(lambda: time.sleep(600))"), workers(1, "/x/mine.py", 600)]
    first = watched(stamps, logs, both[0], 0.2)
    assert [worker.wait(10) for worker in both] == [-9, -9]
    assert first.rank == 1 and not first.suffered
    assert not first.was_killed  # which could be taken for the end of a job that was asked to stop
    one, other = first.message.splitlines()
    assert one.endswith(" in step 3: it is at /x/mine.py:1 (<module>)"), one
    assert other.startswith("  rank 0 is in step 3: it waits for other ranks or the device at ")
    assert other.endswith(" at /x/sums.py:1 (<lambda>)"), other
    assert "most recent call first" in (logs / "rank0.log").read_text()


def test_a_process_that_is_stopped_hangs_whatever_it_does(stamps, logs, workers, monkeypatch):
    monkeypatch.setattr(hangs, "_STACKS_S", 0.5)  # which it does not write
    worker = workers(0, "/x/mine.py", 600)
    psutil.Process(worker.pid).suspend()
    said = watched(stamps, logs, worker, 0.5).message
    assert said.endswith(": its process is stopped (SIGSTOP)")


def test_no_worker_counts_as_hanging_once_another_is_gone(stamps, logs, workers):
    gone, late = workers(0, "/x/mine.py", 600), workers(1, "/x/mine.py", 0.0)
    watch = HangWatch(stamps, timeout_s=0.2)
    watch.look("job/0", logs)
    gone.kill()
    gone.wait()
    for _ in range(20):
        watch.look("job/0", logs)
    assert late.poll() is None and not failures.error_file(logs, 1).exists()


def test_time_in_which_the_watch_was_suspended_counts_for_nobody(stamps, logs, workers, monkeypatch):
    worker, watch = workers(0, "/x/mine.py", 30), HangWatch(stamps, timeout_s=30)
    watch.look("job/0", logs)
    monkeypatch.setattr("time.monotonic", lambda began=watch._looked: began + 3600)
    watch.look("job/0", logs)
    assert worker.poll() is None


def test_the_folder_of_a_launcher_that_was_killed_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = """
import os
from graphmoe.runtime.launch.hangs import watching
with watching(9.0): os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=False)
    young, old = tmp_path.iterdir()
    os.utime(old, (time.time() - 60,) * 2)
    with watching(9.0) as (_, told):
        os.utime(told[STAMPS], (time.time() - 60,) * 2)
        with watching(9.0) as (_, other):
            assert {*tmp_path.iterdir()} == {young, Path(told[STAMPS]), Path(other[STAMPS])}
    assert [*tmp_path.iterdir()] == [young]


def test_the_recorder_is_set_but_for_what_the_user_has_set(tmp_path, monkeypatch):
    monkeypatch.setattr("os.environ", found := {STAMPS: "/dev/shm/stamps"})
    set_flight_recorder(None)
    before = {
        STAMPS: "/dev/shm/stamps",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/dev/shm/stamps/flight_recorder.",
    }
    assert found == before
    set_flight_recorder(tmp_path)  # the folder is known now
    assert found == {**before, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight_recorder.rank"}
    mine = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/rank_",
    }
    monkeypatch.setattr("os.environ", found := dict(mine))
    set_flight_recorder(tmp_path)
    assert found == mine


def test_workers_with_a_pipe_dump_when_they_are_asked(stamps, logs, monkeypatch):
    monkeypatch.setattr("os.environ", {})

    def dump_when_asked(pipe: int, dump: Path) -> None:
        os.read(pipe, 128)
        dump.write_bytes(b"dump")

    for rank in (0, 1, 2):
        os.mkfifo(pipe := stamps / f"flight_recorder.{rank}.pipe")
        if rank != 1:  # that one is of a worker that is gone
            asked = os.open(pipe, os.O_RDWR), logs / f"{NAME}{rank}"
            threading.Thread(target=dump_when_asked, args=asked, daemon=True).start()
    ask_for_dumps(stamps, range(4), logs)
    assert dumps_since(0.0, logs) == {rank: logs / f"{NAME}{rank}" for rank in (0, 2)}


def test_an_error_names_the_dumps_of_its_job_in_the_order_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("os.environ", {})
    for rank in (10, 2, 0):
        (tmp_path / f"{NAME}{rank}").write_bytes(b"dump")
    os.utime(tmp_path / f"{NAME}0", (100, 100))  # of a job before
    (tmp_path / f"{NAME}2.txt").touch()
    failure = failures.Failure(1, "node7", "killed by SIGABRT", 0.0, -6, "job/0", str(tmp_path / "rank1.log"))
    assert str(failure.raised(tmp_path, 1000.0)).splitlines() == [
        "rank 1 on node7: killed by SIGABRT",
        f"  torch's flight recorder has the last collectives of each rank: {NAME}2, {NAME}10 in {tmp_path}",
        f"  to compare them: torchfrtrace {tmp_path} --prefix {NAME}",
    ]
