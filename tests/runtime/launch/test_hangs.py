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

from graphmoe.runtime.launch import failures
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


@pytest.fixture
def limits(monkeypatch) -> Iterator[list[tuple[str, float]]]:
    """The signs of life of this process: what it does, and how long it may take. Its clock is ``now``."""
    found: list[tuple[str, float]] = []
    monkeypatch.setattr(
        "graphmoe.runtime.launch.stamps.put_stamp",
        lambda phase, limit_s, step: found.append((phase, limit_s)),
    )
    return found


@pytest.fixture
def at(monkeypatch):
    return lambda now: monkeypatch.setattr("time.monotonic", lambda: float(now))


def test_steps_have_a_limit_once_metrics_of_a_step_without_compilation_were_read(limits, at):
    heartbeat = Heartbeat(45, first_steps=1)
    for number, began in enumerate((0, 300, 301, 302), start=1):  # the first compiles for five minutes
        at(began)
        heartbeat.step(number)
        if number in (1, 3):
            heartbeat.has_read()
    assert limits == [("step 1", SLOW_S), ("step 2", SLOW_S), ("step 3", SLOW_S), ("step 4", 45)]


def test_steps_that_begin_anew_have_no_limit_until_metrics_of_a_later_one_were_read(limits, at):
    heartbeat = Heartbeat(45, first_steps=1)
    for number in (1, 2, 3):
        at(number)
        heartbeat.step(number)
        heartbeat.has_read()
    heartbeat.restart("step 2, again with more room")  # compiles for five minutes
    for number, began in enumerate((304, 305, 306), start=4):
        at(began)
        heartbeat.step(number)
        heartbeat.has_read()
    assert [limit for _, limit in limits] == [SLOW_S, SLOW_S, 45, SLOW_S, SLOW_S, SLOW_S, 45]


def test_a_validation_has_a_limit_from_the_second_on_and_an_error_must_get_out_soon(limits, at):
    heartbeat = Heartbeat(45, first_steps=1)
    at(0)
    heartbeat.validation()
    at(20)
    heartbeat.step(1)
    heartbeat.validation()
    heartbeat.leave(RuntimeError, RuntimeError("the cause"), None)
    assert limits[0] == ("the validation after step 0", SLOW_S)
    assert limits[2:] == [("the validation after step 1", 60), ("what follows RuntimeError: the cause", 45)]


@pytest.fixture
def stamps(tmp_path) -> Path:
    folder = tmp_path / "stamps"
    folder.mkdir()
    return folder


@pytest.fixture
def workers(stamps) -> Iterator:
    started = []

    def start(rank: int, file: str, limit_s: float, call: str = "time.sleep(600)") -> subprocess.Popen[str]:
        environment = {**os.environ, STAMPS: str(stamps), "RANK": str(rank), "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", WORKER, str(limit_s), file, call]
        pipe = subprocess.PIPE
        worker = subprocess.Popen(
            words, env=environment, stdout=pipe, text=True, start_new_session=True, cwd=ROOT
        )
        started.append(worker)
        assert worker.stdout is not None and worker.stdout.readline() == "there\n"
        return worker

    yield start
    for worker in started:
        worker.kill()
        worker.wait()


def test_the_hanging_rank_that_waits_for_nobody_is_named(tmp_path, stamps, workers):
    (logs := tmp_path / "logs").mkdir()
    both = [workers(0, "/x/sums.py", 0.2, "wait_for(lambda: time.sleep(600))"), workers(1, "/x/mine.py", 600)]
    watch = HangWatch(stamps, timeout_s=0.2)
    while both[0].poll() is None:
        watch.look("job/0", logs)
    assert [worker.wait(10) for worker in both] == [-9, -9]
    first = failures.first_failure({}, logs, "job/0")
    assert first is not None and first.rank == 1 and not first.suffered
    assert not first.was_killed  # which could be taken for the end of a job that was asked to stop
    one, other = first.message.splitlines()
    assert one.endswith(" in step 3: it is at /x/mine.py:1 (<module>)"), one
    assert other.startswith("  rank 0 is in step 3: it waits for other ranks or the device at ")
    assert other.endswith(" at /x/sums.py:1 (<lambda>)"), other
    assert "most recent call first" in (logs / "rank0.log").read_text()


def test_a_process_that_is_stopped_hangs_whatever_it_does(tmp_path, stamps, workers):
    (logs := tmp_path / "logs").mkdir()
    worker = workers(0, "/x/mine.py", 600)
    psutil.Process(worker.pid).suspend()
    watch = HangWatch(stamps, timeout_s=0.5)
    while worker.poll() is None:
        watch.look("job/0", logs)
    first = failures.first_failure({}, logs, "job/0")
    assert first is not None and first.message.endswith(": its process is stopped, as SIGSTOP does")


def test_no_worker_counts_as_hanging_once_another_is_gone(tmp_path, stamps, workers):
    (logs := tmp_path / "logs").mkdir()
    gone, late = workers(0, "/x/mine.py", 600), workers(1, "/x/mine.py", 0.0)
    watch = HangWatch(stamps, timeout_s=0.2)
    watch.look("job/0", logs)
    gone.kill()
    gone.wait()
    for _ in range(20):
        watch.look("job/0", logs)
    assert late.poll() is None and not failures.error_file(logs, 1).exists()


def test_time_in_which_the_watch_was_suspended_counts_for_nobody(tmp_path, stamps, workers, monkeypatch):
    (logs := tmp_path / "logs").mkdir()
    worker = workers(0, "/x/mine.py", 30)
    watch = HangWatch(stamps, timeout_s=30)
    watch.look("job/0", logs)
    began = watch._looked
    monkeypatch.setattr("time.monotonic", lambda: began + 3600)
    watch.look("job/0", logs)
    assert worker.poll() is None


def test_the_folder_of_a_launcher_that_was_killed_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = (
        "import os\n"
        "from graphmoe.runtime.launch.hangs import watching\n"
        "with watching(9.0): os.kill(os.getpid(), 9)"
    )
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


NAMES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (*NAMES, STAMPS):
        monkeypatch.setenv(name, "")  # so that it is taken away afterwards, whoever sets it
        del os.environ[name]


def found() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_the_file_is_named_when_the_folder_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv(STAMPS, "/dev/shm/stamps")
    set_flight_recorder(None)
    before = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/dev/shm/stamps/flight_recorder.",
    }
    assert found() == before
    set_flight_recorder(tmp_path)
    assert found() == {**before, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight_recorder.rank"}


def test_what_the_user_has_set_by_either_name_stays(tmp_path, monkeypatch):
    mine = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/rank_",
    }
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    set_flight_recorder(tmp_path)
    assert found() == mine


class Worker(threading.Thread):
    """Thread that makes the pipe as torch does, and dumps when something comes."""

    def __init__(self, stamps: Path, log_dir: Path, rank: int, takes_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        pipe = stamps / f"flight_recorder.{rank}.pipe"
        os.mkfifo(pipe)
        self.pipe = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.takes_s = takes_s
        self.dump, self.stop = log_dir / f"{NAME}{rank}", threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.05):
            if os.read(self.pipe, 128):
                time.sleep(self.takes_s)
                self.dump.write_bytes(b"dump")
                break
        os.close(self.pipe)


def test_workers_with_a_pipe_dump_when_they_are_asked(tmp_path):
    (stamps := tmp_path / "stamps").mkdir()
    (logs := tmp_path / "logs").mkdir()
    workers = [Worker(stamps, logs, rank) for rank in (0, 2)]
    for worker in workers:
        worker.start()
    os.mkfifo(stamps / "flight_recorder.1.pipe")  # of a worker that is gone
    ask_for_dumps(stamps, range(4), logs)
    assert dumps_since(0.0, logs) == {0: workers[0].dump, 2: workers[1].dump}
    for worker in workers:
        worker.join(5)


def test_an_error_names_the_dumps_of_its_job_in_the_order_of_ranks(tmp_path):
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
